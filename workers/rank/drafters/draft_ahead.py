"""DraftAhead: the guesses of a draft model on a device whose rows are ahead of the host. Nothing is read back, so the
next step is launched while this one runs.

All shapes depend on what the host knows alone: a row lacks two tokens at most once it has guesses (draft_reads.py),
and reads the last two, though it may lack one. What a row lacks beyond that, of a prompt, is read in pieces, and the
row has no guesses until then. Each guess is noted behind the row's known tokens, where the next pass and the logits
processors find it. A asked rows, R rows of a pass, Q of them with a guess, D places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import OnDevice
from tandem.workers.kernels.step_arrays import Sent, StepArrays
from tandem.workers.models.decoder import Decoder
from tandem.workers.planning.graph_room import DRAFT_QUERIES
from tandem.workers.platforms.device_rows import PassedRows, StepRows
from tandem.workers.rank.captured.guess_replays import AskedGuesses, GuessReplays, GuessStep
from tandem.workers.rank.drafters.draft_reads import DraftReads, held
from tandem.workers.rank.drafters.guess_draw import AheadGuesses, DraftRows, GuessDraw
from tandem.workers.sampling.sampler import Sampling
from tandem.workers.speculation.proposer import GuessRow

Ints = npt.NDArray[np.int64]
LAST: Final = DRAFT_QUERIES
"""Tokens that each row reads in any case."""


class _AheadSpan(NamedTuple):
    """The asked rows: the most guesses of each, what the first pass reads of it, and whether a guess is behind that."""

    numbers_A: Ints
    most_A: Ints
    begin_A: Ints
    end_A: Ints
    ready_A: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _AheadPass:
    """A pass, and the choice behind it; None where no row has a guess. places: those rows' among the asked ones."""

    rows: StepRows
    sampling: Sampling | None
    places: Sent


class DraftAhead:
    """The guesses. What it is made of is the DraftModel's."""

    def __init__(
        self,
        decoder: Decoder,
        max_len: int,
        kv: KVTensors,
        table: DraftRows,
        rows: PassedRows,
        draw: GuessDraw,
        reads: DraftReads,
    ) -> None:
        self._decoder, self._max_len, self._kv = decoder, max_len, kv
        self._table, self._rows, self._draw, self._reads = table, rows, draw, reads
        self.replays: GuessReplays | None = None

    def guess(self, rows: Sequence[GuessRow], room: int) -> torch.Tensor:
        """Returns as GuessesAhead.guess() does. room: tokens that are read beside the rows' last ones. Raises
        torch.OutOfMemoryError."""
        numbers_A = np.array([row.row for row in rows], np.int64)
        most_A = np.array([row.max_drafts for row in rows], np.int64)
        table, most = self._table, int(most_A.max())
        most_A[table.num_known[numbers_A] + table.max_accepted[numbers_A] + most_A > self._max_len] = 0
        begin_A, end_A = self._span(numbers_A, most_A, room)
        ready_A = (most_A > 0) & (end_A == table.num_known[numbers_A])
        asked, read_A = _AheadSpan(numbers_A, most_A, begin_A, end_A, ready_A), np.flatnonzero(end_A > begin_A)
        if not len(read_A):
            return AheadGuesses(self._rows, len(rows), most).ids_AD
        ids_AD = self._replayed(asked, most)
        if ids_AD is None:
            ids_AD = self._launched(asked, most)
        self._reads.take(numbers_A[read_A], end_A[read_A], ready_A[read_A])
        return ids_AD

    def passes(self, step: GuessStep) -> None:
        """Does what CapturesPasses.passes() does."""
        for place in range(step.size.num_places):
            sent = step.later(place, 1) if place else step.sent
            tensors = step.tensors(sent)
            if self._reads.has_windows:
                tensors = held(tensors)
            step.draw(self._decoder.forward(step.batch(sent, tensors), self._kv, None), place)

    # ---- inside ----

    def _replayed(self, asked: _AheadSpan, most: int) -> torch.Tensor | None:
        """Returns the guesses of one replay; None where none holds such passes: no row has a guess yet, or some row
        lacks more than its last tokens. most: guesses of a row."""
        lens_A = asked.end_A - asked.begin_A
        if self.replays is None or not asked.ready_A.any() or lens_A.max() > LAST:
            return None
        rows, asked_S = self._rows_of(asked.numbers_A, asked.begin_A, asked.end_A, asked.ready_A, 0)
        return self.replays.guess(rows, AskedGuesses(asked.most_A[asked_S], asked_S, len(lens_A), most))

    def _launched(self, asked: _AheadSpan, most: int) -> torch.Tensor:
        """Returns the guesses of one pass after the other."""
        guesses, arrays = AheadGuesses(self._rows, len(asked.numbers_A), most), StepArrays()
        numbers_A, most_A, begin_A, end_A, ready_A = asked
        passes = [self._pass(numbers_A, begin_A, end_A, ready_A, 0, arrays)]
        for place in range(1, int(most_A[ready_A].max(initial=0))):
            goes_on_A, begins_A = ready_A & (most_A > place), self._table.num_known[numbers_A] + place - 1
            passes.append(self._pass(numbers_A, begins_A, begins_A + goes_on_A, goes_on_A, place, arrays))
        sent = self._rows.send_passes([each.rows for each in passes], arrays)
        for place, (each, on_device) in enumerate(zip(passes, sent, strict=True)):
            self._run(each, on_device, place, guesses)
        return guesses.ids_AD

    def _span(self, numbers_A: Ints, most_A: Ints, room: int) -> tuple[Ints, Ints]:
        """Returns what the first pass reads of each row, by positions that the device may be ahead of. A piece of a row
        begins by as much earlier as that may be."""
        table, size = self._table, self._table.block_size
        known_A, spare_A = table.num_known[numbers_A], table.max_accepted[numbers_A]
        lacking_A = self._reads.lacking(numbers_A)
        begin_A, end_A = np.zeros((2, len(numbers_A)), np.int64)
        for at in np.flatnonzero(most_A).tolist():
            row, known, spare = int(numbers_A[at]), int(known_A[at]), int(spare_A[at])
            first = self._reads.first_held(row) * size
            lacking = int(lacking_A[at])
            if lacking - LAST <= room and lacking <= known - first:
                begin_A[at], end_A[at] = known - lacking, known
                room -= max(0, lacking - LAST)
                continue
            begin = max(self._reads.read(row), first + spare)
            end = min(begin + room, known - 1)
            if begin - spare >= first and end > begin:
                begin_A[at], end_A[at] = begin - spare, end
                room -= end - begin
        return begin_A, end_A

    def _pass(
        self,
        numbers_A: Ints,
        begin_A: Ints,
        end_A: Ints,
        guesses_A: npt.NDArray[np.bool_],
        place: int,
        arrays: StepArrays,
    ) -> _AheadPass:
        """Returns the pass over rows that have tokens in it. guesses_A: those with a guess behind the last one."""
        rows, asked_Q = self._rows_of(numbers_A, begin_A, end_A, guesses_A, place)
        sampling = self._draw.prepare_ahead(rows.sample_rows_S, place, arrays) if len(asked_Q) else None
        return _AheadPass(rows, sampling, arrays.send(asked_Q))

    def _rows_of(
        self, numbers_A: Ints, begin_A: Ints, end_A: Ints, guesses_A: npt.NDArray[np.bool_], place: int
    ) -> tuple[StepRows, Ints]:
        """Returns a pass's rows, and the places of those with a guess among the asked ones."""
        own = np.flatnonzero(end_A > begin_A)
        rows_R, begin_R, end_R = numbers_A[own], begin_A[own], end_A[own]
        lens_R, at = end_R - begin_R, np.flatnonzero(guesses_A[own])
        starts = np.zeros(len(own) + 1, np.int64)
        np.cumsum(lens_R, out=starts[1:])
        rows_Q, spare_R = rows_R[at], self._table.max_accepted[rows_R]
        given = (rows_R, begin_R, end_R, starts, lens_R, starts[1:][at] - 1, rows_Q, None, None, spare_R)
        return StepRows(*given, read_rows=None if place else rows_R), own[at]

    def _run(self, step: _AheadPass, sent: OnDevice, place: int, guesses: AheadGuesses) -> None:
        """Runs a pass, and draws behind it."""
        rows, table = step.rows, self._table
        tensors = self._rows.pass_tensors(sent, int(table.num_blocks[rows.rows_R].max()))
        if self._reads.has_windows:
            tensors = held(tensors)
        assert rows.spare_R is not None
        spare = rows.spare_R.tolist() if rows.spare_R.any() else None
        lists = (rows.lens_R.tolist(), rows.most_R.tolist())
        batch = tensors.batch(*lists, table.block_size, spare_lens_list=spare)
        logits_QV = self._decoder.forward(batch, self._kv, None)
        if step.sampling is None:
            return
        positions_Q = tensors.positions_T[tensors.logits_rows_S] + 1
        guesses.draw(step.sampling, logits_QV, positions_Q, place, sent.rows_B, step.places())
