"""SimulatedRanks: ranks that compute nothing, and answer each plan when its time is over.

Steps run one after the other. A step takes what FittedTimes says of its work, and of how many other groups of its node
compute when it begins. Tokens are a function of a request's seed, so that a request that moves to another group, and
the next turn of its conversation, have the same; it ends with END where the load says that its answer does.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Final

from tandem.cluster.simulator.steps.fitted_times import FittedTimes
from tandem.cluster.simulator.steps.step_work import WorkCounter
from tandem.cluster.simulator.virtual_clock import VirtualClock
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.messages.step import RowResult, StepPlan, StepResult
from tandem.workers.messages.transfer import CopyKV, FetchAdapter, TransferOp, TransferResult

END: Final = 1
"""The token that ends an answer."""
VOCAB_SIZE: Final = 2**31
FIRST_TOKEN: Final = 2
COPY_BYTES_PER_S: Final = 10e9
"""Speed of copies between device and host memory, and of an adapter to the device."""


def answer_token(seed: int) -> int:
    """Returns the token of which an answer consists: no two of one load are alike."""
    return VOCAB_SIZE - 1 - seed % (VOCAB_SIZE // 2)


class Node:
    """A machine with the groups on it. Groups of one node slow each other down."""

    def __init__(self) -> None:
        self.ranks: list[SimulatedRanks] = []

    def others_busy(self, asking: "SimulatedRanks", at_s: float) -> int:
        """Returns how many other groups compute at that time."""
        return sum(one.free_s > at_s for one in self.ranks if one is not asking)


class SimulatedRanks:
    """Implements Executor. ready: what a group of this kind has. answer_len: of the request with a seed, the tokens of
    its answer, END included. adapter_s: to read an adapter from its source;
    adapter_pages: of one on the device."""

    def __init__(
        self,
        clock: VirtualClock,
        times: FittedTimes,
        node: Node,
        ready: ExecutorReady,
        answer_len: Callable[[int], int],
        adapter_s: float,
        adapter_pages: int,
    ) -> None:
        self._clock, self._times, self._node, self._ready = clock, times, node, ready
        self._answer_len = answer_len
        self._adapter_s, self._adapter_pages = adapter_s, adapter_pages
        self._work = WorkCounter()
        self._left: dict[int, int] = {}
        self._answers: dict[int, RowResult] = {}
        self._results: deque[tuple[float, StepResult]] = deque()
        self._moves: list[tuple[float, int, TransferResult]] = []  # a heap
        self._moved_s = 0.0
        self.free_s = 0.0  # when the last step ends
        self.busy_s = 0.0
        node.ranks.append(self)

    @property
    def due_s(self) -> float:
        """The moment of the next answer; inf: none is due."""
        due_s = self._results[0][0] if self._results else inf
        return min(due_s, self._moves[0][0]) if self._moves else due_s

    def start(self) -> ExecutorReady:
        """Implements Executor."""
        return self._ready

    def submit(self, plan: StepPlan) -> None:
        """Implements Executor."""
        began_s = max(self.free_s, self._clock.now_s)
        seconds = self._times.seconds(self._work.count(plan), self._node.others_busy(self, began_s))
        self.free_s = began_s + seconds
        self.busy_s += seconds
        left, answers = self._left, self._answers
        for init in plan.new_rows:
            row, seed = init.row, init.sampling.seed
            left[row] = self._answer_len(seed) - (len(init.token_ids) - init.prompt_len)
            answers[row] = RowResult(row=row, token_ids=[answer_token(seed)])
        rows: list[RowResult] = []
        for work in plan.work:
            if work.samples:
                row = work.row
                left[row] -= 1
                rows.append(answers[row] if left[row] else RowResult(row=row, token_ids=[END]))
        self._results.append((self.free_s, StepResult(step_id=plan.step_id, rows=rows, device_s=seconds)))

    def transfer(self, op: TransferOp) -> None:
        """Implements Executor. Copies run one after the other, beside the steps; sources of adapters are read at the
        same time."""
        now_s = self._clock.now_s
        if isinstance(op, FetchAdapter):
            end_s = now_s + self._adapter_s
        elif isinstance(op, CopyKV):
            self._moved_s = max(self._moved_s, now_s) + len(op.slots) * self._ready.block_bytes / COPY_BYTES_PER_S
            end_s = self._moved_s
        else:
            end_s = now_s
        pages = self._adapter_pages if isinstance(op, FetchAdapter) else 0
        done = TransferResult(rank=0, ticket=op.ticket, pages=pages, copy_s=end_s - now_s)
        heappush(self._moves, (end_s, op.ticket, done))

    def count_experts(self) -> None:
        """Implements Executor: the model is said to have none."""

    def poll(self, timeout_s: float) -> StepResult | TransferResult | None:
        """Implements Executor. It never waits: nothing comes while a simulated moment lasts."""
        now_s = self._clock.now_s
        if self._moves and self._moves[0][0] <= now_s:
            return heappop(self._moves)[2]
        if self._results and self._results[0][0] <= now_s:
            return self._results.popleft()[1]
        return None

    def close(self) -> None:
        """Implements Executor: the node has one group less."""
        self._node.ranks.remove(self)


def most_free(nodes: Sequence[Node]) -> Node:
    """Returns the node with the fewest groups, the first of several."""
    return min(nodes, key=lambda node: len(node.ranks))
