"""Calls that reach Redis in any order, late, or for nobody: while a place is free and somebody asks, somebody gets it.

A slow machine reorders what gateways send over their many connections; here the test does, on the way to a real Redis.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable, RequestClient
from tandem.cluster.tenants.quota import AT_ONCE, Quota
from tandem.cluster.tenants.tenant_admission import OverLimit, Reservation
from tests.unit.tenants.tenant_rig import DEADLINE_S, Fleet, admitted, shown

PLACES = 7
RACERS = 9 * AT_ONCE


@dataclass(eq=False)
class Call:
    """One script call, on the wire even when nobody waits for it any more. is_lost: it never arrives."""

    send: asyncio.Event = field(default_factory=asyncio.Event)
    answer: asyncio.Event = field(default_factory=asyncio.Event)
    is_lost: bool = False

    def carry(self, script: Callable[[], Awaitable[Any]]) -> None:
        self.running = asyncio.create_task(self._carry(script))

    async def _carry(self, script: Callable[[], Awaitable[Any]]) -> Any:
        await self.send.wait()
        if self.is_lost:
            raise RedisUnavailable("no answer in time")
        return await script()


@dataclass
class Road:
    """Between gateways and Redis. While it is not open, what is sent waits in `calls` until the test lets it go on."""

    redis: RequestClient
    is_open: bool = True
    calls: list[Call] = field(default_factory=list)

    async def script(
        self, text: str, keys: Sequence[str], arguments: Sequence[str | bytes | int | float], *, may_probe: bool = True
    ) -> Any:
        if self.is_open:
            return await self.redis.script(text, keys, arguments, may_probe=may_probe)
        call = Call()
        call.carry(lambda: self.redis.script(text, keys, arguments, may_probe=may_probe))
        self.calls.append(call)
        answer = await asyncio.shield(call.running)
        await call.answer.wait()
        return answer

    async def sent(self, count: int) -> list[Call]:
        """When so many wait."""
        await soon(lambda: len(self.calls) >= count)
        assert len(self.calls) == count
        return list(self.calls)

    async def deliver(self, call: Call) -> None:
        """It has run, or is lost; its answer is on the way."""
        self.calls.remove(call)
        call.send.set()
        await asyncio.wait([call.running])


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


@dataclass
class Racers:
    """Requests that begin at once, spread over the gateways."""

    quotas: list[Quota]
    granted: list[tuple[Quota, Reservation]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    async def one(self, quota: Quota, prompt: int) -> None:
        try:
            self.granted.append((quota, await quota.admit("acme", prompt, 0)))
        except OverLimit as error:
            self.refused.append(error.reason)

    def start(self, count: int, prompt: int = 1) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.one(self.quotas[i % len(self.quotas)], prompt)) for i in range(count)]

    @property
    def ended(self) -> int:
        return len(self.granted) + len(self.refused)


def roads(fleet: Fleet, count: int, gateways: int = 1) -> tuple[Road, list[Quota]]:
    """Gateways with a road in common."""
    quotas = [fleet.gateway(f"g{i}", gateways=gateways) for i in range(count)]
    road = Road(fleet.clients[0])
    for quota in quotas:
        quota._redis = road
    return road, quotas


async def race(road: Road, quotas: list[Quota], order: Callable[[list[Call]], list[Call]], prompt: int = 1) -> Racers:
    """RACERS requests; as many as gateways send at once arrive in that order, then the next so many."""
    racers = Racers(quotas)
    road.is_open = False
    tasks = racers.start(RACERS, prompt)
    while left := RACERS - racers.ended:
        wave = order(await road.sent(min(left, AT_ONCE * len(quotas))))
        for call in wave:
            await road.deliver(call)
        for call in wave:
            call.answer.set()
        await soon(lambda ended=racers.ended + len(wave): racers.ended >= ended)  # type: ignore[misc]
    await asyncio.gather(*tasks)
    road.is_open = True
    return racers


async def settle(racers: Racers) -> None:
    for quota, reservation in racers.granted:
        quota.settle(reservation, 0)
    for quota in racers.quotas:
        await quota.send_heartbeat()


ORDERS: dict[str, Callable[[list[Call]], list[Call]]] = {
    "as sent": list,
    "last first": lambda calls: calls[::-1],
    "shuffled": lambda calls: random.Random(7).sample(calls, len(calls)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [1, 3])
async def test_all_free_places_are_granted_in_whatever_order_calls_arrive(
    fleet: Fleet, redis: BackgroundClient, count: int, order: str
) -> None:
    fleet.set(concurrency=PLACES)
    road, quotas = roads(fleet, count)
    for _ in range(2):
        racers = await race(road, quotas, ORDERS[order])
        assert len(racers.granted) == PLACES
        assert set(racers.refused) == {"concurrency"}
        await settle(racers)
        assert await held(redis) == (0, 0)


@pytest.mark.parametrize("order", ORDERS)
async def test_the_last_of_the_budget_and_of_the_cache_go_to_somebody_too(fleet: Fleet, order: str) -> None:
    fleet.kv_tokens = 1000
    road, quotas = roads(fleet, 3)
    fleet.set(kv_share=0.5)
    racers = await race(road, quotas, ORDERS[order], prompt=100)
    assert (len(racers.granted), set(racers.refused)) == (5, {"kv_share"})
    await settle(racers)
    fleet.set(token_budget=500)
    racers = await race(road, quotas, ORDERS[order], prompt=100)
    assert (len(racers.granted), set(racers.refused)) == (5, {"budget_reserved"})
    await settle(racers)
    assert len(await admitted(quotas[-1], 10, 100)) == 5


async def test_a_grant_on_its_way_keeps_its_place_whatever_is_reported_meanwhile(
    fleet: Fleet, redis: BackgroundClient
) -> None:
    """Its gateway does not know of it yet, and says so: neither a heartbeat nor the next request gives it away."""
    fleet.set(concurrency=3)
    road, (quota, other) = roads(fleet, 2)
    road.is_open = False
    racers = Racers([quota])
    (task,) = racers.start(1)
    (call,) = await road.sent(1)
    await road.deliver(call)
    road.is_open = True
    quota.tell_again()
    await quota.send_heartbeat()
    assert await held(redis) == (1, 1)
    assert len(await admitted(quota, 1)) == 1
    assert len(await admitted(other, 5)) == 1
    call.answer.set()
    await task
    for gateway in (quota, other):
        gateway.tell_again()
        await gateway.send_heartbeat()
    assert await held(redis) == (3, 3)


async def test_a_call_that_nobody_waits_for_takes_nothing(fleet: Fleet, redis: BackgroundClient) -> None:
    """Their clients go: the place of one that had it is free with the next heartbeat, a later one is not let in."""
    fleet.set(concurrency=2, tokens_per_minute=1000)
    road, (quota,) = roads(fleet, 1)
    road.is_open = False
    tasks = Racers([quota]).start(2, prompt=100)
    early, late = await road.sent(2)
    await road.deliver(early)
    assert await held(redis) == (1, 100)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    road.is_open = True
    await quota.send_heartbeat()
    assert await held(redis) == (0, 0)
    await road.deliver(late)
    assert await held(redis) == (0, 0)
    assert float(await redis.command("HGET", keys.quota("acme"), "tokens")) == 900, "and the minute is not charged"


async def test_a_tenant_that_is_removed_and_comes_back_is_not_taken_for_its_own_past(
    fleet: Fleet, redis: BackgroundClient
) -> None:
    """What a gateway told last before it forgot the tenant is still in Redis."""
    fleet.set(concurrency=2)
    quota = fleet.gateway("a")
    for reservation in await admitted(quota, 2):
        quota.settle(reservation, 1)
    fleet.directory.tenants.clear()
    await quota.send_heartbeat()
    assert not quota._accounts
    fleet.set(concurrency=2)
    assert len(await admitted(quota, 3)) == 2
    assert await held(redis) == (2, 2)


async def test_a_call_that_runs_twice_takes_one_place(fleet: Fleet, redis: BackgroundClient) -> None:
    fleet.set(concurrency=3, requests_per_minute=60)
    quota = fleet.gateway("a")
    account = quota._account("acme")
    assert account is not None
    report = account.report(fleet.time.clock(), None, Reservation("acme", 5, 5, 5, is_counted=True))
    for _ in range(3):
        assert (await quota._ask(account, report)).ok
    assert await held(redis) == (1, 5)
    assert shown(quota)["remaining-requests"] == "59"


async def test_without_answers_a_share_goes_to_the_first_who_need_it(fleet: Fleet) -> None:
    """Answers fail to come one after the other: who still waits for one holds nothing of the share."""
    fleet.set(concurrency=6)
    road, (quota,) = roads(fleet, 1, gateways=3)
    road.is_open = False
    racers = Racers([quota])
    tasks = racers.start(AT_ONCE)
    for number, call in enumerate(await road.sent(AT_ONCE), start=1):
        call.is_lost = True
        await road.deliver(call)
        await soon(lambda ended=number: racers.ended == ended)  # type: ignore[misc]
        assert len(racers.granted) == min(number, 2)
    await asyncio.gather(*tasks)
    assert set(racers.refused) == {"concurrency"}


@pytest.mark.parametrize("seed", range(5))
async def test_a_long_disorder_leaves_every_place_free_that_nobody_holds(
    fleet: Fleet, redis: BackgroundClient, seed: int
) -> None:
    """Requests begin, are given up and end while calls, beats and answers overtake each other."""
    draw = random.Random(seed)
    fleet.set(concurrency=PLACES)
    road, quotas = roads(fleet, 3)
    road.is_open = False
    racers, answers, tasks, beats = Racers(quotas), list[Call](), list[asyncio.Task[None]](), list[asyncio.Task[None]]()
    for _ in range(600):
        match draw.choices(range(5), (8, 8, 8, 1, 1))[0]:
            case 0:
                tasks.append(asyncio.create_task(racers.one(draw.choice(quotas), 1)))
            case 1 if road.calls:
                call = draw.choice(road.calls)
                await road.deliver(call)
                answers.append(call)
            case 2 if answers:
                answers.pop(draw.randrange(len(answers))).answer.set()
            case 3 if racers.granted:
                quota, reservation = racers.granted.pop(draw.randrange(len(racers.granted)))
                quota.settle(reservation, 0)
                beats.append(asyncio.create_task(quota.send_heartbeat()))
            case 4 if tasks:
                tasks.pop(draw.randrange(len(tasks))).cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(racers.granted) <= PLACES
    assert set(racers.refused) == {"concurrency"}, "there was a race"
    road.is_open = True
    for call in answers + road.calls:
        call.send.set()
        call.answer.set()
    await asyncio.gather(*tasks, *beats)
    for quota in quotas:
        quota.tell_again()
        await quota.send_heartbeat()
    assert await held(redis) == (len(racers.granted), len(racers.granted))
    assert len(await admitted(draw.choice(quotas), 20)) == PLACES - len(racers.granted)


async def held(redis: BackgroundClient) -> tuple[int, int]:
    """Requests and tokens that all gateways hold, as Redis counts."""
    counts = await redis.command("HGETALL", keys.quota("acme"))
    assert isinstance(counts, dict)
    return tuple(sum(int(v) for k, v in counts.items() if k.startswith(kind)) for kind in (b"n:", b"r:"))  # type: ignore[return-value]
