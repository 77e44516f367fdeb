"""The breaker's states, with a clock in the test's hand."""

import pytest

from tandem.cluster.state.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(3):
        assert breaker.admit()
        breaker.record_failure()
    return breaker


def test_it_opens_after_three_failures_in_a_row(clock: Clock) -> None:
    breaker = Breaker(clock)
    for outcome in (False, False, True, False, False):
        assert breaker.admit()
        breaker.record_success() if outcome else breaker.record_failure()
    assert breaker.state == "closed"
    breaker.record_failure()
    assert breaker.state == "open"
    assert not breaker.admit()


def test_one_probe_a_second_goes_out_while_open(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 0.99
    assert not breaker.admit()
    clock.now_s += 0.02
    assert breaker.admit()
    assert breaker.state == "half-open"
    assert not breaker.admit(), "only one probe"
    breaker.record_failure()
    assert breaker.state == "open"
    assert not breaker.admit()


def test_a_probe_that_succeeds_closes_it(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 1.0
    assert breaker.admit()
    breaker.record_success()
    assert breaker.state == "closed"
    assert breaker.admit() and breaker.admit()


def test_a_lost_probe_does_not_keep_it_half_open_for_ever(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 1.0
    assert breaker.admit()
    clock.now_s += 1.0
    assert breaker.admit(), "the first probe never reported; another one goes"


def test_who_cannot_wait_is_no_probe(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now_s += 5.0
    assert not breaker.admit(may_probe=False)
    assert breaker.admit()
    assert not breaker.admit(may_probe=False), "while the probe is out, too"
    breaker.record_success()
    assert breaker.admit(may_probe=False)
