"""One tenant's arithmetic in one gateway, on times that are passed in: buckets, debts, reports, and its share."""

from typing import Any

import pytest

from tandem.cluster.tenants.account import Account, Bucket, Debt, QuotaVerdict
from tandem.cluster.tenants.tenant import Limits
from tandem.cluster.tenants.tenant_admission import Reservation
from tests.unit.tenants.tenant_rig import tenant


def account(gateways: int = 1, **limits: Any) -> Account:
    return Account("acme", Limits(**limits), 1, "g", gateways, 0.0)


def reservation(tokens: int = 0, charge: int | None = None, wanted: int | None = None) -> Reservation:
    charge = tokens if charge is None else charge
    return Reservation("acme", tokens, charge, charge if wanted is None else wanted, is_counted=True)


def verdict(**fields: Any) -> QuotaVerdict:
    known = {"ok": True, "reason": "", "wait_ms": 0.0, "gateways": 1, "base": 0.0, "used_elsewhere": 0.0}
    return QuotaVerdict(**{**known, **fields})


# ---- buckets and debts ----


def test_a_bucket_fills_in_a_minute_and_no_further() -> None:
    bucket = Bucket(size=120.0, level=20.0, at_s=10.0)
    assert bucket.fill(10.0) == 20.0 and bucket.fill(15.0) == 30.0 and bucket.fill(16.0) == 32.0
    assert bucket.fill(12.0) == 32.0, "a clock that goes back takes nothing"
    assert bucket.fill(1000.0) == 120.0


def test_a_bucket_is_overdrawn_by_its_size_at_most() -> None:
    bucket = Bucket(size=100.0, level=100.0, at_s=0.0)
    bucket.add(-130.0, 0.0)
    assert bucket.level == -30.0
    bucket.add(-200.0, 0.0)
    assert bucket.level == -100.0
    bucket.add(50.0, 6.0)
    assert bucket.level == -40.0
    bucket.add(1000.0, 6.0)
    assert bucket.level == 100.0


def test_a_bucket_says_how_long_it_takes() -> None:
    bucket = Bucket(size=120.0, level=20.0, at_s=0.0)
    assert bucket.wait_s(50.0, 0.0) == 15.0 and bucket.wait_s(50.0, 5.0) == 10.0
    assert bucket.wait_s(10.0, 5.0) == 0.0


def test_what_was_taken_fades_as_the_bucket_would_have_filled_and_what_was_given_back_stays() -> None:
    debt = Debt(rate=60.0)
    debt.add(-10.0, 0.0)
    debt.add(-1.0, 4.0)
    assert debt.amount == -7.0
    assert debt.take(5.0) == -6.0 and debt.take(5.0) == 0.0
    debt.add(-2.0, 10.0)
    assert debt.take(100.0) == 0.0, "no more than to nothing"
    debt.add(5.0, 100.0)
    assert debt.take(200.0) == 5.0
    debt.add(-5.0, 300.0)
    debt.add(0.0, 299.0)
    assert debt.amount == -5.0


def test_a_report_that_may_be_lost_says_again_what_was_taken_only() -> None:
    debt = Debt()
    debt.give_back(-3.0, 0.0)
    debt.give_back(4.0, 0.0)
    assert debt.take(0.0) == -3.0


# ---- with Redis ----


def test_a_report_says_what_is_held_and_asked_for() -> None:
    held = account(concurrency=5, token_budget=1000, requests_per_minute=60, tokens_per_minute=600)
    held.hold(100)
    held.hold(50)
    held.release(100)
    held.bill(100, 30, 0.0)
    plain = held.report(0.0, None)
    assert (plain.running, plain.reserved, plain.used, plain.number) == (1, 50, 30, 1)
    assert (plain.admit, plain.need, plain.charge, plain.wanted) == (False, 0, 0, 0)
    assert (plain.gateway, plain.budget_id, plain.kv_tokens) == ("g", 1, None)
    assert (plain.requests_per_minute, plain.tokens_per_minute, plain.concurrency) == (60, 600, 5)
    assert plain.token_budget == 1000
    asking = held.report(0.0, 77, reservation(9, 8, 7))
    assert (asking.number, asking.admit, asking.need, asking.charge, asking.wanted) == (2, True, 9, 8, 7)
    assert asking.kv_tokens == 77


def test_an_account_is_idle_when_nothing_runs_and_no_answer_is_awaited() -> None:
    held = account()
    assert held.is_idle
    held.report(0.0, None)
    assert held.is_idle, "nobody waits for the answer of a report that asks for nothing"
    first, second = (held.report(0.0, None, reservation(5)) for _ in range(2))
    assert not held.is_idle and (first.awaited, second.awaited) == ([], [first.number])
    held.learn(first, verdict(), 0.0)
    assert not held.is_idle and held.report(0.0, None).awaited == [second.number]
    held.unreported(second, 0.0)
    assert held.is_idle
    held.hold(5)
    assert not held.is_idle
    held.release(5)
    assert held.is_idle


def test_what_was_used_less_or_more_than_charged_is_told_once() -> None:
    held = account(tokens_per_minute=600)
    held.learn(held.report(0.0, None), verdict(tokens=500.0), 0.0)
    held.bill(100, 130, 0.0)
    assert held.left(0.0)[1] == Bucket(600.0, 470.0, 0.0)
    held.bill(100, 40, 0.0)
    report = held.report(0.0, None)
    assert (report.delta_requests, report.delta_tokens, report.known_tokens) == (0.0, 30.0, 530.0)
    assert held.report(0.0, None).delta_tokens == 0.0


def test_a_report_that_may_be_lost_is_said_again() -> None:
    held = account(tokens_per_minute=600, requests_per_minute=60)
    held.bill(0, 50, 0.0)
    held._take(held._requests, held._debt_requests, 2, 0.0)
    lost = held.report(0.0, None)
    assert (lost.delta_requests, lost.delta_tokens) == (-2.0, -50.0)
    held.unreported(lost, 0.0)
    again = held.report(1.0, None)
    assert (again.delta_requests, again.delta_tokens) == (-1.0, -40.0), "a second has filled the buckets"


def test_what_redis_says_is_the_truth() -> None:
    held = account(gateways=2, requests_per_minute=60, tokens_per_minute=600)
    held.is_unavailable = True
    held.learn(held.report(0.0, None), verdict(gateways=3, base=7.0, used_elsewhere=9.5, requests=10.0), 5.0)
    assert (held.is_unavailable, held.share_of, held.base, held.used_elsewhere) == (False, 3, 7.0, 9.5)
    assert held.left(5.0) == (Bucket(60.0, 10.0, 5.0), Bucket(600.0, 600.0, 5.0))
    held.used = 4
    assert held.spent == 13
    held.learn(held.report(0.0, None), verdict(gateways=1), 5.0)
    assert held.share_of == 2, "there are two at least"


def test_limits_that_change_keep_what_is_used_and_a_new_budget_begins_at_nothing() -> None:
    held = account(requests_per_minute=60, tokens_per_minute=600)
    held.learn(held.report(0.0, None), verdict(requests=30.0, tokens=100.0, base=5.0, used_elsewhere=8.0), 0.0)
    held.used = 3
    held.update(tenant(requests_per_minute=20, tokens_per_minute=6000), 0.0)
    assert held.left(0.0) == (Bucket(20.0, 20.0, 0.0), Bucket(6000.0, 100.0, 0.0))
    assert held.spent == 11
    held.update(tenant(budget_id=2, tokens_per_minute=6000), 0.0)
    assert held.left(0.0)[0] is None
    assert (held.spent, held.base, held.report(0.0, None).budget_id) == (0, 0.0, 2)
    held.update(tenant(budget_id=2, tokens_per_minute=6000, requests_per_minute=7), 0.0)
    assert held.left(0.0)[0] == Bucket(7.0, 7.0, 0.0)


# ---- without Redis ----


def test_the_share_is_that_part_of_what_was_left_and_of_its_return() -> None:
    held = account(gateways=4, requests_per_minute=60, tokens_per_minute=600)
    held.learn(held.report(0.0, None), verdict(gateways=4, requests=40.0, tokens=200.0), 0.0)
    assert held.refusal_of_share(reservation(10), None, 0.0) is None and held.is_unavailable
    assert held.left(0.0) == (Bucket(15.0, 10.0, 0.0), Bucket(150.0, 50.0, 0.0))
    assert held.refusal_of_share(reservation(10), None, 6.0) is None
    assert held.left(6.0) == (Bucket(15.0, 11.5, 6.0), Bucket(150.0, 65.0, 6.0)), "shared out once"
    report = held.report(6.0, None)
    assert (report.known_requests, report.known_tokens) == (46.0, 260.0), "the share says that of the whole"
    held.update(tenant(requests_per_minute=120, tokens_per_minute=2), 6.0)
    assert held.left(6.0) == (Bucket(30.0, 11.5, 6.0), Bucket(1.0, 1.0, 6.0)), "one at least"


def test_the_share_of_a_small_limit_holds_one_request() -> None:
    held = account(gateways=4, requests_per_minute=2)
    assert held.refusal_of_share(reservation(), None, 0.0) == ("requests", 30.0)
    assert held.left(0.0)[0] == Bucket(1.0, 0.5, 0.0)
    assert held.refusal_of_share(reservation(), None, 30.0) is None


def test_the_share_refuses_with_the_time_that_it_takes() -> None:
    held = account(gateways=2, requests_per_minute=60, tokens_per_minute=600)
    held.learn(held.report(0.0, None), verdict(gateways=2, requests=1.0, tokens=100.0), 0.0)
    assert held.refusal_of_share(reservation(1), None, 0.0) == ("requests", 1.0)
    assert held.refusal_of_share(reservation(55), None, 1.0) is None
    assert held.refusal_of_share(reservation(56), None, 1.0) == ("tokens", pytest.approx(0.2))
    assert held.refusal_of_share(reservation(900, 600, 400), None, 1.0) == ("tokens", pytest.approx(49.0)), (
        "a full share"
    )
    assert held.refusal_of_share(reservation(900, 600, 55), None, 1.0) is None, "an open end needs what it names"


def test_a_request_takes_its_charge_or_what_the_share_may_be_overdrawn_by() -> None:
    held = account(gateways=2, requests_per_minute=60, tokens_per_minute=600)
    assert held.refusal_of_share(reservation(1), None, 0.0) is None
    assert held.take_from_share(250, 0.0) == 250
    assert held.left(0.0) == (Bucket(30.0, 29.0, 0.0), Bucket(300.0, 50.0, 0.0))
    assert held.take_from_share(600, 0.0) == 350
    assert held.left(0.0)[1] == Bucket(300.0, -300.0, 0.0)
    report = held.report(0.0, None)
    assert (report.delta_requests, report.delta_tokens) == (-2.0, -600.0)
    free = account(concurrency=1)
    assert free.take_from_share(250, 0.0) == 250 and free.report(0.0, None).delta_tokens == 0.0


@pytest.mark.parametrize(
    ("limit", "gateways", "running", "is_refused"),
    [(4, 2, 1, False), (4, 2, 2, True), (5, 2, 2, True), (1, 3, 0, False), (1, 3, 1, True), (3, 1, 2, False)],
)
def test_the_share_of_concurrency_is_one_at_least(limit: int, gateways: int, running: int, is_refused: bool) -> None:
    held = account(gateways=gateways, concurrency=limit)
    for _ in range(running):
        held.hold(1)
    refused = held.refusal_of_share(reservation(1), None, 0.0)
    assert refused == (("concurrency", 0.0) if is_refused else None)


@pytest.mark.parametrize(
    ("before", "need", "is_refused"),
    [(0, 500, False), (1, 49, False), (1, 50, True), (50, 0, False), (51, 0, True)],
)
def test_the_share_of_the_cache_is_for_what_runs_beside_others(before: int, need: int, is_refused: bool) -> None:
    """100 tokens for two gateways. One request always fits."""
    held = account(gateways=2, kv_share=0.1)
    if before:
        held.hold(before)
    assert held.refusal_of_share(reservation(need), 100, 0.0) == (("kv_share", 0.0) if is_refused else None)
    assert held.refusal_of_share(reservation(need), None, 0.0) is None


@pytest.mark.parametrize(
    ("used", "held_by_others", "reason"),
    [
        (100, 0, None),
        (449, 0, None),
        (450, 0, "budget_reserved"),
        (300, 149, None),
        (300, 150, "budget_reserved"),
        (799, 0, "budget_reserved"),
        (800, 0, "budget"),
    ],
)
def test_the_share_of_a_budget_is_of_what_was_left_when_redis_went(
    used: int, held_by_others: int, reason: str | None
) -> None:
    """1000 tokens: 200 used elsewhere and 100 here leave 700, half of them for this gateway. What the request itself
    may use does not count before it is used."""
    held = account(gateways=2, token_budget=1000)
    held.used = 100
    held.learn(held.report(0.0, None), verdict(gateways=2, used_elsewhere=200.0), 0.0)
    held.hold(held_by_others)
    held.used = used
    assert held.refusal_of_share(reservation(500), None, 0.0) == (None if reason is None else (reason, 0.0))


def test_a_gateways_part_of_a_debt_fades_at_its_part_of_the_rate() -> None:
    held = account(gateways=2, requests_per_minute=60, tokens_per_minute=600)
    assert held.refusal_of_share(reservation(1), None, 0.0) is None
    held.take_from_share(100, 0.0)
    report = held.report(1.0, None)
    assert (report.delta_requests, report.delta_tokens) == (-0.5, -95.0)


def test_debts_fade_at_the_rate_of_as_many_gateways_as_redis_knows() -> None:
    held = account(tokens_per_minute=600)
    held.learn(held.report(0.0, None), verdict(gateways=5), 0.0)
    held.bill(0, 50, 0.0)
    assert held.report(1.0, None).delta_tokens == -48.0
