"""Several gateways: their records in a real Redis, and what one says for all."""

import subprocess

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem.cluster.fleet.gateway_records import GatewayHeartbeat, GatewayRecord, read_gateways
from tandem.cluster.gateway.http.gateway_metrics import Alone, Together, merged
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient, Part, RedisUnavailable


def counted(answers: int, tenant_tokens: int = 0) -> tuple[bytes, bytes]:
    registry, tenants = CollectorRegistry(), CollectorRegistry()
    Counter("t:answers", "Answers.", ("route",), registry=registry).labels('/a b"c').inc(answers)
    Histogram("t:seconds", "Time.", buckets=(1.0, 2.0), registry=registry).observe(1.5)
    Counter("t:tenant_tokens", "Tokens.", ("tenant",), registry=tenants).labels("acme").inc(tenant_tokens)
    return generate_latest(registry), generate_latest(tenants)


def record(gateway: str, answers: int = 1, in_flight: int = 0, ready: bool = True) -> GatewayRecord:
    metrics, tenant_metrics = counted(answers, 10 * answers)
    return GatewayRecord(
        gateway=gateway,
        host="h",
        pid=1,
        ready=ready,
        in_flight=in_flight,
        metrics=metrics,
        tenant_metrics=tenant_metrics,
    )


class Fickle:
    def __init__(self, redis: BackgroundClient) -> None:
        self._redis = redis
        self.is_unavailable = False

    async def command(self, *parts: Part) -> object:
        if self.is_unavailable:
            raise RedisUnavailable("gone")
        return await self._redis.command(*parts)

    async def pipeline(self, commands: list[list[Part]]) -> list[object]:
        if self.is_unavailable:
            raise RedisUnavailable("gone")
        return await self._redis.pipeline(commands)


def samples(text: bytes, name: str) -> dict[str, float]:
    """Of a sample's name, by gateway."""
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families), "each family stands once"
    return {s.labels["gateway"]: s.value for family in families for s in family.samples if s.name == name}


async def test_records_are_written_read_and_removed(redis: BackgroundClient) -> None:
    assert await read_gateways(redis, "s") == []
    records = [record("g0"), record("g1")]
    heartbeats = [GatewayHeartbeat(redis, "s", lambda r=r: r) for r in records]
    for heartbeat in heartbeats:
        await heartbeat.send_heartbeat()
    assert await read_gateways(redis, "s") == records
    assert await read_gateways(redis, "another") == []
    assert 0 < int(await redis.command("PTTL", keys.gateway("s", "g0"))) <= keys.GATEWAY_RECORD_TTL_MS
    await heartbeats[0].leave()
    assert [r.gateway for r in await read_gateways(redis, "s")] == ["g1"]


async def test_one_that_died_is_forgotten_with_its_record(redis: BackgroundClient) -> None:
    heartbeat = GatewayHeartbeat(redis, "s", lambda: record("g"))
    await heartbeat.send_heartbeat()
    await redis.command("DEL", keys.gateway("s", "g"))  # what its TTL does
    assert await read_gateways(redis, "s") == []
    assert await redis.command("SCARD", keys.gateways("s")) == 0
    await heartbeat.send_heartbeat()
    assert [r.gateway for r in await read_gateways(redis, "s")] == ["g"], "it was only slow"


async def test_the_others_write_how_a_gateway_ended(redis: BackgroundClient, caplog: pytest.LogCaptureFixture) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        died = msgspec.structs.replace(record("b"), pid=process.pid)
        await GatewayHeartbeat(redis, "s", lambda: died).send_heartbeat()
        mine = GatewayHeartbeat(redis, "s", lambda: record("me"))
        await mine.send_heartbeat()
        process.kill()
        process.wait()
        await redis.command("DEL", keys.gateway("s", "b"))
        await mine.send_heartbeat()
        await mine.send_heartbeat()
    (line,) = [r.getMessage() for r in caplog.records if "gateway b" in r.getMessage()]
    wanted = ("its process was killed by SIGKILL", "it has ended, or its record was not renewed")  # before Linux 6.15
    assert line.removeprefix("gateway b is gone: ") in wanted


async def test_any_gateway_has_the_counts_of_all(redis: BackgroundClient) -> None:
    for other in (record("me", answers=99, in_flight=99), record("b", answers=2, in_flight=4), record("c", answers=3)):
        await GatewayHeartbeat(redis, "s", lambda other=other: other).send_heartbeat()
    mine = GatewayHeartbeat(redis, "s", lambda: record("me"))
    peers = Together("me", lambda: mine.others)
    assert peers.in_flight() == 0, "nothing is known yet"
    await mine.send_heartbeat()
    text = await peers.merge(*counted(5, 50))
    assert samples(text, "t:answers_total") == {"me": 5, "b": 2, "c": 3}, "of its own it knows the latest"
    assert samples(text, "t:seconds_count") == {"me": 1, "b": 1, "c": 1}
    assert samples(text, "t:tenant_tokens_total") == {"me": 50, "b": 20, "c": 30}
    without = await peers.merge(counted(5)[0], b"")
    assert samples(without, "t:tenant_tokens_total") == {}, "nobody's are shown"
    assert peers.in_flight() == 4


async def test_while_redis_is_unavailable_the_others_last_records_stand(redis: BackgroundClient) -> None:
    await GatewayHeartbeat(redis, "s", lambda: record("b", in_flight=4)).send_heartbeat()
    client = Fickle(redis)
    mine = GatewayHeartbeat(client, "s", lambda: record("me"))
    await mine.send_heartbeat()
    client.is_unavailable = True
    with pytest.raises(RedisUnavailable):
        await mine.send_heartbeat()
    peers = Together("me", lambda: mine.others)
    assert samples(await peers.merge(*counted(5)), "t:answers_total") == {"me": 5, "b": 1}
    assert peers.in_flight() == 4


async def test_one_gateway_alone_needs_no_label() -> None:
    own, of_tenants = counted(5, 50)
    assert await Alone().merge(own, of_tenants) == own + of_tenants
    assert Alone().in_flight() == 0


def test_merging_keeps_values_labels_and_kinds() -> None:
    own, _ = counted(5)
    text = merged([("g", own.decode())])
    before = {f.name: f for f in text_string_to_metric_families(own.decode())}
    after = {f.name: f for f in text_string_to_metric_families(text.decode())}
    assert before.keys() == after.keys()
    for name, family in before.items():
        assert (after[name].type, after[name].documentation) == (family.type, family.documentation)
        mine = [(s.name, s.labels | {"gateway": "g"}, s.value) for s in family.samples]
        assert [(s.name, s.labels, s.value) for s in after[name].samples] == mine
