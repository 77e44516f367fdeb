"""NoRanks: ranks that compute nothing, for what is measured or counted on the engine alone."""

from collections import deque

import msgspec

from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.messages.step import RowResult, StepPlan, StepResult
from tandem.workers.messages.transfer import TransferOp, TransferResult


class NoRanks:
    """Executor that answers each plan at once with token 7 for every sampling row. The answers are made once per row.
    An adapter takes one page and no time."""

    def __init__(self, num_rows: int, num_blocks: int, stages: int, adapters: int, wire: bool) -> None:
        self._wire = wire
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(StepResult).decode
        self._encoded: dict[int, bytes] = {}
        self._answers = [RowResult(row=row, token_ids=[7]) for row in range(num_rows)]
        self._results: deque[StepResult] = deque()
        self._num_blocks, self._stages, self._adapters = num_blocks, stages, adapters
        self._moved: deque[TransferResult] = deque()

    def start(self) -> ExecutorReady:
        return ExecutorReady(
            num_blocks=self._num_blocks,
            pipeline_parallel_size=self._stages,
            device="none",
            dtype="none",
            threads=0,
            weight_bytes=0,
            block_bytes=0,
            load_s=0.0,
            adapter_pages=self._adapters,
        )

    def submit(self, plan: StepPlan) -> None:
        answers = self._answers
        rows = [answers[work.row] for work in plan.work if work.samples]
        if self._wire:
            self._encode(plan)
        self._results.append(StepResult(step_id=plan.step_id, rows=rows))

    def count_experts(self) -> None:
        """The model has none."""

    def poll(self, timeout_s: float) -> StepResult | TransferResult | None:
        """Takes the next message. With the wire it is decoded; the encoding, which ranks do, happens once per number of
        rows."""
        if self._moved:
            return self._moved.popleft()
        if not self._results:
            return None
        result = self._results.popleft()
        if self._wire:
            count = len(result.rows)
            if count not in self._encoded:
                self._encoded[count] = self._encode(result)
            self._decode(self._encoded[count])
        return result

    def transfer(self, op: TransferOp) -> None:
        self._moved.append(TransferResult(rank=0, ticket=op.ticket, pages=1))

    def close(self) -> None:
        self._results.clear()
