"""Several gateways: their records in a real Redis, and what one says for all."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.coordination import keys
from cluster.coordination.client import BackgroundClient, Part, RedisAway
from cluster.coordination.gateways import GatewayBeat, GatewayRecord, read_gateways
from cluster.gateway.peers import Alone, Together, merged


def counted(answers: int, tenant_tokens: int = 0) -> tuple[bytes, bytes]:
    registry, tenants = CollectorRegistry(), CollectorRegistry()
    Counter("t:answers", "Answers.", ("route",), registry=registry).labels('/a b"c').inc(answers)
    Histogram("t:seconds", "Time.", buckets=(1.0, 2.0), registry=registry).observe(1.5)
    Counter("t:tenant_tokens", "Tokens.", ("tenant",), registry=tenants).labels("acme").inc(tenant_tokens)
    return generate_latest(registry), generate_latest(tenants)


def record(gateway: str, answers: int = 1, in_hand: int = 0, ready: bool = True) -> GatewayRecord:
    metrics, tenant_metrics = counted(answers, 10 * answers)
    return GatewayRecord(
        gateway=gateway,
        host="h",
        pid=1,
        ready=ready,
        in_hand=in_hand,
        metrics=metrics,
        tenant_metrics=tenant_metrics,
    )


class Fickle:
    def __init__(self, redis: BackgroundClient) -> None:
        self._redis = redis
        self.is_away = False

    async def command(self, *parts: Part) -> object:
        if self.is_away:
            raise RedisAway("gone")
        return await self._redis.command(*parts)

    async def pipeline(self, commands: list[list[Part]]) -> list[object]:
        if self.is_away:
            raise RedisAway("gone")
        return await self._redis.pipeline(commands)


def samples(text: bytes, name: str) -> dict[str, float]:
    """Of a sample's name, by gateway."""
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families), "each family stands once"
    return {s.labels["gateway"]: s.value for family in families for s in family.samples if s.name == name}


async def test_records_are_written_read_and_removed(redis: BackgroundClient) -> None:
    assert await read_gateways(redis, "s") == []
    records = [record("g0"), record("g1")]
    beats = [GatewayBeat(redis, "s", lambda r=r: r) for r in records]
    for beat in beats:
        await beat.beat()
    assert await read_gateways(redis, "s") == records
    assert await read_gateways(redis, "another") == []
    assert 0 < int(await redis.command("PTTL", keys.gateway("s", "g0"))) <= keys.GATEWAY_RECORD_TTL_MS
    await beats[0].leave()
    assert [r.gateway for r in await read_gateways(redis, "s")] == ["g1"]


async def test_one_that_died_is_forgotten_with_its_record(redis: BackgroundClient) -> None:
    beat = GatewayBeat(redis, "s", lambda: record("g"))
    await beat.beat()
    await redis.command("DEL", keys.gateway("s", "g"))  # what its TTL does
    assert await read_gateways(redis, "s") == []
    assert await redis.command("SCARD", keys.gateways("s")) == 0
    await beat.beat()
    assert [r.gateway for r in await read_gateways(redis, "s")] == ["g"], "it was only slow"


async def test_any_gateway_tells_what_all_have_counted(redis: BackgroundClient) -> None:
    for other in (record("me", answers=99, in_hand=99), record("b", answers=2, in_hand=4), record("c", answers=3)):
        await GatewayBeat(redis, "s", lambda other=other: other).beat()
    mine = GatewayBeat(redis, "s", lambda: record("me"))
    peers = Together("me", lambda: mine.others)
    assert peers.in_hand() == 0, "nothing is known yet"
    await mine.beat()
    text = await peers.merge(*counted(5, 50))
    assert samples(text, "t:answers_total") == {"me": 5, "b": 2, "c": 3}, "of its own it knows the latest"
    assert samples(text, "t:seconds_count") == {"me": 1, "b": 1, "c": 1}
    assert samples(text, "t:tenant_tokens_total") == {"me": 50, "b": 20, "c": 30}
    without = await peers.merge(counted(5)[0], b"")
    assert samples(without, "t:tenant_tokens_total") == {}, "nobody's are shown"
    assert peers.in_hand() == 4


async def test_while_redis_is_away_the_others_last_words_stand(redis: BackgroundClient) -> None:
    await GatewayBeat(redis, "s", lambda: record("b", in_hand=4)).beat()
    client = Fickle(redis)
    mine = GatewayBeat(client, "s", lambda: record("me"))
    await mine.beat()
    client.is_away = True
    with pytest.raises(RedisAway):
        await mine.beat()
    peers = Together("me", lambda: mine.others)
    assert samples(await peers.merge(*counted(5)), "t:answers_total") == {"me": 5, "b": 1}
    assert peers.in_hand() == 4


async def test_one_gateway_alone_needs_no_label() -> None:
    own, of_tenants = counted(5, 50)
    assert await Alone().merge(own, of_tenants) == own + of_tenants
    assert Alone().in_hand() == 0


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
