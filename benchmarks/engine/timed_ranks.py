"""Ranks that compute nothing and take as long as they are told, on a clock of their own: the engine by itself.

Steps follow one another, as on a rank; each lane of loads does its own beside them. What a step takes is a function of
its plan, such as StepTimes has from a run of a model. Torch-free.
"""

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.step_observer import StepObserver
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.messages.step import RowResult, StepPlan, StepResult
from tandem.workers.messages.transfer import LaneKind, PlaceAdapter, TransferOp, TransferResult, lane_of

StepSeconds = Callable[[StepPlan], float]


class PlanShapes:
    """What the time of a plan is taken to depend on: 1, its rows, its tokens beyond one a row, its adapters."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}

    def of(self, plan: StepPlan) -> tuple[int, int, int, int]:
        """Plans come in their order."""
        self._slots.update((row.row, row.adapter_slot) for row in plan.new_rows)
        rows = len(plan.work)
        tokens = sum(work.num_tokens for work in plan.work)
        return 1, rows, tokens - rows, len({self._slots[work.row] for work in plan.work})


class StepTimes(StepObserver):
    """Times of the steps of real ranks by the shapes of their plans: from when the ranks had nothing else to do until
    the engine has the answer."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._shapes: list[tuple[int, int, int, int]] = []
        self._seconds: list[float] = []
        self._plans = PlanShapes()
        self._under_way: deque[tuple[float, tuple[int, int, int, int]]] = deque()
        self._returned_s = 0.0

    def submitted(self, step: InFlightStep, plan: StepPlan) -> None:
        self._under_way.append((self._clock(), self._plans.of(plan)))

    def returned(self, step: InFlightStep, num_drafts: int, result: StepResult) -> None:
        submitted_s, shape = self._under_way.popleft()
        now_s = self._clock()
        self._shapes.append(shape)
        self._seconds.append(now_s - max(submitted_s, self._returned_s))
        self._returned_s = now_s

    def again(self, seed: int) -> StepSeconds:
        """The time of a plan: that of least squares of the relative error over all steps seen, times what one of them
        took of its own. Short steps so stay short: those of a full batch say little of what one row takes."""
        shapes, seconds = np.array(self._shapes, np.float64), np.array(self._seconds)
        factors, *_ = np.linalg.lstsq(shapes / seconds[:, None], np.ones(len(seconds)), rcond=None)
        least, draw, plans = float(seconds.min()), random.Random(seed), PlanShapes()
        ratios = (seconds / np.maximum(least, shapes @ factors)).tolist()
        return lambda plan: max(least, float(np.dot(plans.of(plan), factors))) * draw.choice(ratios)


@dataclass(frozen=True)
class GivenTimes:
    """Times of steps by their shapes, in seconds a unit of each, with some noise."""

    factors: tuple[float, float, float, float]
    noise: float = 0.1

    def again(self, seed: int) -> StepSeconds:
        """The time of a plan, up to `noise` more or less in most cases."""
        draw, plans = random.Random(seed), PlanShapes()
        return lambda plan: float(np.dot(plans.of(plan), self.factors)) * max(0.5, draw.gauss(1.0, self.noise))


@dataclass(frozen=True)
class LoadTimes:
    """Seconds to read an adapter and to place it, and its pages."""

    pages: int
    fetch_s: float = 0.0
    place_s: float = 0.0

    def of(self, op: TransferOp) -> float:
        return self.place_s if isinstance(op, PlaceAdapter) else self.fetch_s


class TimedRanks:
    """Executor of one rank whose steps answer token 7. `now_s` is the time, which passes in poll() alone."""

    def __init__(self, ready: ExecutorReady, step_s: StepSeconds, loads: LoadTimes) -> None:
        self.now_s = 0.0
        self._ready = ready
        self._step_s = step_s
        self._loads = loads
        self._free_s: dict[LaneKind | None, float] = defaultdict(float)  # when a lane has done all; None: the steps
        self._due: list[tuple[float, int, StepResult | TransferResult]] = []
        self._num_sent = 0

    def clock(self) -> float:
        return self.now_s

    def start(self) -> ExecutorReady:
        return self._ready

    def submit(self, plan: StepPlan) -> None:
        rows = [RowResult(row=work.row, token_ids=[7]) for work in plan.work if work.samples]
        self._send(None, self._step_s(plan), StepResult(step_id=plan.step_id, rows=rows))

    def transfer(self, op: TransferOp) -> None:
        answer = TransferResult(rank=0, ticket=op.ticket, pages=self._loads.pages)
        self._send(lane_of(op), self._loads.of(op), answer)

    def count_experts(self) -> None:
        """The model has none."""

    def poll(self, timeout_s: float) -> StepResult | TransferResult | None:
        until_s = self.now_s + timeout_s
        if not self._due or self._due[0][0] > until_s:
            self.now_s = until_s
            return None
        due_s, _, answer = self._due.pop(0)
        self.now_s = max(self.now_s, due_s)
        return answer

    def close(self) -> None:
        self._due.clear()

    def _send(self, lane: LaneKind | None, seconds: float, answer: StepResult | TransferResult) -> None:
        self._free_s[lane] = due_s = max(self.now_s, self._free_s[lane]) + seconds
        self._num_sent += 1
        self._due.append((due_s, self._num_sent, answer))
        self._due.sort(key=lambda one: one[:2])
