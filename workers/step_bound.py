"""How long a step may take before its ranks count as stuck though they live (a collective that never meets). Pure.

Used by workers/rank_group.py. A frozen process is found in seconds by rank_pulse.py; this bound is for the rest and has
to leave room for the slowest honest step: a long prompt chunk on a slow CPU, a first step that compiles.
"""

import time
from collections import deque
from collections.abc import Callable

from workers.messages import StepPlan
from workers.running_clock import RunningClock

LEAST_S = 60.0
MOST_S = 600.0
MARGIN = 20.0
BEYOND_SLOWEST = 3.0
LONGEST_TURN_S = 1.0


class StepBound:
    """Follows the plans in flight, in time that this process ran.

    The bound is MARGIN x the slowest step so far, scaled up when the plan at the head has more tokens than that step
    had; between LEAST_S and MOST_S (or BEYOND_SLOWEST x the slowest, when that is more); MOST_S before the first step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = RunningClock(clock, LONGEST_TURN_S)
        self._plans: deque[StepPlan] = deque()
        self._began_s = 0.0
        self._slowest_s = 0.0
        self._slowest_tokens = 1

    def submitted(self, plan: StepPlan) -> None:
        if not self._plans:
            self._began_s = self._clock.turn()
        self._plans.append(plan)

    def finished(self) -> StepPlan:
        """A result has come: the plan that it answers."""
        plan, now_s = self._plans.popleft(), self._clock.turn()
        took_s, self._began_s = now_s - self._began_s, now_s
        if took_s > self._slowest_s:
            self._slowest_s, self._slowest_tokens = took_s, _tokens(plan)
        return plan

    def overdue_s(self) -> float | None:
        """Called while waiting, several times a second: how long the step at the head runs, once that is too long."""
        now_s = self._clock.turn()
        ran_s = now_s - self._began_s
        if not self._plans or ran_s <= LEAST_S:
            return None
        return ran_s if ran_s > self.bound_s() else None

    def bound_s(self) -> float:
        """For the plan at the head."""
        if self._slowest_s == 0.0 or not self._plans:
            return MOST_S
        expected_s = self._slowest_s * max(1.0, _tokens(self._plans[0]) / self._slowest_tokens)
        return max(LEAST_S, min(MARGIN * expected_s, max(MOST_S, BEYOND_SLOWEST * self._slowest_s)))


def _tokens(plan: StepPlan) -> int:
    return max(1, sum(work.num_tokens for work in plan.work))
