"""Each limit against a real Redis, on a fake clock: what is admitted, why not, and what the headers say."""

import asyncio

import pytest

from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.tenants.account import LEASE_MS
from tandem.cluster.tenants.quota import AT_ONCE
from tandem.cluster.tenants.tenant_admission import OverLimit
from tests.unit.tenants.tenant_rig import Fleet, admitted, refusal, shown, tenant, until

LEASE_S = LEASE_MS / 1000


async def test_requests_of_a_minute_and_their_return(fleet: Fleet) -> None:
    fleet.set(requests_per_minute=6)
    quota = fleet.gateway("a")
    assert len(await admitted(quota, 10)) == 6
    refused = await refusal(quota)
    assert (refused.status, refused.code, refused.reason) == (429, "rate_limit_exceeded", "requests")
    assert refused.retry_after_s == pytest.approx(10, abs=0.1)
    fleet.time.now_s += 9.9
    assert not await admitted(quota, 1)
    fleet.time.now_s += 0.2
    assert len(await admitted(quota, 2)) == 1
    fleet.time.now_s += 3600
    assert len(await admitted(quota, 10)) == 6, "an idle hour saves up one minute"


async def test_tokens_are_reserved_and_the_unused_come_back(fleet: Fleet) -> None:
    fleet.set(tokens_per_minute=1000)
    quota = fleet.gateway("a")
    reservation = await quota.admit("acme", 100, 700)
    refused = await refusal(quota, 100, 200)
    assert refused.reason == "tokens"
    assert refused.retry_after_s == pytest.approx(6, abs=0.1)
    quota.settle(reservation, 150)
    assert len(await admitted(quota, 1, 100, 750)) == 1, "850 of 1000 are left, and known at once"
    assert not await admitted(quota, 1)


async def test_what_was_used_beyond_the_reservation_is_charged(fleet: Fleet) -> None:
    """A request whose allowed output is larger than a whole minute reserves the minute."""
    fleet.set(tokens_per_minute=100)
    quota = fleet.gateway("a")
    reservation = await quota.admit("acme", 10, 5000)
    quota.settle(reservation, 160)
    assert (await refusal(quota)).retry_after_s == pytest.approx(60 * 0.61, abs=0.2)


async def test_an_answer_of_no_stated_length_needs_no_full_minute(fleet: Fleet) -> None:
    """A chat without max_tokens may take the rest of the context, which is more than this tenant's minute."""
    fleet.set(tokens_per_minute=400)
    quota, other = fleet.gateway("a"), fleet.gateway("b")
    for used in (50, 100, 150):
        reservation = await quota.admit("acme", 30, 4000, is_open_ended=True)
        assert shown(quota)["remaining-tokens"] == "0", "it may take all: others wait until that is known"
        for gateway in (quota, other):
            assert (await refusal(gateway, 1, 1)).reason == "tokens"
        quota.settle(reservation, used)
        await quota.send_heartbeat()
    assert shown(quota)["remaining-tokens"] == "100"
    refused = await refusal(quota, 30, 4000)
    assert refused.retry_after_s == pytest.approx(45, abs=0.1), "who names a length is refused by it"
    quota.settle(await quota.admit("acme", 30, 4000, is_open_ended=True), 30)
    with pytest.raises(OverLimit, match="this asks for 94") as caught:
        await quota.admit("acme", 30, 4000, is_open_ended=True)
    assert caught.value.retry_after_s == pytest.approx(60 * (94 - 70) / 400, abs=0.1) or caught.value.retry_after_s == 4
    fleet.time.now_s += 60 * (94 - 70) / 400 + 0.1
    long = await quota.admit("acme", 30, 4000, is_open_ended=True)
    quota.settle(long, 4030)
    for waited_s in (60, 60):
        assert (await refusal(quota, 1, 1)).reason == "tokens", "what was used beyond is paid by waiting"
        fleet.time.now_s += waited_s
    assert await quota.admit("acme", 30, 4000, is_open_ended=True)


async def test_a_prompt_longer_than_a_minute_is_refused_for_good(fleet: Fleet) -> None:
    fleet.set(tokens_per_minute=100)
    refused = await refusal(fleet.gateway("a"), 101)
    assert refused.retry_after_s is None
    assert "101" in str(refused) and "100" in str(refused)


async def test_a_prompt_of_exactly_a_minute_fits(fleet: Fleet) -> None:
    fleet.set(tokens_per_minute=100)
    reservation = await fleet.gateway("a").admit("acme", 100, 0)
    assert (reservation.tokens, reservation.charge) == (100, 100)


async def test_concurrency_counts_all_gateways_and_frees_at_once(fleet: Fleet) -> None:
    fleet.set(concurrency=3)
    one, two = fleet.gateway("a"), fleet.gateway("b")
    held = await admitted(one, 2)
    assert len(await admitted(two, 5)) == 1
    assert (await refusal(one)).reason == "concurrency"
    one.settle(held[0], 1)
    await one.send_heartbeat()
    assert len(await admitted(two, 5)) == 1, "what one has freed the other may take"


async def test_a_refused_request_holds_no_place_not_even_until_the_next_beat(fleet: Fleet) -> None:
    fleet.set(concurrency=2, tokens_per_minute=100, token_budget=10_000)
    one, two = fleet.gateway("a"), fleet.gateway("b")
    assert len(await admitted(one, 1, 1, 0)) == 1
    assert (await refusal(one, 1, 99)).reason == "tokens"
    assert len(await admitted(two, 1, 1, 0)) == 1


async def test_the_concurrency_of_a_dead_gateway_is_freed_by_its_lease(fleet: Fleet) -> None:
    fleet.set(concurrency=2)
    dying, living = fleet.gateway("a"), fleet.gateway("b")
    assert len(await admitted(dying, 2)) == 2
    assert not await admitted(living, 1)
    fleet.time.now_s += LEASE_S - 0.1
    assert not await admitted(living, 1)
    fleet.time.now_s += 0.2
    assert len(await admitted(living, 3)) == 2


async def test_a_living_gateway_keeps_its_lease_by_its_beat(fleet: Fleet) -> None:
    fleet.set(concurrency=1)
    busy, other = fleet.gateway("a"), fleet.gateway("b")
    await busy.admit("acme", 1, 0)
    for _ in range(10):
        fleet.time.now_s += LEASE_S - 1
        await busy.send_heartbeat()
        assert not await admitted(other, 1)


async def test_beats_begin_with_the_first_account(fleet: Fleet) -> None:
    """While nobody has one there is nothing to tell; the first is told of, and keeps its place, by run() alone."""
    busy, other = fleet.gateway("a"), fleet.gateway("b")
    beating = asyncio.create_task(busy.run())

    async def is_waiting() -> bool:
        return bool(busy._triggered._waiters)  # type: ignore[attr-defined]

    async def is_renewed() -> bool:
        return busy._renew_at_s > fleet.time.now_s

    await until(is_waiting, "the first heartbeat is over")
    fleet.set(concurrency=1)
    await busy.admit("acme", 1, 0)
    for _ in range(3):
        fleet.time.now_s += LEASE_S - 1
        await until(is_renewed, "a heartbeat comes")
        async with busy._turns:
            assert not await admitted(other, 1)
    beating.cancel()


async def test_a_long_request_keeps_its_place_beside_a_tenant_that_always_has_news(fleet: Fleet) -> None:
    """News of one wake the heartbeat before its second is over: the others' leases are renewed all the same."""
    fleet.set(concurrency=1)
    fleet.directory.tenants["chatty"] = tenant("chatty", requests_per_minute=100_000)
    busy, other = fleet.gateway("a"), fleet.gateway("b")
    await busy.admit("acme", 1, 0)
    for _ in range(3 * int(LEASE_S / 0.25)):
        fleet.time.now_s += 0.25
        busy.settle(await busy.admit("chatty", 1, 0), 1)
        await busy.send_heartbeat()
        assert not await admitted(other, 1)


async def test_a_lost_or_late_report_changes_no_count(fleet: Fleet) -> None:
    """An older report that arrives after a newer one is not believed."""
    fleet.set(concurrency=2)
    quota = fleet.gateway("a")
    account = quota._account("acme")
    assert account is not None
    account.hold(1)
    account.hold(1)
    late = account.report(fleet.time.clock(), None)
    account.release(1)
    account.release(1)
    await quota._ask(account, account.report(fleet.time.clock(), None))
    await quota._ask(account, late)
    await quota._ask(account, late)
    assert len(await admitted(fleet.gateway("b"), 3)) == 2


async def test_the_budget_ends_for_good_and_starts_anew_when_it_is_set(fleet: Fleet) -> None:
    fleet.set(token_budget=100)
    quota, other = fleet.gateway("a"), fleet.gateway("b")
    first = await quota.admit("acme", 10, 200)
    held = await refusal(other)
    assert (held.reason, held.code) == ("budget_reserved", "rate_limit_exceeded"), "it may be given back"
    quota.settle(first, 60)
    await quota.send_heartbeat()
    second = await other.admit("acme", 10, 100)
    other.settle(second, 60)
    await other.send_heartbeat()
    gone = await refusal(quota)
    assert (gone.reason, gone.code, gone.retry_after_s) == ("budget", "insufficient_quota", None)
    fleet.time.now_s += 1e6
    assert (await refusal(other)).reason == "budget", "no time brings it back"
    fleet.set(token_budget=100, budget_id=2)
    assert await quota.admit("acme", 1, 1)


async def test_a_gateway_that_has_not_heard_of_the_new_budget_does_not_spoil_it(fleet: Fleet) -> None:
    fleet.set(token_budget=100)
    slow, quick = fleet.gateway("a"), fleet.gateway("b")
    slow.settle(await slow.admit("acme", 1, 1), 99)
    fleet.set(token_budget=100, budget_id=2)
    quick.settle(await quick.admit("acme", 1, 1), 10)
    fleet.set(token_budget=100, budget_id=1)
    await slow.send_heartbeat()
    fleet.set(token_budget=100, budget_id=2)
    quick.settle(await quick.admit("acme", 1, 1), 10)
    assert quick.spent() == {"acme": (2, 20)}


async def test_what_dead_gateways_have_spent_stays_spent(fleet: Fleet, redis: BackgroundClient) -> None:
    fleet.set(token_budget=1000)
    for number in range(5):
        quota = fleet.gateway(f"g{number}")
        quota.settle(await quota.admit("acme", 1, 1), 100)
        await quota.send_heartbeat()
        fleet.time.now_s += 86400 / 2
    last = fleet.gateway("last")
    await last.admit("acme", 1, 1)
    assert last.spent() == {"acme": (1, 500)}
    fields = await redis.command("HKEYS", keys.quota("acme"))
    assert b"u:g0" not in fields and b"u:g4" in fields, "gone for a day: folded into one number"


async def test_a_share_of_the_cache_bounds_what_is_in_flight_but_one_request_always_fits(fleet: Fleet) -> None:
    fleet.kv_tokens = 1000
    fleet.set(kv_share=0.5)
    quota = fleet.gateway("a")
    big = await quota.admit("acme", 600, 100)
    assert (await refusal(quota, 1, 1)).reason == "kv_share"
    quota.settle(big, 600)
    assert len(await admitted(quota, 10, 100, 50)) == 3


async def test_headers_say_what_is_left(fleet: Fleet) -> None:
    fleet.set(requests_per_minute=10, tokens_per_minute=600)
    quota = fleet.gateway("a")
    assert shown(quota) == {
        "limit-requests": "10",
        "remaining-requests": "10",
        "reset-requests": "0s",
        "limit-tokens": "600",
        "remaining-tokens": "600",
        "reset-tokens": "0s",
    }
    reservation = await quota.admit("acme", 100, 200)
    assert (shown(quota)["remaining-requests"], shown(quota)["reset-requests"]) == ("9", "6s")
    assert (shown(quota)["remaining-tokens"], shown(quota)["reset-tokens"]) == ("300", "30s")
    quota.settle(reservation, 120)
    assert shown(quota)["remaining-tokens"] == "480"
    fleet.time.now_s += 6
    assert shown(quota)["remaining-requests"] == "10"
    fleet.set(tokens_per_minute=600)
    assert set(shown(quota)) == {"limit-tokens", "remaining-tokens", "reset-tokens"}


async def test_limits_that_change_hold_from_the_next_request_on(fleet: Fleet) -> None:
    fleet.set(requests_per_minute=2)
    quota = fleet.gateway("a")
    assert len(await admitted(quota, 5)) == 2
    fleet.set(requests_per_minute=60)
    fleet.time.now_s += 5
    assert len(await admitted(quota, 20)) == 5, "what was used is used; it fills faster from now on"
    fleet.set()
    assert len(await admitted(quota, 50)) == 50
    assert shown(quota) == {}


async def test_a_tenant_without_limits_costs_no_call(fleet: Fleet, redis: BackgroundClient) -> None:
    fleet.set(weight=2.0, max_adapters=3)
    quota = fleet.gateway("a")
    reservation = await quota.admit("acme", 1, 1)
    quota.settle(reservation, 2)
    await quota.send_heartbeat()
    assert await redis.command("EXISTS", keys.quota("acme")) == 0
    assert not (await quota.admit("nobody", 1, 1)).is_counted


async def test_a_tenant_that_is_removed_is_forgotten_when_its_requests_have_ended(fleet: Fleet) -> None:
    fleet.set(concurrency=1)
    quota = fleet.gateway("a")
    reservation = await quota.admit("acme", 1, 1)
    del fleet.directory.tenants["acme"]
    await quota.send_heartbeat()
    quota.settle(reservation, 2)
    await quota.send_heartbeat()
    assert quota.spent() == {}


async def test_a_tenant_that_is_removed_while_its_request_waits_is_settled_all_the_same(fleet: Fleet) -> None:
    fleet.set(concurrency=3)
    quota = fleet.gateway("a")
    for _ in range(AT_ONCE):
        await quota._turns.acquire()
    waiting = asyncio.create_task(quota.admit("acme", 1, 1))
    await asyncio.sleep(0)
    fleet.directory.tenants.clear()
    await quota.send_heartbeat()
    for _ in range(AT_ONCE):
        quota._turns.release()
    reservation = await waiting
    quota.settle(reservation, 2)
    await quota.send_heartbeat()
    assert not quota._accounts
