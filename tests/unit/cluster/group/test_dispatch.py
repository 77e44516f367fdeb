"""Generations, ServeDispatch and EngineThread over real sockets, with fake engines: every way a request can end.

Also what else tells of groups: heartbeats through a Redis in memory, the watch over ranks, what the launcher looks at.
"""

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import ray
from ray.serve._private.common import DeploymentID
from ray.serve.request_router import ReplicaID

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.fleet.fleet_view import FleetView, channel_name, group_heartbeat
from tandem.cluster.gateway.generation import generation, serve_dispatch
from tandem.cluster.gateway.generation.draining_groups import DrainingGroups
from tandem.cluster.group import ray_ranks
from tandem.cluster.routing.route_hint import hint_of
from tandem.cluster.service import serve_app
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.cluster.wire.service_facts import APP, COORDINATOR
from tandem.configs.errors import SettingsError
from tandem.configs.schema import EngineSettings, ModelSettings
from tandem.workers.executor import rank_group
from tandem.workers.messages.errors import GroupLost, RequestRefused
from tandem.workers.messages.request import GenerationRequest, SamplingParams, TokenDelta
from tests.support.fake_engine import FakeEngine
from tests.support.fake_group import FakeFleet, FakeGroup, FakeHandle, serving
from tests.support.plain_generation import Client

SECRET = "ab" * 32


class SlowEngine(FakeEngine):
    """One token per millisecond or so, so that a test can act in between; no more steps than `most`, however long the
    test takes to act."""

    most = math.inf

    def turn(self, timeout_s: float) -> bool:
        time.sleep(0.002)  # this engine is slow
        return self.steps < self.most and super().turn(timeout_s)


class Service:
    """Two groups and a gateway's client."""

    def __init__(self, engine: type[FakeEngine] = FakeEngine) -> None:
        self.groups = [FakeGroup(SECRET, f"g{i}", engine) for i in range(2)]
        self.caller = FakeHandle(self.groups)
        self.fleet = FakeFleet(serving())
        self.client = Client(self.caller, self.fleet, SECRET, "127.0.0.1", "tandem")

    async def close(self) -> None:
        await self.client.close()
        for group in self.groups:
            group.close()


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    for group in service.groups:
        await group.wait_opened()
    yield service
    await service.close()


@pytest.fixture
async def slow_service() -> AsyncIterator[Service]:
    service = Service(SlowEngine)
    for group in service.groups:
        await group.wait_opened()
    yield service
    await service.close()


def request(request_id: str, max_tokens: int = 5, prompt: list[int] | None = None) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=prompt or [100], sampling=SamplingParams(max_tokens=max_tokens)
    )


async def read_all(stream: AsyncIterator[list[TokenDelta]]) -> list[TokenDelta]:
    async with asyncio.timeout(30):
        return [delta async for deltas in stream for delta in deltas]


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    assert [d.first_position for d in deltas if d.token_ids] == list(range(sum(len(d.token_ids) for d in deltas)))
    return [token for delta in deltas for token in delta.token_ids]


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def test_tokens_come_in_order_with_one_end_and_the_bill(service: Service) -> None:
    deltas = await read_all(await service.client.submit(request("r", 50)))
    assert tokens_of(deltas) == list(range(100, 150))
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
    assert deltas[-1].usage is not None and deltas[-1].usage.completion_tokens == 50
    await until(lambda: not service.client._parts)


async def test_requests_are_charged_what_is_expected_and_less_as_tokens_come(slow_service: Service) -> None:
    client, hints = slow_service.client, slow_service.caller.hints
    left: list[tuple[str, int]] = []
    client.view.correct = lambda request_id, tokens: left.append((request_id, tokens))
    await read_all(await client.submit(request("short", 30)))
    await until(lambda: not client._parts)
    slow_service.groups[0].engine.most = slow_service.groups[1].engine.most = 0
    stream = await client.submit(request("long", 5000, prompt=[100] * 10))
    await until(lambda: len(hints) == 2)
    assert [hint.cost_tokens for hint in hints] == [1 + 30, 10 + 30], "limits are no forecast"
    client.look_after()
    assert left == []
    for group in slow_service.groups:
        group.engine.most = math.inf
    assert await anext(stream)
    client.look_after()
    ((named, rest),) = left
    assert named == "long" and 0 < rest < 30
    client.refuse_all(RequestRefused("closing", code="service_unavailable", status=503))
    with pytest.raises(RequestRefused, match="closing"):
        await read_all(stream)


async def test_a_gateway_without_a_router_explains_no_route(service: Service) -> None:
    with pytest.raises(RequestRefused, match="knows no group yet") as refused:
        service.client.route_table(request("r"), hint_of(request("r")))
    assert refused.value.status == 503


async def test_refusing_all_ends_what_runs_and_what_comes_later(slow_service: Service) -> None:
    client = slow_service.client
    stream = await client.submit(request("r", 5000))
    first = await anext(stream)
    client.refuse_all(RequestRefused("closing", code="service_unavailable", status=503))
    with pytest.raises(RequestRefused, match="closing"):
        await read_all(stream)
    with pytest.raises(RequestRefused, match="closing"):
        await read_all(await client.submit(request("late")))
    assert first and slow_service.groups
    await until(lambda: not client._parts)


async def test_many_at_once_do_not_mix(service: Service) -> None:
    streams = [await service.client.submit(request(f"r{i}", 1 + i % 40, [1000 * i])) for i in range(200)]
    answers = await asyncio.gather(*(read_all(s) for s in streams))
    for i, deltas in enumerate(answers):
        assert tokens_of(deltas) == [1000 * i + k for k in range(1 + i % 40)]
    assert service.groups[0].requests and service.groups[1].requests


async def test_a_refusal_is_raised_with_its_words(service: Service) -> None:
    stream = await service.client.submit(request("r", prompt=[429]))
    with pytest.raises(RequestRefused, match="queue is full") as caught:
        await read_all(stream)
    assert (caught.value.status, caught.value.code) == (429, "slow_down")


async def test_a_gateway_that_knows_no_group_asks_the_router(service: Service) -> None:
    """Its Redis may be empty, and another gateway may have seen the first group before it."""
    service.fleet.records = {}
    assert not service.client.ready()
    assert len(tokens_of(await read_all(await service.client.submit(request("r"))))) == 5


async def test_a_gateway_that_starts_without_redis_asks_the_router(service: Service) -> None:
    service.fleet.records, service.fleet.redis_unavailable = {}, True
    assert len(tokens_of(await read_all(await service.client.submit(request("r"))))) == 5


class MemoryRedis:
    """As much of Redis as the registry uses, on the test's clock; `flush()` and `unavailable` are what the world
    does."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.unavailable = False
        self._clock = clock
        self.flush()

    def flush(self) -> None:
        self._values: dict[str, tuple[bytes | str, float]] = {}
        self._sets: dict[str, set[str]] = {}

    async def command(self, *parts: Any) -> Any:
        await asyncio.sleep(0)
        if self.unavailable:
            raise RedisUnavailable("frozen")
        match parts:
            case ("SMEMBERS", key):
                return set(self._sets.get(key, ()))
            case ("MGET", *names):
                return [self._get(name) for name in names]
            case ("SET", key, value, "PX", ttl_ms):
                self._values[key] = (value, self._clock() + ttl_ms / 1000)
            case ("SET", key, value, "NX" | "XX" as when):
                if (self._get(key) is None) == (when == "NX"):
                    self._values[key] = (value, float("inf"))
            case ("SADD", key, member):
                self._sets.setdefault(key, set()).add(member)
            case ("SREM", key, *members):
                self._sets.get(key, set()).difference_update(members)
            case ("EXPIRE", _, _):
                pass
            case _:
                raise AssertionError(parts)
        return 1

    async def pipeline(self, commands: list[list[Any]]) -> list[Any]:
        return [await self.command(*parts) for parts in commands]

    def _get(self, key: str) -> bytes | str | None:
        value, expires_s = self._values.get(key, (None, 0.0))
        return value if self._clock() < expires_s else None


async def test_no_request_is_refused_through_a_flush_and_an_outage(service: Service) -> None:
    """A request each quarter of a second of a minute in which Redis is emptied, frozen for longer than a TTL, both."""
    now_s = 1000.0
    redis = MemoryRedis(lambda: now_s)
    fleet = FleetView(redis, "s", lambda: asyncio.sleep(0), clock=lambda: now_s)
    heartbeats = [group_heartbeat(redis, "s", lambda r=serving(g)[g]: r) for g in ("g0", "g1")]
    client = Client(service.caller, fleet, SECRET, "127.0.0.1", "tandem")
    for heartbeat in heartbeats:
        await heartbeat.send_heartbeat()
    await fleet.refresh()
    for tick in range(240):
        now_s += 0.25
        redis.unavailable = tick in range(60, 85) or tick in range(150, 155)
        if tick in (21, 152):  # just after a heartbeat, so that the next one is far
            redis.flush()
        if tick % 4 == 0:
            for heartbeat in heartbeats:
                try:
                    await heartbeat.send_heartbeat()
                except RedisUnavailable:
                    pass
        if tick % 2 == 1:
            await fleet.refresh()
        assert client.ready(), f"tick {tick}"
        assert set(fleet.records) == {"g0", "g1"}, f"tick {tick}"
        assert len(tokens_of(await read_all(await client.submit(request(f"r{tick}"))))) == 5
    assert not fleet.redis_unavailable
    now_s += keys.GROUP_RECORD_TTL_MS / 1000
    await fleet.refresh()
    assert not client.ready(), "groups without a heartbeat are gone"
    await client.close()


class StuckEngine(FakeEngine):
    """Takes requests; no step ends until `go`."""

    go = False

    def turn(self, timeout_s: float) -> bool:
        return self.go and super().turn(timeout_s)


class StuckGroup(FakeGroup):
    """A group whose thread lives on the test's clock."""

    def __init__(self, clock: Callable[[], float], engine: Callable[[Any], Any] = StuckEngine) -> None:
        super().__init__(SECRET, "stuck", engine)
        self.close()
        self.thread = self.started(SECRET, "stuck", clock)


async def test_a_busy_group_without_progress_is_not_ready() -> None:
    now_s = 50.0
    group = StuckGroup(lambda: now_s)
    await group.wait_opened()
    fleet = FakeFleet(serving())
    client = Client(FakeHandle([group]), fleet, SECRET, "127.0.0.1", "tandem")

    def ready() -> bool:
        """As the next heartbeat says."""
        fleet.records = {
            name: msgspec.structs.replace(record, stalled_s=group.thread.stalled_s())
            for name, record in fleet.records.items()
        }
        return client.ready()

    now_s += 3600
    assert ready(), "an idle group owes no progress"
    reading = asyncio.create_task(read_all(await client.submit(request("r"))))
    await until(lambda: group.thread._engine_loop.is_busy)
    now_s += 9
    assert ready()
    now_s += 2
    assert not ready()
    await until(lambda: group.thread.stuck_s() == 0.0)  # its thread comes round; it is the steps that do not end
    moved = await client.submit(request("other"))  # slow is not gone: the router decides
    group.engine.go = True
    assert len(tokens_of(await reading)) == 5
    await read_all(moved)
    await until(ready)
    await client.close()
    group.close()


async def test_progress_is_owed_from_the_moment_at_which_there_is_work() -> None:
    """However long the thread was kept from noticing it."""
    now_s = 50.0

    class NoticingEngine(StuckEngine):
        def has_work(self) -> bool:
            nonlocal now_s
            found = super().has_work()
            now_s += 0 if not found or group.thread._engine_loop.is_busy else 3600
            return found

    group = StuckGroup(lambda: now_s, NoticingEngine)
    await group.wait_opened()
    group.thread.submit(request("r"), lambda ended: None)
    await until(lambda: group.thread._engine_loop.is_busy)
    assert now_s == 3650.0
    assert group.thread.stalled_s() == 0.0
    now_s += 11
    assert group.thread.stalled_s() == 11.0
    group.close()


async def test_a_thread_that_does_not_come_round_shows_it() -> None:
    now_s = 50.0
    go_on = threading.Event()

    class HangingEngine(FakeEngine):
        def turn(self, timeout_s: float) -> bool:
            assert go_on.wait(60)
            return super().turn(timeout_s)

    group = FakeGroup(SECRET, "hanging", HangingEngine)
    group.close()
    group.thread = group.started(SECRET, "hanging", lambda: now_s)
    await group.wait_opened()
    now_s += 3600
    assert group.thread.stuck_s() == 0.0, "it sleeps because there is no work"
    group.thread.submit(request("r"), lambda ended: None)
    await until(lambda: group.thread._engine_loop.is_busy)
    now_s += 61
    assert group.thread.stuck_s() == 61.0
    go_on.set()
    await until(lambda: group.thread.stuck_s() == 0.0)
    group.close()


async def test_metrics_are_of_groups_and_of_adapters_where_they_are_served(service: Service) -> None:
    adapters = AdapterService(AdapterList(None, "demo"), lambda source: "", ("demo",))
    parts = [FakeHandle([]), service.fleet, SECRET, "127.0.0.1", "vllm"]
    plain, serving_adapters = Client(*parts), Client(*parts, lambda: adapters)
    text, more = await plain.metrics(with_tenants=False), await serving_adapters.metrics(with_tenants=False)
    assert text.startswith("# HELP vllm:num_requests_running ") and "\nvllm:redis_away 0.0\n" in text
    assert text.endswith("\nvllm:group_losses_total 0.0\n"), "known from 0 on"
    assert more.startswith(text) and more.endswith("\nvllm:adapters_listed 0.0\n")
    adapters.close()
    for client in (plain, serving_adapters):
        await client.close()


async def test_senders_that_have_left_are_forgotten(service: Service) -> None:
    names = [channel_name("g", life) for life in range(3)]
    groups = [FakeGroup(SECRET, name) for name in names]
    caller = FakeHandle(groups)
    client = Client(caller, service.fleet, SECRET, "127.0.0.1", "tandem")
    for life, group in enumerate(groups):
        await group.wait_opened()
        service.fleet.records = {"g": msgspec.structs.replace(serving()["g"], life=life)}
        await read_all(await client.submit(request(f"r{life}")))
        await until(lambda: not client._parts)
    assert set(client._receiver._next_number) == {names[-1].encode()}
    assert len(tokens_of(await read_all(await client.submit(request("again"))))) == 5, "one that was not gone after all"
    await client.close()
    for group in groups:
        group.close()


class Wordless(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, "rank 1 of group g has ended"),
        (True, "rank 1 of group g was told to end"),
        (ray.exceptions.RayActorError(), "rank 1 of group g has died (exit status or signal unknown)"),
        (ray.exceptions.OutOfMemoryError("low"), "rank 1 of group g was killed by Ray, as its node was nearly out of"),
        (ray.exceptions.RayTaskError("f", "traceback", Wordless()), "rank 1 of group g failed: Wordless"),
        (ray.exceptions.RayTaskError("f", "traceback", Wordless("\n one\ntwo")), "rank 1 of group g failed: one"),
        (ray.exceptions.WorkerCrashedError(), "rank 1 of group g failed: "),
        (Wordless(), "rank 1 of group g failed: Wordless"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_rank_that_ends_is_reported_however_it_ends(
    error: Exception | bool | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(run: object) -> object:
        if isinstance(error, Exception):
            raise error
        return error

    monkeypatch.setattr(ray, "wait", lambda runs, num_returns, **_: ([runs[1]], [runs[0]]))
    monkeypatch.setattr(ray, "get", get)
    told: list[str] = []
    ranks = ray_ranks.RayRanks(2, None, "g", None, told.append, lambda: told.append("as planned"))
    ranks._watch(["run 0", "run 1"])
    if error is True:
        assert told.pop(0) == "as planned", "before anybody can take it for a loss"
    assert len(told) == 1 and told[0].startswith(words)
    assert ranks.lost() == told[0]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("was killed by SIGKILL", "was killed by SIGKILL"),
        (None, "has died (exit status or signal unknown: this kernel does not tell)"),
    ],
)
def test_a_dead_rank_is_reported_with_what_the_kernel_tells(
    told: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is opened as soon as it is known; Ray does not know how one has ended."""
    pids, asked, watched = iter([(), (), (7, None), (7, None), (7, None)]), [], []
    monkeypatch.setattr(ray_ranks.ExitWatch, "watch", lambda self, pid: watched.append(pid))
    monkeypatch.setattr(ray_ranks.ExitWatch, "how_it_ended", lambda self, pid: told)

    def wait(runs: list[str], num_returns: int, timeout: float | None = None) -> tuple[list[str], list[str]]:
        asked.append(timeout)
        return ([], runs) if timeout else ([runs[0]], [runs[1]])

    def get(run: object) -> object:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    said: list[str] = []
    ranks = ray_ranks.RayRanks(2, None, "g", None, said.append, lambda: None, lambda: next(pids))
    ranks._watch(["run 0", "run 1"])
    assert said == [f"rank 0 of group g {words}"] and watched == [7] and asked[-1] is None and len(asked) == 3


@pytest.mark.parametrize("resources", [{"CPU": 0.1}, {"GPU": 1.0, "CPU": 1.0}])
def test_a_rank_asks_ray_for_its_part_of_its_bundle(
    resources: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = mock.MagicMock()
    monkeypatch.setattr(ray, "remote", remote)
    ranks = ray_ranks.RayRanks(
        3, None, "g", ray_ranks.RankPlaces(None, [4, 2, 2], resources), lambda message: None, lambda: None
    )
    for rank, bundle in enumerate([4, 2]):
        ranks.start(rank, "endpoint", "secret")
        asked = remote(ray_ranks.RankActor).options.call_args.kwargs
        assert (asked["num_cpus"], asked["num_gpus"]) == (resources["CPU"], resources.get("GPU", 0))
        assert asked["scheduling_strategy"].placement_group_bundle_index == bundle


def test_a_watch_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(runs: object, num_returns: int, timeout: float) -> None:
        raise Wordless

    monkeypatch.setattr(ray, "wait", wait)
    told: list[str] = []
    ray_ranks.RayRanks(1, None, "g", None, told.append, lambda: None)._watch(["run 0"])
    assert told == ["the ranks of group g can no longer be watched: Wordless"]


def test_a_frozen_rank_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "wait", lambda runs, num_returns, **_: (runs, []))
    monkeypatch.setattr(ray, "get", lambda run: None)
    monkeypatch.setattr(ray.util, "placement_group_table", lambda group: {"bundles_to_node_id": {0: "a node"}})
    told: list[str] = []
    settings = EngineSettings(model=ModelSettings(model="m"))
    facts = types.SimpleNamespace(secret="s", max_groups=1, host_socket=None, device="cpu")
    group = ray_ranks.ray_group(settings, facts, "g", None, "127.0.0.1", told.append, lambda: None)
    group.report("rank 0 is frozen")
    group.launcher._watch(["run 0"])  # it was killed, and so has ended
    assert told == ["rank 0 is frozen"] and group.lost() == told[0]


def test_only_a_rank_of_the_group_is_killed() -> None:
    script = "import setproctitle, time; setproctitle.setproctitle('tandem rank g1 tp0 pp0'); print(1, flush=True)"
    process = subprocess.Popen([sys.executable, "-c", f"{script}; time.sleep(60)"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        rank_group.kill_rank(process.pid, "g")
        rank_group.kill_rank(os.getpid(), "g1")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        rank_group.kill_rank(process.pid, "g1")
        assert process.wait(30) == -signal.SIGKILL
        rank_group.kill_rank(process.pid, "g1")
    finally:
        process.kill()
        process.communicate()


def test_only_placement_groups_of_our_groups_end_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(deployment: str, app: str) -> str:
        return ReplicaID("abc", DeploymentID(deployment, app)).to_full_id_str()

    waiting = {"state": "PENDING", "strategy": "PACK", "bundles": {0: {"CPU": 99.0}}}
    others = ["", "train", name(COORDINATOR, "other"), name(COORDINATOR, f"{APP}-1"), name("other", APP)]
    table = {str(i): waiting | {"name": other} for i, other in enumerate(others)}
    monkeypatch.setattr(ray.util, "placement_group_table", lambda: table)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 4.0})
    serve_app.raise_unplaced(APP)
    table["ours"] = waiting | {"name": name(COORDINATOR, APP)}
    with pytest.raises(SettingsError, match="CPU 99"):
        serve_app.raise_unplaced(APP)


async def test_closing_the_stream_aborts_the_request(slow_service: Service) -> None:
    stream = await slow_service.client.submit(request("r", 10_000))
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    await until(lambda: not slow_service.groups[0].engine.live)
    await until(lambda: not slow_service.client._parts)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_closing_before_the_first_token_cancels_the_call(slow_service: Service) -> None:
    stream = await slow_service.client.submit(request("r", 10_000))
    await stream.aclose()
    await until(lambda: not slow_service.client._parts)
    await until(lambda: not slow_service.groups[0].calls)
    await until(lambda: not slow_service.groups[0].engine.live)


async def test_an_abort_with_kept_positions_ends_with_the_bill(slow_service: Service) -> None:
    stream = await slow_service.client.submit(request("r", 10_000))
    got: list[TokenDelta] = []
    async with asyncio.timeout(30):
        async for deltas in stream:
            got += deltas
            if sum(len(d.token_ids) for d in got) == 3:
                stream.generation.stop_choice(stream.part, 0, 2)
    assert got[-1].usage is not None and got[-1].usage.completion_tokens == 2
    assert got[-1].finish_reason is not None


async def test_a_group_that_dies_hands_over_without_gap_or_duplicate(slow_service: Service) -> None:
    slow_service.groups[0].engine.most = 100
    stream = await slow_service.client.submit(request("r", 200))
    got = await anext(stream)
    while len(got) < 20:
        got += await anext(stream)
    slow_service.groups[0].die()
    got += await read_all(stream)
    assert tokens_of(got) == list(range(100, 300))
    assert slow_service.client.counts.moves == 1
    (moved,) = slow_service.groups[1].requests
    assert moved.attempt == 1
    assert 20 <= len(moved.resume_token_ids[0]) < 200
    assert sum(d.finish_reason is not None for d in got) == 1


async def test_what_is_left_of_a_deadline_moves_along_and_ends_with_the_first_token(slow_service: Service) -> None:
    slow_service.groups[0].engine.most = 100
    stream = await slow_service.client.submit(msgspec.structs.replace(request("r", 200), deadline_s=60.0))
    await anext(stream)
    slow_service.groups[0].die()
    await read_all(stream)
    (moved,) = slow_service.groups[1].requests
    assert moved.deadline_s is None, "who has had a token is not sent away for waiting"

    waiting = Service(SlowEngine)
    for group in waiting.groups:
        await group.wait_opened()
    waiting.groups[0].engine.most = 0
    stream = await waiting.client.submit(msgspec.structs.replace(request("queued"), deadline_s=60.0))
    await until(lambda: waiting.groups[0].engine.live)
    waiting.groups[0].die()
    await read_all(stream)
    (second,) = waiting.groups[1].requests
    assert second.deadline_s is not None and 0 < second.deadline_s < 60.0 - generation.REDISPATCH_S
    await waiting.close()


class TalkativeEngine(SlowEngine):
    """Once `given_up`, what it says is wrong, and it says that for ever."""

    given_up = False

    def _next(self, request: GenerationRequest, position: int) -> TokenDelta:
        delta = super()._next(request, position)
        if not self.given_up:
            return delta
        return msgspec.structs.replace(delta, token_ids=[9999], finish_reason=None, usage=None)


async def test_tokens_of_a_group_that_was_given_up_are_ignored() -> None:
    """As one that was frozen and wakes up: its attempt is not the request's any more."""
    service = Service(TalkativeEngine)
    first = service.groups[0]
    for group in service.groups:
        await group.wait_opened()
    first.engine.most = 100
    stream = await service.client.submit(request("r", 200))
    got = await anext(stream)
    first.engine.given_up = True  # what is on its way may be wrong already: only the new group's words are looked at
    first.engine.most = math.inf
    for call in list(first.calls):
        call.set_exception(ConnectionResetError("no sign of life"))
    await until(lambda: service.groups[1].requests)
    (moved,) = service.groups[1].requests
    delivered = moved.resume_token_ids[0]
    said = first.engine.steps
    got += await read_all(stream)
    await until(lambda: first.engine.steps > said)  # it has talked on
    assert tokens_of(got) == delivered + list(range(100 + len(delivered), 300))
    await service.close()


class FreezingEngine(SlowEngine):
    """While `frozen` it lives and does nothing."""

    frozen = False

    def turn(self, timeout_s: float) -> bool:
        return not self.frozen and super().turn(timeout_s)


@pytest.fixture
async def freezing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    """Two groups with records; the first is frozen with a request of 200 tokens under way."""
    monkeypatch.setattr(serve_dispatch, "SILENT_S", 0.1)
    service = Service(FreezingEngine)
    for group in service.groups:
        group.close()
    service.groups[:] = [FakeGroup(SECRET, channel_name(name, 1), FreezingEngine) for name in ("g0", "g1")]
    for group in service.groups:
        await group.wait_opened()
    service.fleet.records = serving("g0") | serving("g1")
    yield service
    await service.close()


async def test_streams_of_a_group_that_is_missing_and_silent_move(freezing: Service) -> None:
    first, second = freezing.groups
    first.engine.most = 100
    stream = await freezing.client.submit(request("r", 200))
    got = await anext(stream)
    first.engine.frozen = True
    freezing.fleet.missing = [freezing.fleet.records.pop("g0")]

    def has_moved() -> list[GenerationRequest]:
        freezing.client.look_after()
        return second.requests

    await until(has_moved)
    got += await read_all(stream)
    assert tokens_of(got) == list(range(100, 300))
    assert second.requests[0].attempt == 1 and second.requests[0].resume_token_ids[0]
    assert freezing.caller.hints[-1].avoid == ("g0",), "so that the router sends it elsewhere"
    await until(lambda: not first.calls)  # should it thaw, it has nothing left to do
    first.engine.frozen = False


async def test_requests_without_a_row_move_with_those_that_have_one(freezing: Service) -> None:
    """The machine of a group vanishes before it has said a word of them; Serve's router tells where they went."""
    first, second = freezing.groups
    client = freezing.client
    first.engine.frozen = True
    waiting, other = [await client.submit(request(name, 20)) for name in ("waiting", "other")]
    await until(lambda: first.requests and second.requests)
    client.view.sent_to["waiting"] = "g0"  # where "other" goes it has not told yet
    freezing.fleet.missing = [freezing.fleet.records.pop("g0")]
    client.look_after()
    assert tokens_of(await read_all(waiting)) == list(range(100, 120))
    assert tokens_of(await read_all(other)) == list(range(100, 120))
    assert [(moved.request_id, moved.attempt) for moved in second.requests] == [("other", 0), ("waiting", 1)]
    assert freezing.caller.hints[-1].avoid == ("g0",) and client.counts.moves == 1
    await until(lambda: not first.calls and not client.view.sent_to)
    await waiting.aclose()
    await until(lambda: client.books.rows)
    (row,) = client.books.rows
    assert (row.prompt_tokens, row.completion_tokens) == (1, 20)


async def test_requests_without_a_row_leave_a_group_that_is_taken_down(freezing: Service) -> None:
    now_s, running = 100.0, {"g0", "g1"}
    client = freezing.client
    client._draining = DrainingGroups(lambda: running, 10.0, lambda: now_s)
    freezing.groups[0].engine.frozen = True
    waiting = await client.submit(request("r", 20))
    await until(lambda: freezing.groups[0].requests)
    client.view.sent_to["r"] = "g0"
    client.look_after()
    running.remove("g0")
    client.look_after()
    now_s += 7.0
    client.look_after()
    assert client._parts["r"].ended is None, "it may get its row yet"
    now_s += 1.0
    client.look_after()
    assert tokens_of(await read_all(waiting)) == list(range(100, 120))
    assert [moved.attempt for moved in freezing.groups[1].requests] == [1]


class LoopAt:
    """The loop, whose clock is the test's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now_s = 100.0
        self._loop = loop

    def time(self) -> float:
        return self.now_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


async def test_a_group_whose_record_is_missing_but_whose_tokens_come_keeps_its_streams(freezing: Service) -> None:
    loop = freezing.client.loop = LoopAt(freezing.client.loop)  # type: ignore[assignment]
    engine = freezing.groups[0].engine
    engine.most = 20
    stream = await freezing.client.submit(request("r", 300))
    got = await anext(stream)
    freezing.fleet.missing = [freezing.fleet.records.pop("g0")]
    reading = asyncio.create_task(read_all(stream))
    (sender,) = freezing.client._last_message_s
    for _ in range(5):
        loop.now_s += 0.9 * serve_dispatch.SILENT_S
        freezing.client.look_after()
        engine.most += 20
        await until(lambda: freezing.client._last_message_s[sender] == loop.now_s)  # it says more
    engine.most = math.inf
    assert tokens_of(got + await reading) == list(range(100, 400))
    assert not freezing.groups[1].requests


async def test_streams_stay_where_they_are_while_there_is_no_other_group(freezing: Service) -> None:
    """A second dispatch to the same frozen group would count as a second loss."""
    stream = await freezing.client.submit(request("r", 100))
    got = await anext(stream)
    freezing.groups[0].engine.frozen = True
    freezing.fleet.missing, freezing.fleet.records = list(freezing.fleet.records.values()), {}
    await asyncio.sleep(0.15)  # longer than a group may be silent here
    freezing.client.look_after()
    await asyncio.sleep(0.05)  # nothing comes: time for it to come
    freezing.client.look_after()
    freezing.groups[0].engine.frozen = False
    got += await read_all(stream)
    assert tokens_of(got) == list(range(100, 200)) and freezing.caller.made == 1


async def test_the_fleet_has_the_missing_groups_while_redis_answers() -> None:
    now_s = 1000.0
    redis = MemoryRedis(lambda: now_s)
    fleet = FleetView(redis, "s", lambda: asyncio.sleep(0), clock=lambda: now_s)
    heartbeats = {g: group_heartbeat(redis, "s", lambda r=serving(g)[g]: r) for g in ("g0", "g1")}

    async def pass_time(seconds: float, *beating: str) -> list[str]:
        nonlocal now_s
        for _ in range(round(seconds)):
            now_s += 1.0
            for name in beating:
                await heartbeats[name].send_heartbeat()
            await fleet.refresh()
        return [record.group for record in fleet.missing_for(1.0)]

    assert await pass_time(2, "g0", "g1") == []
    assert await pass_time(2, "g0") == []
    assert await pass_time(2, "g0") == ["g1"]
    redis.unavailable = True
    assert await pass_time(10) == [], "nobody is known to be missing while Redis is unavailable"
    redis.unavailable = False
    assert await pass_time(2, "g0") == ["g1"]
    assert await pass_time(1, "g0", "g1") == [], "it was not gone"
    await pass_time(5, "g0")
    assert await pass_time(450, "g0") == ["g1"], "calls to a machine that is gone may still wait for it"
    assert await pass_time(200, "g0") == [], "it is history"


async def test_a_group_that_is_given_up_for_a_gap_stops_working_on_the_request(slow_service: Service) -> None:
    slow_service.groups[0].engine.most = 100
    stream = await slow_service.client.submit(request("r", 2000))
    await anext(stream)
    slow_service.client._parts["r"].lose("a gap", "bystander")  # as a second after a gap
    await until(lambda: slow_service.groups[1].requests)
    await until(lambda: not slow_service.groups[0].engine.live)  # it would never end by itself
    await stream.aclose()


async def test_a_request_that_breaks_two_groups_is_poisoned(service: Service) -> None:
    poisoned = await service.client.submit(request("bad", prompt=[666]))  # breaks the first group, then the second
    with pytest.raises(RequestRefused, match="not run again") as caught:
        await read_all(poisoned)
    assert (caught.value.status, caught.value.code) == (500, "request_poisoned")
    await until(lambda: all(g.failures for g in service.groups))
    assert [len(g.failures) for g in service.groups] == [1, 1]
    assert all(isinstance(g.failures[0][0], GroupLost) for g in service.groups)


async def test_closing_the_client_ends_open_streams(slow_service: Service) -> None:
    stream = await slow_service.client.submit(request("r", 10_000))
    await anext(stream)
    reading = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0)
    await slow_service.client.close()
    with pytest.raises(RequestRefused, match="shutting down"):
        await reading


@pytest.mark.realtime
async def test_an_idle_thread_sleeps(service: Service) -> None:
    """One that polled each millisecond would wake up some hundred times, one that spun would use the CPU."""

    def wake_ups() -> int:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    thread = service.groups[0].thread
    await read_all(await service.client.submit(request("r")))
    clock = time.pthread_getcpuclockid(thread.ident)
    await until(lambda: not thread._engine_loop.is_busy)
    woken, used_s = wake_ups(), time.clock_gettime(clock)
    await asyncio.sleep(0.5)  # what is done meanwhile is measured
    assert wake_ups() - woken <= 20
    assert time.clock_gettime(clock) - used_s < 0.1
