"""Charges told from group to group through a real Redis: each counts once in each group, whatever happens to Redis."""

import time
from collections.abc import Callable

import pytest

from cluster.coordination import keys
from cluster.coordination.charges import ChargeExchange, Charges
from cluster.coordination.client import BackgroundClient, Commands, Part, RedisAway


class Group:
    """An exchange, what its engine has charged since it was asked, and what it was told."""

    def __init__(self, redis: Commands, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.redis = redis
        self.name = name
        self.charged: dict[str, float] = {}
        self.told: dict[str, float] = {}
        self.given: list[Charges] = []
        self.exchange = ChargeExchange(redis, "s", name, self._take, self._give, clock)

    async def _take(self) -> Charges:
        taken, self.charged = self.charged, {}
        return taken

    def _give(self, charges: Charges) -> None:
        self.given.append(charges)
        for tenant, charge in charges.items():
            self.told[tenant] = self.told.get(tenant, 0.0) + charge

    async def turn(self, **charged: float) -> dict[str, float]:
        """One turn after these charges; all it was ever told."""
        self.charged = charged
        await self.exchange.turn()
        return self.told


@pytest.fixture
async def groups(redis: BackgroundClient) -> list[Group]:
    await redis.command("SADD", keys.groups("s"), "g1", "g2", "g3")
    groups = [Group(redis, f"g{i}") for i in (1, 2, 3)]
    for group in groups:
        await group.turn()
    return groups


async def test_what_one_charges_the_others_hear_once(groups: list[Group]) -> None:
    one, two, three = groups
    await one.turn(acme=10.0, beta=1.0)
    assert await two.turn(acme=5.0) == {"acme": 10.0, "beta": 1.0}
    assert await three.turn() == {"acme": 15.0, "beta": 1.0}
    assert await one.turn(acme=2.5) == {"acme": 5.0}
    for _ in range(3):
        assert await three.turn() == {"acme": 17.5, "beta": 1.0}
        assert await one.turn() == {"acme": 5.0}


async def test_a_group_that_comes_later_does_not_hear_of_the_past(groups: list[Group], redis: BackgroundClient) -> None:
    await groups[0].turn(acme=1000.0)
    late = Group(redis, "g4")
    await redis.command("SADD", keys.groups("s"), "g4")
    assert await late.turn() == {}
    await groups[0].turn(acme=1.0)
    assert await late.turn(acme=7.0) == {"acme": 1.0}
    assert await groups[1].turn() == {"acme": 1008.0}, "all of a newcomer is of this time"


async def test_a_turn_without_redis_is_made_up_for(groups: list[Group], redis: BackgroundClient) -> None:
    one, two, _ = groups
    await redis.command("CONFIG", "SET", "maxmemory", "1")
    for _ in range(3):
        with pytest.raises(RedisAway):
            await one.turn(acme=1.0)
    await redis.command("CONFIG", "SET", "maxmemory", "0")
    await one.turn(acme=1.0)
    assert await two.turn() == {"acme": 4.0}


async def test_who_works_elsewhere_no_more_is_told_once(groups: list[Group], redis: BackgroundClient) -> None:
    one, two, _ = groups
    await one.turn(acme=1.0)
    for _ in range(3):
        await two.turn()
    assert two.given == [{"acme": 1.0}, {}]
    await one.turn(acme=1.0)
    await two.turn()
    await redis.command("CONFIG", "SET", "maxmemory", "1")
    for _ in range(2):
        with pytest.raises(RedisAway):
            await two.turn()
    await redis.command("CONFIG", "SET", "maxmemory", "0")
    await two.turn()
    assert two.given == [{"acme": 1.0}, {}] * 2


async def test_an_emptied_redis_charges_nobody_twice(groups: list[Group], redis: BackgroundClient) -> None:
    one, two, _ = groups
    await one.turn(acme=10.0)
    assert await two.turn() == {"acme": 10.0}
    await redis.command("FLUSHALL")
    assert await two.turn() == {"acme": 10.0}
    await redis.command("SADD", keys.groups("s"), "g1", "g2", "g3")  # their heartbeats
    await one.turn(acme=1.0)
    assert await two.turn() == {"acme": 11.0}


async def test_the_only_group_looks_for_others_less_often_while_it_charges_nobody(redis: BackgroundClient) -> None:
    now_s = 100.0
    looks = 0

    class Counted:
        async def command(self, *parts: Part) -> object:
            return await redis.command(*parts)

        async def pipeline(self, commands: list[list[Part]]) -> list[object]:
            nonlocal looks
            looks += 1
            return await redis.pipeline(commands)

    one, two = Group(Counted(), "g1", lambda: now_s), Group(redis, "g2")
    await one.turn()
    await one.turn()
    assert looks == 2, "while Redis does not list even this one it may list others soon"
    await redis.command("SADD", keys.groups("s"), "g1")
    for _ in range(21):
        await one.turn()
        now_s += 1.0
    assert looks == 2 + 5
    await one.turn(acme=1.0)
    assert looks == 8, "what it charges is told at once"
    await redis.command("SADD", keys.groups("s"), "g2")
    await two.turn()
    await two.turn(acme=4.0)
    now_s += 5.0
    assert await one.turn() == {"acme": 4.0}
    await two.turn(acme=1.0)
    assert await one.turn() == {"acme": 5.0}, "it is alone no more"


async def test_what_cannot_be_read_is_nothing(groups: list[Group], redis: BackgroundClient) -> None:
    await redis.command("SET", keys.charges("s", "g1"), b"\x01")
    assert await groups[1].turn() == {}


async def test_totals_of_a_group_that_is_gone_expire(groups: list[Group], redis: BackgroundClient) -> None:
    await groups[0].turn(acme=1.0)
    assert 0 < int(await redis.command("PTTL", keys.charges("s", "g1"))) <= keys.CHARGES_TTL_MS
