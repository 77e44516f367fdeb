"""Detects ranks that live and make no progress: a collective that never ends, a thread that stands still. Torch-free.

Owned by rank_group.py. An honest step may take minutes: its first one compiles, a prefill chunk is long, the machine is
busy. So time alone (StepBound) tells late. While a step runs long, the ranks are asked once a second whether they
compute (RankActivities): where none does, they wait for each other, and will for ever. RunningClock leaves out the time
in which this process was itself stopped. docs/decisions/085-stuck-ranks.md.
"""

import time
from collections import deque
from collections.abc import Callable

from tandem.workers.engine.base.running_clock import RunningClock
from tandem.workers.messages.step import AskActivity, RankActivity, StepPlan

LEAST_S, KNOWN_LEAST_S, MOST_S = 60.0, 15.0, 600.0
KNOWN_STEPS = 50
"""Steps after which the time of one that is no larger is known."""
MARGIN = 20.0
BEYOND_SLOWEST = 3.0
LONGEST_TICK_S = 1.0
DOUBT_S = 1.0
"""Seconds that a step has run when its ranks are first asked."""
ASK_PERIOD_S = 1.0
IDLE_S = 10.0
"""Seconds for which no rank has computed, when they count as stuck."""


class StepWatch:
    """Watches the steps of a group. ask(question): sends a question to every rank; None for ranks that cannot be asked.
    For one thread."""

    def __init__(
        self,
        num_ranks: int,
        ask: Callable[[AskActivity], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bound = StepBound(clock)
        self._activities = None if ask is None else RankActivities(num_ranks, ask)

    def submitted(self, plan: StepPlan) -> None:
        self._bound.submitted(plan)

    def finished(self) -> StepPlan:
        """Notes that a result has come; returns its plan."""
        if self._activities is not None:
            self._activities.forget()
        return self._bound.finished()

    def answered(self, activity: RankActivity) -> None:
        """Notes a rank's answer."""
        if self._activities is not None:
            self._activities.answered(activity)

    def stuck(self) -> str | None:
        """Returns a message if the ranks are stuck. Called several times a second while a result is awaited."""
        ran_s = self._bound.ran_s()
        hosts_idle_s = idle_s = 0.0
        if self._activities is not None and ran_s >= DOUBT_S:
            hosts_idle_s, idle_s = self._activities.look(ran_s)
        if idle_s >= IDLE_S:
            return f"no step has finished for {ran_s:.0f} s and no rank computes: they wait for each other"
        if ran_s > self._bound.bound_s(hosts_idle=hosts_idle_s >= IDLE_S):
            return f"no step has finished for {ran_s:.0f} s although every rank lives: they are stuck"
        return None


class RankActivities:
    """Answers of the ranks about the step under way, round by round: a rank that has not answered by the next question
    counts as computing, as the interpreter lock may be held by what it computes. Times are seconds that the step has
    run."""

    def __init__(self, num_ranks: int, ask: Callable[[AskActivity], None]) -> None:
        self._num_ranks = num_ranks
        self._ask = ask
        self._number = 0
        self.forget()

    def forget(self) -> None:
        """Another step is under way: nothing is known of it."""
        self._asked_s: float | None = None
        self._answers: dict[int, RankActivity] = {}
        self._hosts_idle_from_s: float | None = None
        self._idle_from_s: float | None = None

    def answered(self, activity: RankActivity) -> None:
        """Notes an answer, unless it is to an earlier question."""
        if activity.number == self._number:
            self._answers[activity.rank] = activity

    def look(self, ran_s: float) -> tuple[float, float]:
        """Asks when it is time to; returns the seconds for which no host has computed, and for which no device has had
        work either."""
        if self._asked_s is None or ran_s - self._asked_s >= ASK_PERIOD_S:
            if self._asked_s is not None:
                self._end_round(self._asked_s)
            self._number += 1
            self._asked_s, self._answers = ran_s, {}
            self._ask(AskActivity(self._number))
        return _since(self._hosts_idle_from_s, ran_s), _since(self._idle_from_s, ran_s)

    def _end_round(self, asked_s: float) -> None:
        answers = self._answers.values()
        if len(answers) < self._num_ranks or any(each.computes for each in answers):
            self._hosts_idle_from_s = self._idle_from_s = None
            return
        if self._hosts_idle_from_s is None:
            self._hosts_idle_from_s = asked_s
        if any(each.waits_for_device for each in answers):
            self._idle_from_s = None
        elif self._idle_from_s is None:
            self._idle_from_s = asked_s


class StepBound:
    """Bound of a step's time, in time that this process ran.

    The bound is MARGIN x the slowest step so far, scaled up when the plan at the head has more tokens than that step
    had; between LEAST_S and MOST_S (or BEYOND_SLOWEST x the slowest, when that is more); MOST_S before the first step.
    KNOWN_LEAST_S in place of LEAST_S while no host computes, once KNOWN_STEPS steps are known and one of them had as
    many tokens: devices are not asked what they do, but nothing is compiled meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = RunningClock(clock, LONGEST_TICK_S)
        self._plans: deque[StepPlan] = deque()
        self._began_s = 0.0
        self._num_finished = 0
        self._most_tokens = 0
        self._slowest_s = 0.0
        self._slowest_tokens = 1

    def submitted(self, plan: StepPlan) -> None:
        if not self._plans:
            self._began_s = self._clock.tick()
        self._plans.append(plan)

    def finished(self) -> StepPlan:
        """Notes that a result has come; returns its plan."""
        plan, now_s = self._plans.popleft(), self._clock.tick()
        took_s, self._began_s = now_s - self._began_s, now_s
        tokens = _tokens(plan)
        self._num_finished += 1
        self._most_tokens = max(self._most_tokens, tokens)
        if took_s > self._slowest_s:
            self._slowest_s, self._slowest_tokens = took_s, tokens
        return plan

    def ran_s(self) -> float:
        """Returns the seconds that the oldest step has run, 0 without one. Called several times a second."""
        now_s = self._clock.tick()
        return now_s - self._began_s if self._plans else 0.0

    def bound_s(self, hosts_idle: bool = False) -> float:
        """Returns the bound for the oldest plan in flight, in seconds."""
        if self._slowest_s == 0.0 or not self._plans:
            return MOST_S
        tokens = _tokens(self._plans[0])
        is_known = self._num_finished >= KNOWN_STEPS and tokens <= self._most_tokens
        least_s = KNOWN_LEAST_S if hosts_idle and is_known else LEAST_S
        expected_s = self._slowest_s * max(1.0, tokens / self._slowest_tokens)
        return max(least_s, min(MARGIN * expected_s, max(MOST_S, BEYOND_SLOWEST * self._slowest_s)))


def _since(from_s: float | None, now_s: float) -> float:
    return 0.0 if from_s is None else now_s - from_s


def _tokens(plan: StepPlan) -> int:
    return max(1, sum(work.num_tokens for work in plan.work))
