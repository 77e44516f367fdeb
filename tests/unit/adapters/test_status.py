"""`tandem status`: what it says of a disk tier that failed, of adapters and of tenants, from a real Redis."""

import asyncio
import dataclasses
import re
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import pytest

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.fleet.fleet_view import GroupRecord, StartFailure, report_start_failure
from tandem.cluster.fleet.gateway_records import GatewayRecord
from tandem.cluster.fleet.group_events import GroupEvent, write_event
from tandem.cluster.fleet.group_reports import AdapterReport, GroupReport
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.process.run_files import RunFile
from tandem.cluster.ray_private.application_state import ApplicationState
from tandem.cluster.routing.residency import adapter_key
from tandem.cluster.scaling.scaling_watch import ScalingReport, write_scaling
from tandem.cluster.service.application import Application
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient, RequestClient
from tandem.cluster.tenants.quota import Quota
from tandem.cluster.tenants.store import TenantStore
from tandem.workers.engine.base.draft_record import DraftStats
from tandem.workers.engine.base.stats import OffloadStats
from tests.support.fake_engine import FakeEngine
from tests.support.verbs import invoked
from tests.unit.tenants.tenant_rig import Named

PIRATE, SHOUT = "a" * 64, "b" * 64


def prepare(url: str) -> None:
    """One group that holds one of two adapters; a tenant with two requests at a live gateway, one at a dead one; one
    whose requests nobody counts; one that is idle."""

    async def write() -> None:
        redis = BackgroundClient(url)
        await redis.command("FLUSHALL")
        await redis.command("SET", keys.SENTINEL, "1")
        adapters = AdapterList(redis, "demo")
        for name, digest in (("pirate", PIRATE), ("shout", SHOUT)):
            await adapters.replace(None, AdapterEntry(name=name, digest=digest, source="/a"), name)
        report = AdapterReport(on_device=[adapter_key(PIRATE)])
        counts = ("block_bytes", "host_slots", "host_blocks", "failed_blocks", "swapped_out", "recomputed")
        offload = OffloadStats(
            **dict.fromkeys(counts, 0), loaded_tokens=0, blocks={}, copy_s={}, disk_disabled="No space left on device"
        )
        drafts = DraftStats(10, 4000, 1310, (10, 20))
        stats = msgspec.msgpack.encode(dataclasses.replace(FakeEngine(None).stats(), offload=offload, drafts=drafts))
        record = GroupRecord(group="g0", life=1, model="demo", state="serving", host="h", pid=1)
        given = GroupReport(group="g0", model="demo", adapters=report, stats=stats, rank_pids=[7])
        await redis.command("SADD", keys.groups("s"), "g0")
        await redis.command("SET", keys.group("s", "g0"), msgspec.msgpack.encode(record))
        await redis.command("SET", keys.group_report("s", "g0"), msgspec.msgpack.encode(given))
        store = TenantStore(redis)
        for name, limits in (("acme", {"concurrency": 5}), ("free", {"weight": 2}), ("idle", {"kv_share": 0.5})):
            await store.add(name, limits)
        long_ago_ms = int(time.time() * 1000) - 60_000
        await run_requests(url, Named((await store.read()).values), "dead", {"acme": 1}, lambda: long_ago_ms)
        soon_ms = long_ago_ms + 120_000  # its lease lasts as long as the test may take
        await run_requests(url, Named((await store.read()).values), "live", {"acme": 2, "free": 3}, lambda: soon_ms)
        await redis.close()

    asyncio.run(write())


async def write(url: str, command: Callable[[BackgroundClient], Awaitable[object]]) -> None:
    redis = BackgroundClient(url)
    await command(redis)
    await redis.close()


async def run_requests(
    url: str, tenants: Named, gateway: str, counts: Mapping[str, int], server_ms: Callable[[], int]
) -> None:
    """What a gateway tells Redis of so many requests of each tenant, which never end."""
    client = RequestClient(lambda: url, timeout_s=20.0)
    quota = Quota(client, tenants, gateway, server_ms=server_ms)
    for name, count in counts.items():
        for _ in range(count):
            await quota.admit(name, 1, 1)
    await client.close()


def test_adapters_and_tenants_have_a_line_each(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(server.url)
    run = RunFile(pid=1, started_at=0.0, url="http://x", model="demo", service_id="s", redis_url=server.url)
    monkeypatch.setattr("tandem.cluster.process.run_files.read_run_files", lambda: [run])
    lines = invoked(["status"], catch_exceptions=False).output.splitlines()
    assert lines[0] == "demo on http://x (pid 1)"
    assert lines[1].startswith("  group g0")
    assert lines[2:] == [
        "    drafts accepted 1,310 of 4,000 since its start",
        "    --kv-disk-path was switched off: No space left on device",
        "  adapters 2: pirate@aaaaaaaaaaaa device 1, shout@bbbbbbbbbbbb at its source",
        "  tenants 3: acme running 2, free, idle running 0",
    ]
    report = ScalingReport(groups=3, why="queue 41k tokens = 6.2 s > 2 s", held=2)
    asyncio.run(write(server.url, lambda redis: write_scaling(redis, "s", report)))
    lines = invoked(["status"], catch_exceptions=False).output.splitlines()
    assert lines[1] == "  groups wanted 3  held 2: queue 41k tokens = 6.2 s > 2 s" and lines[2].startswith("  group g0")
    asyncio.run(write(server.url, lambda redis: redis.command("DEL", keys.scaling("s"))))
    monkeypatch.setattr(
        "tandem.cluster.process.run_files.read_run_files", lambda: [msgspec.structs.replace(run, stopping=True)]
    )
    lines = invoked(["status"], catch_exceptions=False).output.splitlines()
    assert lines[0] == "demo on http://x (pid 1), stopping" and lines[1].startswith("  group g0")


def test_a_service_of_ray_serve_is_named_by_its_application(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(server.url)
    asked: list[tuple[str, str]] = []

    def find(app: str, address: str) -> Application:
        asked.append((app, address))
        return Application("s", server.url, addresses={"h": "10.0.0.2"})

    monkeypatch.setattr("tandem.cluster.service.application.find_application", find)
    verb = ["status", "--app", "tandem", "--address", "head:6379"]
    lines = invoked(verb, catch_exceptions=False).output.splitlines()
    assert asked == [("tandem", "head:6379")]
    assert (
        lines[0] == "application tandem"
        and lines[1].startswith("  group g0")
        and "  node 10.0.0.2  pid 1  " in lines[1]
    )
    assert lines[4].startswith("  adapters 2: pirate@aaaaaaaaaaaa device 1"), "of the model that its groups serve"
    assert _title(monkeypatch, server.url, ApplicationState("RUNNING", "", {})) == "application tandem"
    assert _title(monkeypatch, server.url, ApplicationState("DEPLOYING", "", {})) == "application tandem: updating"
    failed = ApplicationState("DEPLOY_FAILED", "", {"c": "Error:\nRuntimeError: no layers\n"})
    assert _title(monkeypatch, server.url, failed) == (
        "application tandem: the new version did not start: RuntimeError: no layers; the one before serves on"
    )
    both = invoked([*verb, "--url", "http://x"])
    assert both.exit_code and "not by both" in str(both.exception)


def _title(monkeypatch: pytest.MonkeyPatch, url: str, state: ApplicationState) -> str:
    """The first line for an application in this state."""
    return _lines(monkeypatch, url, state)[0]


def _lines(monkeypatch: pytest.MonkeyPatch, url: str, state: ApplicationState) -> list[str]:
    found = Application("s", url, state, {"h": "10.0.0.2"})
    monkeypatch.setattr("tandem.cluster.service.application.find_application", lambda app, address: found)
    return invoked(["status", "--app", "tandem"], catch_exceptions=False).output.splitlines()


def test_held_requests_and_leaving_gateways_are_shown(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(server.url)
    common = {"host": "h", "ready": True, "metrics": b"", "tenant_metrics": b""}
    old = GatewayRecord(gateway="g1", pid=3, in_flight=20, held=12, is_leaving=True, **common)
    new = GatewayRecord(
        gateway="g2", pid=4, in_flight=0, refused="user_config: port does not change", routing_policy="joint", **common
    )

    async def write() -> None:
        redis = BackgroundClient(server.url)
        for record in (old, new):
            await redis.command("SADD", keys.gateways("s"), record.gateway)
            await redis.command("SET", keys.gateway("s", record.gateway), msgspec.msgpack.encode(record))
        await redis.close()

    asyncio.run(write())
    state = ApplicationState("DEPLOYING", "", {})
    assert _title(monkeypatch, server.url, state) == "application tandem: updating, 12 held"
    lines = invoked(["status", "--app", "tandem"], catch_exceptions=False).output.splitlines()
    assert lines[1:4] == [
        "  gateway g1  requests in flight 20  node 10.0.0.2  pid 3  leaving",
        "  gateway g2  requests in flight 0  routing joint  node 10.0.0.2  pid 4",
        "    user_config: port does not change",
    ]


def test_why_no_group_serves_is_shown_until_one_does(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(server.url)
    state = ApplicationState("RUNNING", "", {})
    failure = StartFailure(part="group g9", message="no memory for its weights")
    loading = GroupRecord(group="g0", life=1, model="demo", state="loading", host="gone", pid=1)
    asyncio.run(write(server.url, lambda redis: report_start_failure(redis, "s", failure)))
    killed = GroupEvent("lost", "g8", "rank 0 was killed by SIGKILL")
    asyncio.run(write(server.url, lambda redis: write_event(redis, "s", killed)))
    said = "  group g9 did not start: no memory for its weights"
    assert said not in _lines(monkeypatch, server.url, state)
    record = msgspec.msgpack.encode(loading)
    asyncio.run(write(server.url, lambda redis: redis.command("SET", keys.group("s", "g0"), record)))
    lines = _lines(monkeypatch, server.url, state)
    assert lines[1] == said and "  node gone  pid 1  " in lines[2]
    assert any(re.fullmatch(r"  groups lost 1 since the start; the last \d+ s ago: .*SIGKILL", line) for line in lines)
