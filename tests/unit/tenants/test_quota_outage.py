"""Races for the last unit (TN-07), and Redis killed, frozen and emptied in the middle (FT-08): limits still bound."""

import asyncio
import os
import signal

import pytest

from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable, RequestClient
from tandem.cluster.tenants.quota import Quota
from tandem.cluster.tenants.tenant_admission import OverLimit, Reservation
from tests.unit.tenants.tenant_rig import FakeTime, Fleet, admitted, refusal, shown, until

RACERS = 1000


async def race(
    quotas: list[Quota], prompt: int = 1, output: int = 0, *, is_open_ended: bool = False
) -> tuple[list[tuple[Quota, Reservation]], list[str]]:
    """1000 requests at once, spread over the gateways: the grants, and the reasons of the refusals."""
    granted: list[tuple[Quota, Reservation]] = []
    refused: list[str] = []

    async def one(quota: Quota) -> None:
        try:
            granted.append((quota, await quota.admit("acme", prompt, output, is_open_ended=is_open_ended)))
        except OverLimit as error:
            refused.append(error.reason)

    await asyncio.gather(*(one(quotas[i % len(quotas)]) for i in range(RACERS)))
    return granted, refused


@pytest.mark.parametrize("count", [1, 2])
async def test_1000_race_for_the_last_of_the_budget(fleet: Fleet, count: int) -> None:
    """TN-07: at most the budget and one reservation; what they give back is there for the next one."""
    fleet.set(token_budget=1000)
    quotas = [fleet.gateway(f"g{i}") for i in range(count)]
    quotas[0].settle(await quotas[0].admit("acme", 1, 0), 999)
    await quotas[0].send_heartbeat()
    granted, refused = await race(quotas, prompt=3, output=7)
    assert len(granted) == 1, "one unit is left, one reservation may go beyond it"
    assert set(refused) == {"budget_reserved"}
    for quota, reservation in granted:
        quota.settle(reservation, 0)
    for quota in quotas:
        await quota.send_heartbeat()
    assert len(await admitted(quotas[-1], 1)) == 1, "no phantom refusal afterwards"


@pytest.mark.parametrize("count", [1, 2])
async def test_1000_race_for_what_is_left_of_the_minute(fleet: Fleet, count: int) -> None:
    fleet.set(requests_per_minute=40, tokens_per_minute=120)
    quotas = [fleet.gateway(f"g{i}") for i in range(count)]
    granted, refused = await race(quotas, prompt=2, output=2)
    assert len(granted) == 30, "120 tokens are 30 requests of 4"
    assert set(refused) == {"tokens"}
    for quota, reservation in granted:
        quota.settle(reservation, 0)
    assert len(await admitted(quotas[0], 50)) == 10, "requests are not given back"


@pytest.mark.parametrize("count", [1, 3])
async def test_1000_without_max_tokens_overdraw_a_minute_by_one_of_them(fleet: Fleet, count: int) -> None:
    """TN-07 for the minute: what is charged is at most the limit and one reservation, however little each must find."""
    fleet.set(tokens_per_minute=1000)
    quotas = [fleet.gateway(f"g{i}") for i in range(count)]
    granted, refused = await race(quotas, prompt=10, output=200, is_open_ended=True)
    assert len(granted) == 5, "four of 210, and one more for the 160 that are left"
    assert set(refused) == {"tokens"}
    for quota, reservation in granted:
        quota.settle(reservation, 20)
    for quota in quotas:
        await quota.send_heartbeat()
    assert len(await admitted(quotas[-1], 100, 10, 0)) == 90, "what was not used is there, and no more"


async def test_without_redis_a_share_is_given_back_no_more_than_was_taken(fleet: Fleet) -> None:
    """An answer of no stated length may take more than a gateway's share can be overdrawn by."""
    fleet.set(tokens_per_minute=900)
    quota = fleet.gateway("a", gateways=3)
    fleet.server.stop()
    for left in (200, 100):
        reservation = await quota.admit("acme", 10, 4000, is_open_ended=True)
        assert (await refusal(quota, 1, 0)).reason == "tokens"
        quota.settle(reservation, 100)
        assert shown(quota)["remaining-tokens"] == str(left)


@pytest.mark.parametrize("count", [1, 3])
async def test_1000_race_for_places(fleet: Fleet, count: int) -> None:
    fleet.set(concurrency=7)
    quotas = [fleet.gateway(f"g{i}") for i in range(count)]
    for _ in range(3):
        granted, refused = await race(quotas)
        assert len(granted) == 7
        assert set(refused) == {"concurrency"}
        for quota, reservation in granted:
            quota.settle(reservation, 1)
        for quota in quotas:
            await quota.send_heartbeat()
        one = await admitted(quotas[-1], 10)
        assert len(one) == 7, "no phantom refusal afterwards"
        for reservation in one:
            quotas[-1].settle(reservation, 1)
        for quota in quotas:
            await quota.send_heartbeat()


async def test_without_redis_each_gateway_has_its_share_of_what_was_left(fleet: Fleet) -> None:
    fleet.set(requests_per_minute=60)
    one, two = fleet.gateway("a", gateways=2), fleet.gateway("b", gateways=2)
    assert len(await admitted(one, 20)) == 20
    assert len(await admitted(two, 10)) == 10
    fleet.server.stop()
    assert len(await admitted(one, 60)) == 20, "half of the 40 that it knew of"
    assert len(await admitted(two, 60)) == 15, "half of the 30 that it knew of"
    fleet.time.now_s += 10
    assert len(await admitted(one, 60)) == 5, "and half of what comes in"
    fleet.time.now_s += 3600
    assert len(await admitted(one, 60)) + len(await admitted(two, 60)) == 60
    assert shown(one)["remaining-requests"] == "0"
    assert (await refusal(one)).retry_after_s == pytest.approx(2, abs=0.1)


async def test_without_redis_places_tokens_and_budget_are_shared_too(fleet: Fleet) -> None:
    fleet.set(concurrency=5, tokens_per_minute=1000, token_budget=2000)
    quota = fleet.gateway("a", gateways=2)
    fleet.server.stop()
    held = await admitted(quota, 5, 10, 90)
    assert len(held) == 2
    assert (await refusal(quota, 10, 90)).reason == "concurrency"
    for reservation in held:
        quota.settle(reservation, 100)
    assert (await refusal(quota, 10, 400)).reason == "tokens"
    for _ in range(8):
        fleet.time.now_s += 60
        for reservation in await admitted(quota, 1, 10, 90):
            quota.settle(reservation, 100)
    fleet.time.now_s += 60
    assert (await refusal(quota, 10, 90)).reason == "budget_reserved"
    assert quota.spent() == {"acme": (1, 1000)}, "half of the budget, and no more"


async def test_a_gateway_that_never_saw_redis_is_bounded_as_well(fleet: Fleet) -> None:
    fleet.server.stop()
    fleet.set(requests_per_minute=10)
    assert len(await admitted(fleet.gateway("a", gateways=2), 50)) == 5


async def test_what_was_taken_meanwhile_is_told_when_redis_is_back(fleet: Fleet) -> None:
    fleet.set(requests_per_minute=60, token_budget=1000, concurrency=50)
    quota, other = fleet.gateway("a"), fleet.gateway("b")
    await admitted(quota, 1)
    fleet.server.stop()
    for reservation in await admitted(quota, 20):
        quota.settle(reservation, 40)
    held = await admitted(quota, 10)
    fleet.server.start()
    await until(lambda: told(quota), "the outage is over")
    assert len(await admitted(other, 60)) == 29, "1 + 20 + 10 of 60 are gone"
    assert other.spent() == {"acme": (1, 800)}
    for reservation in held:
        quota.settle(reservation, 0)


async def told(quota: Quota) -> bool:
    quota.tell_again()
    await quota.send_heartbeat()
    return not quota._unreported


async def test_an_hour_without_redis_leaves_no_hour_of_debt(fleet: Fleet) -> None:
    fleet.set(requests_per_minute=60)
    quota = fleet.gateway("a")
    fleet.server.stop()
    for _ in range(60):
        assert len(await admitted(quota, 100)) == 60
        fleet.time.now_s += 60
    fleet.server.start()
    await until(lambda: told(quota), "the outage is over")
    assert len(await admitted(quota, 100)) == 60


async def test_a_redis_that_comes_back_empty_learns_what_gateways_know(fleet: Fleet, redis: BackgroundClient) -> None:
    fleet.set(requests_per_minute=60, token_budget=1000, concurrency=9)
    gone, one, two = fleet.gateway("gone"), fleet.gateway("a"), fleet.gateway("b")
    gone.settle(await gone.admit("acme", 1, 0), 300)
    await gone.send_heartbeat()
    fleet.time.now_s += 10  # its lease ends
    for quota in (one, two):
        quota.settle(await quota.admit("acme", 1, 0), 200)
        await quota.send_heartbeat()
    held = await admitted(one, 4)
    await two.send_heartbeat()
    await admitted(two, 50)
    await redis.command("FLUSHALL")
    for quota in (one, two):
        assert await told(quota)
    assert await told(one)
    assert one.spent() == {"acme": (1, 700)}
    assert (await refusal(two)).reason in ("concurrency", "budget_reserved", "requests")
    assert len(await admitted(one, 60)) < 60, "the minute does not start full"
    for reservation in held:
        one.settle(reservation, 1)


async def test_what_was_spent_at_an_idle_gateway_counts_in_an_emptied_redis(
    fleet: Fleet, redis: BackgroundClient
) -> None:
    fleet.set(token_budget=1000)
    busy, idle = fleet.gateway("a"), fleet.gateway("b")
    idle.settle(await idle.admit("acme", 1, 0), 995)
    await idle.send_heartbeat()
    await redis.command("FLUSHALL")
    assert len(await admitted(busy, 1, 10, 0)) == 1, "nobody has told Redis yet"
    idle.tell_again()
    await idle.send_heartbeat()
    assert (await refusal(busy)).reason == "budget_reserved"


async def test_a_minute_goes_on_where_it_was_when_redis_has_lost_it(fleet: Fleet, redis: BackgroundClient) -> None:
    fleet.set(requests_per_minute=60, tokens_per_minute=600)
    quota = fleet.gateway("a")
    for reservation in await admitted(quota, 50, 10, 0):
        quota.settle(reservation, 10)
    last = await quota.admit("acme", 10, 10)
    quota.settle(last, 30)
    await redis.command("FLUSHALL")
    assert shown(quota)["remaining-tokens"] == "70"
    assert len(await admitted(quota, 60, 10, 0)) == 7
    fleet.server.stop()
    fleet.time.now_s += 30
    await admitted(quota, 20, 10, 0)
    fleet.server.start()
    await until(lambda: told(quota), "Redis is back")
    await redis.command("FLUSHALL")
    assert len(await admitted(quota, 60, 10, 0)) == 10


async def test_a_frozen_redis_costs_requests_no_more_than_the_timeout(fleet: Fleet) -> None:
    fleet.set(requests_per_minute=1000)
    breaker_time = FakeTime()  # no timeout counts as seen late, and nobody probes before it is time
    client = RequestClient(lambda: fleet.server.url, timeout_s=0.05, clock=breaker_time.clock)

    async def is_here() -> bool:
        breaker_time.now_s += 1.0
        try:
            return bool(await client.script("return 1", (), ()))
        except RedisUnavailable:
            return False

    await until(is_here, "it is connected")
    quota = Quota(client, fleet.directory, "a", clock=fleet.time.clock, server_ms=fleet.time.server_ms)
    assert await quota.admit("acme", 1, 0)
    assert fleet.server.pid is not None
    os.kill(fleet.server.pid, signal.SIGSTOP)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    granted = await admitted(quota, 300)
    assert len(granted) == 300, "no request is lost"
    assert loop.time() - began_s < 300 * 0.05, "the breaker asks once a second"
    for reservation in granted:
        quota.settle(reservation, 1)
    os.kill(fleet.server.pid, signal.SIGCONT)
    await until(is_here, "it answers again")
    await until(lambda: told(quota), "what was taken is told")
    left = int(shown(quota)["remaining-requests"])
    assert 1000 - 301 - 10 <= left <= 1000 - 301, "calls of unknown end are at most counted twice"
    await client.close()


async def test_places_are_never_more_than_the_limit_with_redis_and_without(fleet: Fleet) -> None:
    fleet.set(concurrency=10)
    quotas = [fleet.gateway(f"g{i}", gateways=2) for i in range(2)]
    running = most = ended = 0
    reasons: set[str] = set()

    async def client(number: int) -> None:
        nonlocal running, most, ended
        while ended < 600:
            try:
                reservation = await quotas[number % 2].admit("acme", 1, 0)
            except OverLimit as error:
                reasons.add(error.reason)
                await asyncio.sleep(0)
                continue
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            ended += 1
            quotas[number % 2].settle(reservation, 1)

    async with asyncio.timeout(60):
        await asyncio.gather(*(client(i) for i in range(30)))
    assert most <= 10
    fleet.server.stop()
    ended, most = 0, 0
    async with asyncio.timeout(60):
        await asyncio.gather(*(client(i) for i in range(30)))
    assert most <= 10, "five places each"
    assert reasons == {"concurrency"}
    fleet.server.start()
    for quota in quotas:
        await until(lambda q=quota: told(q), "Redis is back")  # type: ignore[misc]
    assert len(await admitted(quotas[0], 20)) == 10


async def test_a_call_that_breaks_is_not_the_requests_fault(fleet: Fleet, redis: BackgroundClient) -> None:
    """An error reply (memory full) is Redis being away, too."""
    fleet.set(requests_per_minute=10)
    quota = fleet.gateway("a")
    (client,) = fleet.clients
    await redis.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(RedisUnavailable):
        await client.script("return redis.call('SET', KEYS[1], 'v')", ("k",), ())
    assert len(await admitted(quota, 20)) == 10
    await redis.command("CONFIG", "SET", "maxmemory", "0")
