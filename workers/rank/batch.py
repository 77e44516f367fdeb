"""A StepPlan and the RowTable to a ForwardBatch: counts in numpy, tensors by DeviceRows. Called by model_runner.py.

Tokens of a batch count as computed from then on, but for drafts, so consecutive chunks of one prefill may be in flight
in consecutive plans; nothing else changes. T tokens, R rows, S rows that sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.lora_ops import AdapterRows
from tandem.workers.kernels.sampling_ops import SamplingOps
from tandem.workers.kernels.step_arrays import Send, StepArrays
from tandem.workers.messages.step import StepPlan
from tandem.workers.planning.graph_room import most_edits
from tandem.workers.platforms.device_rows import DeviceRows, Ints, StepDrafts, StepRows, StepTensors
from tandem.workers.rank.captured.framed_step import FramedStep
from tandem.workers.rank.captured.ruled_draw import DrawReplay, RuledPlaces, RuledSampling, ruled_sampling
from tandem.workers.rank.drafts import Drafts
from tandem.workers.rank.row_table import RowTable
from tandem.workers.sampling.processors.device_tokens import DeviceTokens
from tandem.workers.sampling.sampler import Sampling
from tandem.workers.sampling.sampling_table import READS_TOKENS, CapturedSampling


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """AdapterRows of the step's tokens and of those that sample, on the host."""

    slots_T: npt.NDArray[np.int32]
    segments: list[tuple[int, int, int]]
    slots_S: npt.NDArray[np.int32]
    sample_segments: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The model's inputs and what sampling needs, int64 [S]. A row with drafts is there once for its last token and
    once for each draft. inputs: None where a captured step has them."""

    inputs: ForwardBatch | None
    rows_R: Ints  # the rows of the step
    begin_R: Ints  # the positions of their first tokens
    starts: Ints  # the places of these among all tokens
    sample_rows_S: Ints  # rows of the table
    sample_positions_S: Ints  # positions of the tokens to choose
    sampling: Sampling | None  # on the rank that samples, but for tokens that a captured step draws
    drafts_S: torch.Tensor | None  # as in StepTensors; of a captured step None
    ruled: RuledSampling | None = None  # in place of it, where a capture of its own draws them

    @property
    def forward(self) -> ForwardBatch:
        assert self.inputs is not None, "a captured step has them"
        return self.inputs


Prepare = Callable[[Ints, Ints, Ints, Send], Sampling]
"""Prepares the sampling of a step from its rows, and the least and the greatest index that each token may have."""


def preparing(table: RowTable, ops: SamplingOps, *, is_ahead: bool) -> Prepare:
    """Returns what prepares the sampling of a step of these rows. is_ahead: they live on a device that may be ahead of
    the table; logits processors then read tokens there."""

    def prepare(rows_S: Ints, positions_S: Ints, most_S: Ints, send: Send) -> Sampling:
        tokens = None
        if is_ahead and (table.sampling.flags[rows_S] & READS_TOKENS).any():
            read_S = table.num_known[rows_S] - table.num_unread[rows_S]
            tokens = DeviceTokens(table.prompt_len[rows_S], read_S, most_S)
        return Sampling(rows_S, positions_S, table.sampling, table.history, ops, send, is_ahead=is_ahead, tokens=tokens)

    return prepare


def build_batch(
    plan: StepPlan,
    table: RowTable,
    device_rows: DeviceRows,
    drafts: Drafts | None = None,
    prepare: Prepare | None = None,
    framed: FramedStep | None = None,
    ruled_by: DrawReplay | None = None,
) -> StepBatch:
    """The batch of a plan that has work; the table has applied the plan and holds the drafts that the host has
    proposed. Advances the rows' computed counts. device_rows: of this table. prepare: on the rank that samples; what it
    sends goes with the rows. framed: the captured step that this one becomes; ruled_by: may draw its tokens
    behind it."""
    rows_R, begin_R, end_R, lens_R, samples_R, drafts_R, spare_R = _advance(plan, table, drafts)
    starts = np.zeros(len(rows_R) + 1, np.int64)
    np.cumsum(lens_R, out=starts[1:])
    row_S, back_S = _samples(samples_R, None if drafts is None else drafts_R)
    sample_rows_S = rows_R[row_S]
    adapters = _adapters(table.adapter_slots[rows_R], lens_R, starts, row_S) if table.num_adapted else None
    slots_T, slots_S = (None, None) if adapters is None else (adapters.slots_T, adapters.slots_S)
    places = None if drafts is None else StepDrafts(drafts_R, back_S > 1, drafts.ids is None, drafts.guesses_QD)
    logits_rows_S = starts[1:][row_S] - back_S
    positions_S, beside = end_R[row_S] + 1 - back_S, StepArrays()
    most_S = positions_S if spare_R is None else positions_S + spare_R[row_S]
    drawn = _drawn(table, (sample_rows_S, positions_S, most_S), beside.send, prepare, framed, ruled_by)
    rows = StepRows(
        rows_R,
        begin_R,
        end_R,
        starts,
        lens_R,
        logits_rows_S,
        sample_rows_S,
        slots_T,
        slots_S,
        spare_R,
        places,
        drawn.read_rows,
    )
    given = rows_R, begin_R, starts, sample_rows_S, positions_S, drawn.behind
    if framed is not None:
        framed.fill(rows, drawn.captured, beside)
        return StepBatch(None, *given, None, drawn.ruled)
    tensors = device_rows.step(rows, beside)
    forward = _forward(tensors, rows, adapters, table.block_size)
    return StepBatch(forward, *given, tensors.drafts_S)


class _Advanced(NamedTuple):
    """The rows of a plan: what each has computed before it and behind it, its tokens, whether it samples, and its
    drafts. spare_R: tokens, fewer of which each may have, as the host has not read how many drafts were accepted."""

    rows_R: Ints
    begin_R: Ints
    end_R: Ints
    lens_R: Ints
    samples_R: npt.NDArray[np.bool_]
    drafts_R: Ints
    spare_R: Ints | None


def _advance(plan: StepPlan, table: RowTable, drafts: Drafts | None) -> _Advanced:
    """Checks the plan's rows and advances their computed counts."""
    count = len(plan.work)
    rows_R = np.fromiter((w.row for w in plan.work), np.int64, count)
    lens_R = np.fromiter((w.num_tokens for w in plan.work), np.int64, count)
    samples_R = np.fromiter((w.samples for w in plan.work), np.bool_, count)
    drafts_R = np.zeros(count, np.int64) if drafts is None else drafts.counts_R
    lens_R += drafts_R
    spare_R = table.max_accepted[rows_R] if table.has_drafts else None
    begin_R = table.num_computed[rows_R]
    end_R = begin_R + lens_R
    _check(table, rows_R, lens_R, end_R, spare_R, samples_R, drafts_R)
    if table.pooled:  # these end with an embedding
        samples_R &= np.fromiter((w.row not in table.pooled for w in plan.work), np.bool_, count)
    if drafts is None:
        table.num_computed[rows_R] = end_R
    else:
        table.num_computed[rows_R] = end_R - drafts_R
        table.max_accepted[rows_R] += drafts_R
        table.has_drafts = True
    return _Advanced(rows_R, begin_R, end_R, lens_R, samples_R, drafts_R, spare_R)


class _Drawn(NamedTuple):
    """The way in which a step's tokens are drawn, at most one of three: in the step's capture, by one with rules behind
    it, by single operations. read_rows: rows whose tokens that reads on the device."""

    captured: CapturedSampling | None = None
    ruled: RuledSampling | None = None
    behind: Sampling | None = None

    @property
    def read_rows(self) -> Ints | None:
        own = next((way for way in self if way is not None), None)
        return None if own is None else own.read_rows


def _drawn(
    table: RowTable,
    given: tuple[Ints, Ints, Ints],
    send: Send,
    prepare: Prepare | None,
    framed: FramedStep | None,
    ruled_by: DrawReplay | None,
) -> _Drawn:
    """given: as for Prepare. All ranks draw what is drawn by shards, one rank anything else."""
    rows_S, positions_S, _ = given
    if framed is not None and (framed.by_shards or (prepare is not None and framed.draws)):
        own = table.sampling.captured(rows_S, table.prompt_len[rows_S], most_edits(framed.num_samples))
        if own is not None:
            return _Drawn(captured=own)
    if prepare is None or not len(rows_S):
        return _Drawn()
    ruled = None if framed is None else _ruled(table, rows_S, positions_S, framed, ruled_by)
    if ruled is None:
        return _Drawn(behind=prepare(*given, send))
    if not ruled.prepares_late:
        ruled.prepare(send)
    return _Drawn(ruled=ruled)


def _ruled(
    table: RowTable, rows_S: Ints, positions_S: Ints, framed: FramedStep, captured: DrawReplay | None
) -> RuledSampling | None:
    """Returns how a capture behind the step's draws its tokens; None where none does."""
    read_S = table.num_known[rows_S] - table.num_unread[rows_S]
    places = RuledPlaces(rows_S, positions_S, table.prompt_len[rows_S], read_S, table.history)
    return ruled_sampling(captured, table.sampling, framed.ops, places)


def _samples(samples_R: npt.NDArray[np.bool_], num_drafts_R: Ints | None) -> tuple[Ints, Ints]:
    """Return for each token to choose, int64 [S]: the place of its row in the plan, and how many tokens from the row's
    end its logits are, counted from 1."""
    row_S = np.flatnonzero(samples_R)
    if num_drafts_R is None:
        return row_S, np.ones(len(row_S), np.int64)
    counts = 1 + num_drafts_R[row_S]
    ends = np.cumsum(counts)
    row_S = np.repeat(row_S, counts)
    return row_S, np.repeat(ends, counts) - np.arange(len(row_S))


def _check(
    table: RowTable,
    rows_R: Ints,
    lens_R: Ints,
    end_R: Ints,
    spare_R: Ints | None,
    samples_R: npt.NDArray[np.bool_],
    drafts_R: Ints,
) -> None:
    """Our own invariants: a plan never computes tokens that are neither known nor drafts, or writes beyond a row's
    blocks."""
    known_R = table.num_known[rows_R] + drafts_R
    ok_R = (lens_R > 0) & (end_R <= known_R) & (~samples_R | (end_R == known_R))
    most_R = end_R if spare_R is None else end_R + spare_R
    ok_R &= most_R <= table.num_blocks[rows_R] * table.block_size
    if not ok_R.all():
        bad = int(np.flatnonzero(~ok_R)[0])
        row = int(rows_R[bad])
        raise AssertionError(
            f"row {row}: {lens_R[bad]} tokens up to {end_R[bad]} or {most_R[bad]}, known {known_R[bad]}, "
            f"blocks {table.num_blocks[row]} x {table.block_size}, samples {samples_R[bad]}"
        )


def _forward(tensors: StepTensors, rows: StepRows, adapters: StepAdapters | None, block_size: int) -> ForwardBatch:
    rows_T = rows_S = None
    if adapters is not None:
        assert tensors.slots_T is not None and tensors.slots_S is not None
        rows_T = AdapterRows(tensors.slots_T, adapters.segments)
        rows_S = AdapterRows(tensors.slots_S, adapters.sample_segments)
    spare = None if rows.spare_R is None or not rows.spare_R.any() else rows.spare_R.tolist()
    lists = (rows.lens_R.tolist(), rows.most_R.tolist())
    return tensors.batch(*lists, block_size, adapters=rows_T, sample_adapters=rows_S, spare_lens_list=spare)


def _adapters(slots_R: Ints, lens_R: Ints, starts: Ints, row_S: Ints) -> StepAdapters | None:
    """None when no row of the step has one. row_S: as in _samples."""
    segments = adapter_segments(slots_R, starts)
    if not segments:
        return None
    slots_S = slots_R[row_S]
    sample_segments = adapter_segments(slots_S, np.arange(len(slots_S) + 1))
    return StepAdapters(
        np.repeat(slots_R, lens_R).astype(np.int32), segments, slots_S.astype(np.int32), sample_segments
    )


def adapter_segments(slots_R: Ints, starts: Ints) -> list[tuple[int, int, int]]:
    """(first token, last + 1, slot) of each maximal run of rows with one adapter; starts: rows' first tokens, and T."""
    if not len(slots_R):
        return []
    changes = np.flatnonzero(np.diff(slots_R)) + 1
    rows = np.concatenate(([0], changes, [len(slots_R)]))
    bounds = zip(starts[rows[:-1]].tolist(), starts[rows[1:]].tolist(), slots_R[rows[:-1]].tolist(), strict=True)
    return [(first, last, slot) for first, last, slot in bounds if slot >= 0]
