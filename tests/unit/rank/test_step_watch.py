"""StepWatch on a clock of the test's own: slow is not stuck, stuck is found, time that nobody saw does not count."""

from collections.abc import Callable

import pytest

from tandem.workers.executor.step_watch import (
    ASK_PERIOD_S,
    DOUBT_S,
    IDLE_S,
    KNOWN_LEAST_S,
    KNOWN_STEPS,
    LEAST_S,
    MARGIN,
    MOST_S,
    StepWatch,
)
from tandem.workers.messages.step import AskActivity, RankActivity, RowWork, StepPlan

SLICE_S = 0.25
Does = Callable[[float], str | None]
"""What a rank answers at a time: "computes", "waits for its device", "waits for others"; None: nothing."""


class Steps:
    """A watch and its clock; time passes in slices, as in RankGroup.poll. ranks: what they do; none: they cannot be
    asked."""

    def __init__(self, *ranks: Does) -> None:
        self.now_s = 0.0
        self.ranks = ranks
        self.asked: list[float] = []
        self.watch = StepWatch(len(ranks), self.ask if ranks else None, lambda: self.now_s)
        self.numbers = 0

    def ask(self, question: AskActivity) -> None:
        self.asked.append(self.now_s)
        for rank, does in enumerate(self.ranks):
            if (what := does(self.now_s)) is not None:
                self.watch.answered(
                    RankActivity(
                        rank=rank,
                        number=question.number,
                        computes=what == "computes",
                        waits_for_device=what == "waits for its device",
                    )
                )

    def submit(self, tokens: int) -> None:
        self.numbers += 1
        work = [RowWork(row=0, num_tokens=tokens, samples=True)] if tokens else []
        self.watch.submitted(StepPlan(step_id=self.numbers, work=work))

    def stuck_after(self, most_s: float) -> float | None:
        """Waits; the seconds after which the step counted as stuck."""
        began_s = self.now_s
        while self.now_s - began_s < most_s:
            self.now_s += SLICE_S
            if self.watch.stuck() is not None:
                return self.now_s - began_s
        return None

    def step(self, tokens: int, took_s: float) -> None:
        self.submit(tokens)
        assert self.stuck_after(took_s) is None
        self.watch.finished()


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_nothing_is_owed_while_nothing_is_in_flight(steps: Steps) -> None:
    assert steps.stuck_after(10 * MOST_S) is None
    steps.step(1, 0.5)
    assert steps.stuck_after(10 * MOST_S) is None


def test_the_first_step_may_compile_for_minutes(steps: Steps) -> None:
    steps.submit(8)
    assert steps.stuck_after(2 * MOST_S) == MOST_S + SLICE_S


def test_quick_steps_bring_the_bound_down_to_the_least(steps: Steps) -> None:
    for _ in range(KNOWN_STEPS):
        steps.step(8, 0.5)
    steps.submit(8)
    assert steps.stuck_after(2 * MOST_S) == LEAST_S + SLICE_S


def test_a_longer_chunk_than_any_before_gets_time_in_proportion(steps: Steps) -> None:
    steps.step(8, 0.5)
    steps.submit(8 * 16)
    assert steps.stuck_after(2 * MOST_S) == MARGIN * 0.5 * 16 + SLICE_S


def test_slow_steps_raise_the_bound_but_not_without_end(steps: Steps) -> None:
    steps.step(100, 10.0)
    steps.submit(100)
    assert steps.stuck_after(2 * MOST_S) == MARGIN * 10 + SLICE_S
    steps.watch.finished()
    steps.step(100, 500.0)
    steps.submit(100)
    assert steps.stuck_after(4 * MOST_S) == 3 * 500 + SLICE_S


def test_a_plan_behind_another_counts_from_when_that_one_ended(steps: Steps) -> None:
    steps.step(8, 0.5)
    steps.submit(8)
    steps.submit(8)
    assert steps.stuck_after(5.0) is None
    assert steps.watch.finished().step_id == 2
    assert steps.stuck_after(2 * MOST_S) == MARGIN * 5 + SLICE_S


def test_time_in_which_this_process_was_stopped_does_not_count(steps: Steps) -> None:
    steps.step(8, 0.5)
    steps.submit(8)
    for _ in range(5):
        steps.now_s += 3600
        assert steps.watch.stuck() is None
    assert steps.stuck_after(2 * MOST_S) is not None


def test_a_plan_without_work_is_a_step_too(steps: Steps) -> None:
    steps.step(0, 0.5)
    steps.submit(0)
    assert steps.stuck_after(2 * MOST_S) == LEAST_S + SLICE_S


def always(what: str | None) -> Does:
    return lambda now_s: what


WAITS, COMPUTES, ON_DEVICE, SILENT = map(always, ("waits for others", "computes", "waits for its device", None))
SOON_S = DOUBT_S + IDLE_S + 2 * ASK_PERIOD_S


def test_ranks_that_wait_for_each_other_are_found_at_any_step() -> None:
    steps = Steps(WAITS, WAITS)
    steps.submit(4096)
    after_s = steps.stuck_after(2 * MOST_S)
    assert after_s is not None and IDLE_S < after_s <= SOON_S
    assert steps.asked[0] == DOUBT_S


@pytest.mark.parametrize("other", [COMPUTES, SILENT, lambda now_s: "computes" if now_s % 8 < 2 else "waits for others"])
def test_ranks_that_wait_for_one_that_computes_are_not_stuck(other: Does) -> None:
    """Nor for one whose interpreter lock is held, nor for one that a busy machine lets compute now and then."""
    steps = Steps(WAITS, other, WAITS)
    steps.submit(8)
    assert steps.stuck_after(MOST_S) is None


def test_a_rank_that_stops_computing_counts_from_then() -> None:
    steps = Steps(WAITS, lambda now_s: "computes" if now_s < 100 else "waits for others")
    steps.submit(8)
    after_s = steps.stuck_after(MOST_S)
    assert after_s is not None and 100 + IDLE_S <= after_s <= 100 + SOON_S


def test_devices_get_the_time_that_steps_are_known_to_take() -> None:
    """While their hosts only wait: one that computes may be compiling."""
    steps = Steps(ON_DEVICE, ON_DEVICE)
    steps.submit(8)
    assert steps.stuck_after(MOST_S - 1) is None, "the first step"
    steps.watch.finished()
    for _ in range(KNOWN_STEPS):
        steps.step(8, SLICE_S)
    steps.submit(16)
    assert steps.stuck_after(LEAST_S - 1) is None, "no step had as many tokens"


@pytest.mark.parametrize(
    ("ranks", "tokens", "bound_s"),
    [
        ((ON_DEVICE, ON_DEVICE), 8, KNOWN_LEAST_S),
        ((ON_DEVICE, WAITS), 8, KNOWN_LEAST_S),
        ((ON_DEVICE, COMPUTES), 8, LEAST_S),
        ((ON_DEVICE, ON_DEVICE), 16, LEAST_S),
    ],
)
def test_a_device_whose_steps_are_known_is_given_15_s(ranks: tuple[Does, ...], tokens: int, bound_s: float) -> None:
    steps = Steps(*ranks)
    for _ in range(KNOWN_STEPS):
        steps.step(8, 0.5)
    steps.submit(tokens)
    assert steps.stuck_after(MOST_S) == bound_s + SLICE_S


def test_a_short_step_asks_nobody() -> None:
    steps = Steps(WAITS)
    for _ in range(10):
        steps.step(8, DOUBT_S - SLICE_S)
    assert not steps.asked


def test_an_answer_to_an_earlier_question_counts_for_nothing() -> None:
    steps = Steps(SILENT)
    steps.submit(8)
    for _ in range(int(LEAST_S / SLICE_S)):
        steps.now_s += SLICE_S
        assert steps.watch.stuck() is None
        number = len(steps.asked) - 1
        steps.watch.answered(RankActivity(rank=0, number=number, computes=False, waits_for_device=False))
