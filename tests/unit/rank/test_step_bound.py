"""StepBound on a clock of the test's own: slow is not stuck, stuck is found, time that nobody saw does not count."""

import pytest

from tandem.workers.executor.liveness import LEAST_S, MARGIN, MOST_S, StepBound
from tandem.workers.messages.step import RowWork, StepPlan


class Steps:
    """A bound and its clock; time passes in slices, as in RankGroup.wait."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.bound = StepBound(lambda: self.now_s)
        self.numbers = 0

    def submit(self, tokens: int) -> None:
        self.numbers += 1
        work = [RowWork(row=0, num_tokens=tokens, samples=True)] if tokens else []
        self.bound.submitted(StepPlan(step_id=self.numbers, work=work))

    def overdue_after(self, most_s: float) -> float | None:
        """Waits; the seconds after which the step counted as stuck."""
        began_s = self.now_s
        while self.now_s - began_s < most_s:
            self.now_s += 0.25
            if self.bound.overdue_s() is not None:
                return self.now_s - began_s
        return None

    def step(self, tokens: int, took_s: float) -> None:
        self.submit(tokens)
        assert self.overdue_after(took_s) is None
        self.bound.finished()


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_nothing_is_owed_while_nothing_is_in_flight(steps: Steps) -> None:
    assert steps.overdue_after(10 * MOST_S) is None
    steps.step(1, 0.5)
    assert steps.overdue_after(10 * MOST_S) is None


def test_the_first_step_may_compile_for_minutes(steps: Steps) -> None:
    steps.submit(8)
    assert steps.overdue_after(2 * MOST_S) == MOST_S + 0.25


def test_quick_steps_bring_the_bound_down_to_the_least(steps: Steps) -> None:
    for _ in range(3):
        steps.step(8, 0.5)
    steps.submit(8)
    assert steps.overdue_after(2 * MOST_S) == LEAST_S + 0.25


def test_a_longer_chunk_than_any_before_gets_time_in_proportion(steps: Steps) -> None:
    steps.step(8, 0.5)
    steps.submit(8 * 16)
    assert steps.overdue_after(2 * MOST_S) == MARGIN * 0.5 * 16 + 0.25


def test_slow_steps_raise_the_bound_but_not_without_end(steps: Steps) -> None:
    steps.step(100, 10.0)
    steps.submit(100)
    assert steps.overdue_after(2 * MOST_S) == MARGIN * 10 + 0.25
    steps.bound.finished()
    steps.step(100, 500.0)
    steps.submit(100)
    assert steps.overdue_after(4 * MOST_S) == 3 * 500 + 0.25


def test_a_plan_behind_another_counts_from_when_that_one_ended(steps: Steps) -> None:
    steps.step(8, 0.5)
    steps.submit(8)
    steps.submit(8)
    assert steps.overdue_after(5.0) is None
    assert steps.bound.finished().step_id == 2
    assert steps.overdue_after(2 * MOST_S) == MARGIN * 5 + 0.25


def test_time_in_which_this_process_was_stopped_does_not_count(steps: Steps) -> None:
    steps.step(8, 0.5)
    steps.submit(8)
    for _ in range(5):
        steps.now_s += 3600
        assert steps.bound.overdue_s() is None
    assert steps.overdue_after(2 * MOST_S) is not None


def test_a_plan_without_work_is_a_step_too(steps: Steps) -> None:
    steps.step(0, 0.5)
    steps.submit(0)
    assert steps.overdue_after(2 * MOST_S) == LEAST_S + 0.25
