"""ModelRunner.execute: one StepPlan on one rank, start to end.

Called by rank_worker.py (served) and inprocess_executor.py (offline); every rank of a group runs every plan, in order.
In a plan: free rows, bind rows, extend tables, clean new blocks, copy blocks, forward, sample, tell the TP peers. It
plans nothing and knows neither requests nor transport. S rows that sample, T tokens, V vocabulary.
"""

import time
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from parallel.context import ParallelContext
from parallel.pipeline import StageLink
from workers.attention.backend import KVTensors
from workers.messages import RowResult, StepPlan, StepResult
from workers.models.forward_batch import ForwardBatch
from workers.rank.batch import StepBatch, build_batch
from workers.rank.kv_tensors import KVCache
from workers.rank.load_gate import LoadGate
from workers.rank.row_table import RowTable
from workers.sampling.sampler import NOT_FINITE, Sampled, sample


class Model(Protocol):
    """The decoder, as far as a step needs it."""

    def forward(self, batch: ForwardBatch, kv: KVTensors, hidden_TH: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [T, H], or on the last stage logits [S, V] (float32, whole at least on tp rank 0)."""
        ...

    def close(self) -> None:
        """Ends what runs beside steps. Idempotent; no step may follow."""
        ...


class ModelRunner:
    """One rank's shard, its KV tensors and its row table. `link` is None when the pipeline has one stage."""

    def __init__(
        self,
        model: Model,
        context: ParallelContext,
        kv: KVCache,
        table: RowTable,
        device: torch.device,
        link: StageLink | None = None,
    ) -> None:
        self._model = model
        self._context = context
        self.kv = kv
        self.gate: LoadGate | None = None
        self._table = table
        self._device = device
        self._link = link
        self._samples = context.is_last_stage and context.tp_rank == 0
        self._appends = context.pp_size == 1
        self._idle_since_s = time.perf_counter()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | None:
        """Runs a plan. The result on tp0 of the last stage, None elsewhere. No fault of a single row raises."""
        started_s = time.perf_counter()
        wait_s = started_s - self._idle_since_s
        self.kv.clear(self._table.apply(plan))
        self.kv.copy(plan.block_copies)
        rows: list[RowResult] = []
        if plan.work:
            batch = build_batch(plan, self._table, self._device)
            rows, received_s = self._run(batch, self._tensors(plan))
            wait_s += received_s
            started_s += received_s
        self._idle_since_s = time.perf_counter()
        if not self._samples:
            return None
        return StepResult(step_id=plan.step_id, rows=rows, device_s=self._idle_since_s - started_s, wait_s=wait_s)

    def close(self) -> None:
        """No plan may follow. Idempotent."""
        self._model.close()

    def _tensors(self, plan: StepPlan) -> KVTensors:
        """The cache; where the plan uses what is still coming up, layer by layer as it arrives."""
        tensors = self.kv.tensors
        if not plan.awaits:
            return tensors
        assert self.gate is not None, "a load without a mover"
        return replace(tensors, layers=self.gate.in_turn(tensors.layers, plan.awaits))

    def _run(self, batch: StepBatch, kv: KVTensors) -> tuple[list[RowResult], float]:
        """Forward and sampling; results where this rank samples, and the seconds spent waiting for hidden states."""
        hidden_TH, received_s = None, 0.0
        if self._link is not None and not self._context.is_first_stage:
            before_s = time.perf_counter()
            hidden_TH = self._link.receive(batch.forward.num_tokens)
            received_s = time.perf_counter() - before_s
        output = self._model.forward(batch.forward, kv, hidden_TH)
        if not self._context.is_last_stage:
            assert self._link is not None
            self._link.send(output)
            return [], received_s
        sampled = None
        if self._samples and len(batch.sample_rows_S):
            sampled = sample(
                output, batch.sample_rows_S, batch.sample_positions_S, self._table.sampling, self._table.history
            )
        if self._appends:
            self._append(batch, sampled)
        return self._results(batch, sampled), received_s

    def _append(self, batch: StepBatch, sampled: Sampled | None) -> None:
        """One stage: every TP rank appends what tp0 sampled. A failed row gets some token too, so that a plan made
        before its failure was known still finds what it counts on."""
        rows_S = batch.sample_rows_S
        if not len(rows_S):
            return
        if self._context.tp_size == 1:
            assert sampled is not None
            self._table.append(rows_S, np.asarray(sampled.token_ids))
            return
        if sampled is not None:
            tokens_S = torch.tensor(sampled.token_ids, dtype=torch.int64, device=self._device)
        else:
            tokens_S = torch.empty(len(rows_S), dtype=torch.int64, device=self._device)
        self._table.append(rows_S, self._context.tp_broadcast(tokens_S).cpu().numpy())

    def _results(self, batch: StepBatch, sampled: Sampled | None) -> list[RowResult]:
        if sampled is None:
            return []
        rows = batch.sample_rows_S.tolist()
        if not any(sampled.failed) and not self._table.errors:
            return [
                RowResult(row=row, token_ids=[token], logprobs=None if entry is None else [entry])
                for row, token, entry in zip(rows, sampled.token_ids, sampled.logprobs, strict=True)
            ]
        return [self._result_of(row, place, sampled) for place, row in enumerate(rows)]

    def _result_of(self, row: int, place: int, sampled: Sampled) -> RowResult:
        """One row's answer when some row of the step went wrong."""
        error = self._table.errors.get(row)
        if error is None and sampled.failed[place]:
            error = NOT_FINITE
        if error is not None:
            return RowResult(row=row, token_ids=[], error=error)
        entry = sampled.logprobs[place]
        return RowResult(row=row, token_ids=[sampled.token_ids[place]], logprobs=None if entry is None else [entry])
