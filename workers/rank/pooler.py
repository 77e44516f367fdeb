"""Pooler: hidden states of a step to embeddings, for the rows that are bound with a Pool. Called by model_runner.py.

Every rank knows these rows, as they take no part in sampling; the rank that samples for the others pools for these.
Prefill may come in chunks: a mean keeps the sum of each row on the device between them. It gives the device work and
waits for none of it; Pooled reads the outcome once that work has run. T tokens, R rows, P pooled positions, E rows that
end with an embedding in this step, H hidden size.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tandem.offload.copies.accelerator import Accelerator
from tandem.workers.messages.request import Pool
from tandem.workers.messages.step import NOT_FINITE, RowResult, RowWork

Ints = npt.NDArray[np.int64]


class PartialSum(NamedTuple):
    """Sum of the hidden states of a row's first `end` tokens: float64 [H], on the device."""

    end: int
    sum_H: torch.Tensor


@dataclass(slots=True, eq=False)
class PooledRow:
    """A row's Pool. sums: of a mean, after each of its last steps, newest last. A failed step is rolled back, so those
    of the steps that may be in flight are kept, and the one before."""

    pool: Pool
    sums: deque[PartialSum] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class PooledPart:
    """The hidden states of one row among those that are pooled in a step: [first, last) of P. begin: the position of
    its first token in the step; end: behind its last. ends: it gets its embedding now."""

    row: int
    pooled: PooledRow
    first: int
    last: int
    begin: int
    end: int
    ends: bool


@dataclass(frozen=True, slots=True)
class Pooled:
    """The embeddings of a step: float32 [E, H], where they arrive on the host, of the rows in `parts`. order: all rows
    of the step with a result, in the plan's order."""

    parts: list[PooledPart]
    host_EH: torch.Tensor
    order: list[int]

    def merged(self, sampled: Sequence[RowResult], errors: Mapping[int, str]) -> list[RowResult]:
        """Returns the results of all rows in the plan's order. An event recorded after the step must be done. sampled:
        those of the rows that generate; errors: of rows, by row."""
        by_row = {result.row: result for result in sampled}
        for part, vector_H in zip(self.parts, self.host_EH.numpy(), strict=True):
            by_row[part.row] = _result(part, vector_H, errors.get(part.row))
        return [by_row[row] for row in self.order]


@dataclass(frozen=True, slots=True)
class PoolStep:
    """The rows that a step pools. rows_P: int64, the indices of its hidden states among the step's tokens, on the
    device."""

    rows_P: torch.Tensor
    parts: list[PooledPart]
    order: list[int]


class Pooler:
    """Pools on one rank. steps_in_flight: how many plans may be in flight."""

    def __init__(self, accelerator: Accelerator, steps_in_flight: int) -> None:
        self._accelerator = accelerator
        self._kept = steps_in_flight + 1

    def begin(
        self, work: Sequence[RowWork], begin_R: Ints, starts: Ints, rows: Mapping[int, PooledRow]
    ) -> PoolStep | None:
        """Returns what this step pools; None for nothing. begin_R, starts: the positions of the rows' first tokens, and
        the places of these among all tokens, and T. rows: those that are bound with a Pool."""
        index_P: list[Ints] = []
        parts: list[PooledPart] = []
        first = 0
        for place, each in enumerate(work):
            pooled = rows.get(each.row)
            if pooled is None or not (each.samples or pooled.pool.kind == "mean"):
                continue
            start, stop, begin = int(starts[place]), int(starts[place + 1]), int(begin_R[place])
            end = begin + stop - start
            if pooled.pool.kind == "last":
                start = stop - 1
            index_P.append(np.arange(start, stop))
            parts.append(PooledPart(each.row, pooled, first, first + stop - start, begin, end, each.samples))
            first += stop - start
        if not parts:
            return None
        rows_P = self._accelerator.to_device(torch.from_numpy(np.concatenate(index_P)))
        return PoolStep(rows_P, parts, [each.row for each in work if each.samples])

    def pool(self, step: PoolStep, hidden_PH: torch.Tensor) -> Pooled:
        """Pools the step's hidden states, after the final norm, in the weights' dtype."""
        ending: list[PooledPart] = []
        vectors: list[torch.Tensor] = []
        for part in step.parts:
            states_H = hidden_PH[part.first : part.last]
            vector_H = states_H[0].float() if part.pooled.pool.kind == "last" else self._mean(part, states_H)
            if part.ends:
                ending.append(part)
                vectors.append(_finished(vector_H, part.pooled.pool))
        if not vectors:
            return Pooled([], torch.empty(0, hidden_PH.shape[1]), step.order)
        return Pooled(ending, self._accelerator.to_host(torch.stack(vectors)), step.order)

    def _mean(self, part: PooledPart, states_TH: torch.Tensor) -> torch.Tensor:
        """Adds a chunk to the row's sum and returns the mean so far, float32 [H]."""
        # float64: the sum of a long prompt is the same to the last bit that float32 shows, however it was cut
        sums = part.pooled.sums
        while sums and sums[-1].end > part.begin:
            sums.pop()  # of a step that was rolled back
        sum_H = states_TH.sum(dim=0, dtype=torch.float64)
        if part.begin:
            assert sums and sums[-1].end == part.begin, f"row {part.row}: no sum of its first {part.begin} tokens"
            sum_H += sums[-1].sum_H
        sums.append(PartialSum(part.end, sum_H))
        if len(sums) > self._kept:
            sums.popleft()
        return (sum_H / part.end).float()


def _finished(vector_H: torch.Tensor, pool: Pool) -> torch.Tensor:
    """Returns a new vector [H]: components beyond `dimensions` are 0, the length is 1 where it should be."""
    if pool.dimensions is not None:
        vector_H = torch.where(torch.arange(len(vector_H), device=vector_H.device) < pool.dimensions, vector_H, 0.0)
    return F.normalize(vector_H, dim=0) if pool.normalize else vector_H


def _result(part: PooledPart, vector_H: npt.NDArray[np.float32], error: str | None) -> RowResult:
    if error is None and not np.isfinite(vector_H).all():
        error = NOT_FINITE
    if error is not None:
        return RowResult(row=part.row, token_ids=[], error=error)
    kept = vector_H[: part.pooled.pool.dimensions]
    return RowResult(row=part.row, token_ids=[], embedding=kept.astype("<f4").tobytes())
