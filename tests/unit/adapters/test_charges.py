"""Charges that groups exchange through a real Redis: each counts once in each group, whatever happens to Redis."""

import time
from collections.abc import Callable
from unittest.mock import ANY

import pytest

from tandem.cluster.fleet.charges import IDLE_S, MOST_PER_S, PERIOD_S, ChargeExchange, Charges
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient, Commands, Part, RedisUnavailable


class Group:
    """An exchange, what its engine has charged since it was asked, and what it was received."""

    def __init__(self, redis: Commands, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.redis = redis
        self.name = name
        self.charged: dict[str, float] = {}
        self.received: dict[str, float] = {}
        self.given: list[Charges] = []
        self.exchange = ChargeExchange(redis, "s", name, self._take, self._give, clock)

    async def _take(self) -> Charges:
        taken, self.charged = self.charged, {}
        return taken

    def _give(self, charges: Charges) -> None:
        self.given.append(charges)
        for tenant, charge in charges.items():
            self.received[tenant] = self.received.get(tenant, 0.0) + charge

    async def update(self, **charged: float) -> dict[str, float]:
        """One exchange after these charges; all it ever received."""
        self.charged = charged
        await self.exchange.update()
        return self.received


class Deaf:
    """Commands that are obeyed, and whose answers do not arrive."""

    def __init__(self, redis: Commands) -> None:
        self._redis = redis

    async def command(self, *parts: Part) -> object:
        return await self._redis.command(*parts)

    async def pipeline(self, commands: list[list[Part]]) -> list[object]:
        await self._redis.pipeline(commands)
        raise RedisUnavailable("the answer is lost")


@pytest.fixture
async def groups(redis: BackgroundClient) -> list[Group]:
    await redis.command("SADD", keys.groups("s"), "g1", "g2", "g3")
    groups = [Group(redis, f"g{i}") for i in (1, 2, 3)]
    for group in groups:
        await group.update()
    return groups


async def test_what_one_charges_the_others_get_once(groups: list[Group]) -> None:
    one, two, three = groups
    await one.update(acme=10.0, beta=1.0)
    assert await two.update(acme=5.0) == {"acme": 10.0, "beta": 1.0}
    assert await three.update() == {"acme": 15.0, "beta": 1.0}
    assert await one.update(acme=2.5) == {"acme": 5.0}
    for _ in range(3):
        assert await three.update() == {"acme": 17.5, "beta": 1.0}
        assert await one.update() == {"acme": 5.0}


async def test_a_group_that_comes_later_gets_no_earlier_charges(groups: list[Group], redis: BackgroundClient) -> None:
    await groups[0].update(acme=1000.0)
    late = Group(redis, "g4")
    await redis.command("SADD", keys.groups("s"), "g4")
    assert await late.update() == {}
    await groups[0].update(acme=1.0)
    assert await late.update(acme=7.0) == {"acme": 1.0}
    assert await groups[1].update() == {"acme": 1008.0}, "all of a newcomer is of this time"


async def test_an_exchange_without_redis_is_made_up_for(groups: list[Group], redis: BackgroundClient) -> None:
    one, two, _ = groups
    await redis.command("CONFIG", "SET", "maxmemory", "1")
    for _ in range(3):
        with pytest.raises(RedisUnavailable):
            await one.update(acme=1.0)
    await redis.command("CONFIG", "SET", "maxmemory", "0")
    await one.update(acme=1.0)
    assert await two.update() == {"acme": 4.0}


async def test_charges_that_stop_growing_elsewhere_are_cleared_once(
    groups: list[Group], redis: BackgroundClient
) -> None:
    one, two, _ = groups
    await one.update(acme=1.0)
    for _ in range(3):
        await two.update()
    assert two.given == [{"acme": 1.0}, {}]
    await one.update(acme=1.0)
    await two.update()
    two.exchange._redis = Deaf(redis)
    for _ in range(2):
        with pytest.raises(RedisUnavailable):
            await two.update()
    two.exchange._redis = redis
    await two.update()
    assert two.given == [{"acme": 1.0}, {}] * 2


async def test_an_emptied_redis_charges_nobody_twice(groups: list[Group], redis: BackgroundClient) -> None:
    one, two, _ = groups
    await one.update(acme=10.0)
    assert await two.update() == {"acme": 10.0}
    await redis.command("FLUSHALL")
    assert await two.update() == {"acme": 10.0}
    await redis.command("SADD", keys.groups("s"), "g1", "g2", "g3")  # their heartbeats
    await one.update(acme=1.0)
    assert await two.update() == {"acme": 11.0}


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
    await one.update()
    await one.update()
    assert looks == 2, "while Redis does not list even this one it may list others soon"
    await redis.command("SADD", keys.groups("s"), "g1")
    for _ in range(21):
        await one.update()
        now_s += 1.0
    assert looks == 2 + 5
    await one.update(acme=1.0)
    assert looks == 8, "what it charges is received at once"
    await redis.command("SADD", keys.groups("s"), "g2")
    await two.update()
    await two.update(acme=4.0)
    now_s += 5.0
    assert await one.update() == {"acme": 4.0}
    await two.update(acme=1.0)
    assert await one.update() == {"acme": 5.0}, "it is alone no more"


async def test_hundreds_of_groups_take_turns(redis: BackgroundClient) -> None:
    await redis.command("SADD", keys.groups("s"), *(f"g{i}" for i in range(3 * MOST_PER_S)))
    now_s = 0.0
    one, two = (Group(redis, name, lambda: now_s) for name in ("g1", "g2"))
    await two.update()
    received = []
    for _ in range(9):
        await one.update(acme=1.0)
        two.exchange._next_at_s = 0.0
        received.append((await two.update()).get("acme", 0.0))
        now_s += PERIOD_S
    assert received == [1, 1, 1, 4, 4, 4, 7, 7, 7], "every third second, and nothing is lost"


async def test_what_cannot_be_read_is_nothing(groups: list[Group], redis: BackgroundClient) -> None:
    await groups[0].update(acme=1.0)
    await redis.command("HSET", keys.charges("s"), "acme", b"\xff")
    assert await groups[1].update() == {}
    await groups[0].update(acme=2.0)
    assert await groups[1].update() == {"acme": 2.0}


async def test_totals_of_groups_that_are_gone_expire(groups: list[Group], redis: BackgroundClient) -> None:
    await groups[0].update(acme=1.0)
    for key in (keys.charges("s"), keys.charges_changed("s"), keys.charges_number("s", "g1")):
        assert 0 < int(await redis.command("PTTL", key)) <= keys.CHARGES_TTL_MS


async def test_an_idle_tenant_is_forgotten_and_counts_from_nothing_when_it_is_back(
    groups: list[Group], redis: BackgroundClient
) -> None:
    one, two, _ = groups
    await one.update(acme=10.0, beta=1.0)
    assert await two.update() == {"acme": 10.0, "beta": 1.0}
    for group in groups:
        group.exchange._idle_us = 0  # by Redis's clock all that was charged before now is idle
    await one.update(beta=2.0)
    assert await redis.command("HGETALL", keys.charges("s")) == {b"": ANY, b"beta": b"2"}
    assert await two.update() == {"acme": 10.0, "beta": 1.0}, "even before anybody has read it, when that is so soon"
    for group in groups:
        group.exchange._idle_us = int(IDLE_S * 1e6)
    await one.update(beta=4.0)
    assert await two.update() == {"acme": 10.0, "beta": 5.0}
    await one.update(acme=3.0)
    assert await two.update() == {"acme": 13.0, "beta": 5.0}


async def test_a_group_that_was_cut_off_for_longer_than_tenants_are_remembered_begins_like_a_new_one(
    groups: list[Group],
) -> None:
    one, two, _ = groups
    await one.update(acme=10.0, beta=1.0)
    assert await two.update() == {"acme": 10.0, "beta": 1.0}
    two.exchange._since_us -= int(IDLE_S * 1e6)
    two.exchange._seen = {
        tenant: seen._replace(at_us=seen.at_us - int(IDLE_S * 1e6)) for tenant, seen in two.exchange._seen.items()
    }
    await one.update(acme=1.0)
    assert await two.update(beta=5.0) == {"acme": 10.0, "beta": 1.0}, "no history is charged again"
    assert await one.update() == {"beta": 5.0}, "what it has charged itself counts elsewhere"
    await one.update(acme=2.0, beta=3.0)
    assert await two.update() == {"acme": 12.0, "beta": 4.0}


async def test_a_tenant_that_is_back_just_before_redis_forgets_it_is_charged_for_what_is_new(
    groups: list[Group],
) -> None:
    one, two, _ = groups
    await one.update(acme=10.0)
    assert await two.update() == {"acme": 10.0}
    seen = two.exchange._seen["acme"]
    two.exchange._seen["acme"] = seen._replace(at_us=two.exchange._since_us - int(IDLE_S * 1e6))
    await one.update(acme=1.0)
    assert await two.update() == {"acme": 11.0}


async def test_tenants_come_and_go_and_neither_redis_nor_groups_keep_them(groups: list[Group]) -> None:
    one, two, three = groups
    for group in groups:
        group.exchange._idle_us = 0
    for turn in range(20):
        await one.update(**{f"t{turn}-{i}": 1.0 for i in range(500)})
        await two.update()
    assert len(one.exchange._seen) <= 500 and not two.exchange._seen and not three.exchange._seen
    assert int(await one.redis.command("HLEN", keys.charges("s"))) <= 501


async def test_an_addition_whose_answer_is_lost_counts_once(groups: list[Group], redis: BackgroundClient) -> None:
    one, two, _ = groups
    one.exchange._redis = Deaf(redis)
    for charge in (5.0, 1.0, 1.0):
        with pytest.raises(RedisUnavailable):
            await one.update(acme=charge)
    assert await two.update() == {"acme": 5.0}
    one.exchange._redis = redis
    assert await one.update(acme=1.0) == {}
    assert await two.update() == {"acme": 8.0}


async def test_an_older_copy_of_the_totals_charges_nobody_twice(groups: list[Group], redis: BackgroundClient) -> None:
    one, two, _ = groups
    await one.update(acme=10.0)
    assert await two.update() == {"acme": 10.0}
    await redis.command("HSET", keys.charges("s"), "acme", "4")  # a snapshot of some time ago
    await one.update(acme=1.0)
    assert await two.update() == {"acme": 10.0}, "what was lost with it is not known"
    await one.update(acme=2.0)
    assert await two.update() == {"acme": 12.0}


async def test_an_exchange_has_as_many_bytes_as_tenants_that_have_changed_however_many_groups(
    redis: BackgroundClient,
) -> None:
    async def traffic() -> int:
        info = await redis.command("INFO", "stats")
        return int(info["total_net_input_bytes"]) + int(info["total_net_output_bytes"])

    sizes = []
    for count in (2, 32):
        names = [f"g{i}" for i in range(count)]
        await redis.command("DEL", keys.groups("s"))
        await redis.command("SADD", keys.groups("s"), *names)
        fleet = [Group(redis, name) for name in names]
        for group in fleet:
            await group.update(**{f"tenant-{i}": 3.0 for i in range(100)})
        before = await traffic()
        for group in fleet:
            await group.update(**{f"tenant-{i}": 3.0 for i in range(10)})
        sizes.append((await traffic() - before) / count)
    print(f"bytes of an exchange in which 10 tenants were charged: {sizes}")
    assert sizes[1] < 1.5 * sizes[0]
