"""PromptScorer: the log probabilities of a prompt's tokens, from the hidden states of its prefill chunks.

Called by model_runner.py on the last stage. The logits of a chunk would take chunk * vocabulary floats, so its hidden
states pass the head PIECE_ROWS at a time, and of each piece only what is asked for is kept. All TP ranks take part, as
the head is sharded; one of them reads the outcome. It gives the device work and waits for none of it. P positions of a
step whose next token is scored, N of a piece, H hidden size, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tandem.offload.copies.accelerator import Accelerator
from tandem.workers.kernels.lora_ops import AdapterRows
from tandem.workers.messages.request import PromptLogprobs, TokenLogprobs
from tandem.workers.messages.step import NOT_FINITE, RowResult, RowSampling, RowWork
from tandem.workers.sampling.logprobs import ChosenLogprobs, RawLogprobs
from tandem.workers.sampling.row_file import append_rows

Ints = npt.NDArray[np.int64]
Head = Callable[[torch.Tensor, AdapterRows | None], torch.Tensor]
PIECE_ROWS = 256


def pieces_of(count: int) -> list[int]:
    """Returns the sizes of the pieces in which `count` hidden states pass the head."""
    return [min(PIECE_ROWS, count - first) for first in range(0, count, PIECE_ROWS)]


class ScoredRows(NamedTuple):
    """The facts of the rows: of the plan's, the positions of their first tokens in the step (begin_R), and the
    places of these among all tokens of the step (starts); by number of a row, its tokens and its adapter's slot, and
    its sampling parameters."""

    begin_R: Ints
    starts: Ints
    token_ids: npt.NDArray[np.int32]
    adapter_slots: Ints
    sampling_of: Callable[[int], RowSampling]


class ScoredPart(NamedTuple):
    """The positions of one row among those of a step: [first, last) of P. begin: its first position in the prompt."""

    row: int
    first: int
    last: int
    begin: int


@dataclass(frozen=True, slots=True)
class ScoreStep:
    """The positions that a step scores. rows_P: int64 on the device, indices of the positions among the step's tokens.
    next_P: the tokens behind them; slots_P: their adapters; wanted_P: how many of the best tokens are reported. order:
    all rows of the step with a result, in the plan's order."""

    rows_P: torch.Tensor
    next_P: Ints
    slots_P: Ints
    wanted_P: list[int]
    parts: list[ScoredPart]
    order: list[int]


@dataclass(frozen=True, slots=True)
class Scored:
    """The log probabilities of a step, piece by piece, where they arrive on the host."""

    step: ScoreStep
    pieces: list[ChosenLogprobs]

    def merged(self, others: Sequence[RowResult]) -> list[RowResult]:
        """Returns the results of all rows in the plan's order. An event recorded after the step must be done. others:
        of the rows that sample or are pooled."""
        entries = [entry for chosen in self.pieces for entry in chosen.entries()]
        by_row = {result.row: result for result in others}
        for part in self.step.parts:
            by_row[part.row] = _with_scores(by_row.get(part.row), part, entries[part.first : part.last])
        return [by_row[row] for row in self.step.order]


class PromptScorer:
    """Scores prompts on one rank. reads: it keeps the outcome; otherwise it only helps its peers. file: path of one
    that gets the whole rows that it reads, for whoever judges the model."""

    def __init__(self, accelerator: Accelerator, *, reads: bool, file: str | None = None) -> None:
        self._accelerator = accelerator
        self._reads = reads
        self._file = file

    def begin(self, work: Sequence[RowWork], rows: ScoredRows) -> ScoreStep | None:
        """Returns what a step scores; None for nothing."""
        parts: list[ScoredPart] = []
        index_P: list[Ints] = []
        next_P: list[Ints] = []
        wanted_P: list[int] = []
        for place, each in enumerate(work):
            if not (count := each.num_scored):
                continue
            start, begin = int(rows.starts[place]), int(rows.begin_R[place])
            parts.append(ScoredPart(each.row, len(wanted_P), len(wanted_P) + count, begin))
            index_P.append(np.arange(start, start + count))
            next_P.append(rows.token_ids[each.row, begin + 1 : begin + 1 + count].astype(np.int64))
            wanted_P += [rows.sampling_of(each.row).prompt_logprobs or 0] * count
        if not parts:
            return None
        slots_P = np.concatenate([np.full(part.last - part.first, rows.adapter_slots[part.row]) for part in parts])
        rows_P = self._accelerator.to_device(torch.from_numpy(np.concatenate(index_P)))
        order = [each.row for each in work if each.samples or each.num_scored]
        return ScoreStep(rows_P, np.concatenate(next_P), slots_P, wanted_P, parts, order)

    def score(self, step: ScoreStep, hidden_PH: torch.Tensor, head: Head) -> Scored | None:
        """Computes the log probabilities from the hidden states after the final norm; None where they are not read."""
        pieces: list[ChosenLogprobs] = []
        first = 0
        for size in pieces_of(len(hidden_PH)):
            own = slice(first, first + size)
            logits_NV = head(hidden_PH[own], self._adapters(step.slots_P[own]))
            if self._reads:
                pieces.append(self._piece(logits_NV, step.next_P[own], step.wanted_P[own]))
            first += size
        return Scored(step, pieces) if self._reads else None

    def _piece(self, logits_NV: torch.Tensor, next_N: Ints, wanted_N: list[int]) -> ChosenLogprobs:
        ids_N = self._accelerator.to_device(torch.from_numpy(next_N))
        raw = RawLogprobs.of(logits_NV, wanted_N)
        if self._file is not None:
            append_rows(self._file, raw.logprobs_LV)
        return raw.of_tokens(ids_N, self._accelerator.to_host)

    def _adapters(self, slots_N: Ints) -> AdapterRows | None:
        """The adapters of a piece; None when none of its rows has one."""
        if (slots_N < 0).all():
            return None
        bounds = [0, *(np.flatnonzero(np.diff(slots_N)) + 1).tolist(), len(slots_N)]
        segments = [(first, last, int(slots_N[first])) for first, last in pairwise(bounds) if slots_N[first] >= 0]
        return AdapterRows(self._accelerator.to_device(torch.from_numpy(slots_N.astype(np.int32))), segments)


def _with_scores(result: RowResult | None, part: ScoredPart, entries: list[TokenLogprobs]) -> RowResult:
    """A row's result with the log probabilities, which it need not have otherwise."""
    if result is None:
        result = RowResult(row=part.row, token_ids=[])
    error = result.error
    if error is None and any(math.isnan(entry.logprob) for entry in entries):
        error = NOT_FINITE
    if error is not None:
        return RowResult(row=part.row, token_ids=[], error=error)
    return RowResult(
        row=part.row,
        token_ids=result.token_ids,
        logprobs=result.logprobs,
        embedding=result.embedding,
        prompt_logprobs=PromptLogprobs(part.begin + 1, entries),
    )
