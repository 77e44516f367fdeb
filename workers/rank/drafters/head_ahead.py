"""HeadAhead: guesses of an EAGLE head or an MTP layer on a device whose rows are ahead of the host.

The head reads all tokens of the last step, rejected drafts among them: what it makes of these is overwritten before
anything sees it. So shapes depend on what the host knows, and the device finds where a row's last computed token is.
Rows that have missed something begin again as in head_drafts.py. Nothing is read back but where rows ask for what the
host alone can draw. A asked rows, R rows of a pass, Q of them with a guess, T tokens.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch, OnDevice, StepShape
from tandem.workers.kernels.step_arrays import Sent, StepArrays
from tandem.workers.models.step_tensors import Heard
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import PassedRows, StepRows, StepTensors
from tandem.workers.rank.captured.guess_replays import AskedGuesses, GuessReplays, GuessStep
from tandem.workers.rank.drafters.guess_draw import AheadGuesses, DraftRows, GuessDraw
from tandem.workers.rank.drafters.step_record import (
    MISSED,
    AheadStep,
    HeadReads,
    LastVectors,
    StepRecord,
    places_read,
)
from tandem.workers.sampling.sampler import Sampling
from tandem.workers.speculation.proposer import GuessRow

Ints = npt.NDArray[np.int64]


class VectorHead(Protocol):
    """A head that goes from vector to vector: EagleHead, StreamHead, whose methods say more."""

    def vectors(self, heard: Heard, at: torch.Tensor) -> torch.Tensor: ...

    def forward(
        self, ids_T: torch.Tensor, vectors_TH: torch.Tensor, batch: ForwardBatch, kv: KVTensors
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def replay_key(self, shape: StepShape, kv: KVTensors) -> Hashable | None: ...


class _Span(NamedTuple):
    """The tokens that the first pass reads of rows: as of AheadStep. first_R: MISSED for a row of which the last vector
    is read again; end_R: the least position behind those that are computed for good."""

    rows_R: Ints
    begin_R: Ints
    end_R: Ints
    spare_R: Ints
    lens_R: Ints
    first_R: Ints
    base_end_R: Ints


NOTHING: Final = _Span(*(np.empty(0, np.int64) for _ in _Span._fields))


class _AskedGuesses(NamedTuple):
    """Guesses that rows of a span may have: how many each, and the rows' places among those that were asked."""

    most_R: Ints
    at_R: Ints


@dataclass(frozen=True, slots=True)
class _HeadPass:
    """A pass, and the choice behind it; None where no row has a guess. own_Q: those rows' places in the span; asks_2Q:
    in the pass and among the asked ones. source: of a first pass each token's place in the last step, MISSED for one
    whose vector is kept; of a later one the rows' places among those with a guess in the pass before. skipped_R: blocks
    that the head does not see; None: it sees all."""

    rows: StepRows
    sampling: Sampling | None
    own_Q: Ints
    asks_2Q: Sent
    source: Sent
    skipped_R: tuple[list[int], Sent] | None


class HeadAhead:
    """The guesses, with what is HeadDrafts'. of_model: returns logits over the model's vocabulary."""

    def __init__(
        self,
        head: VectorHead,
        of_model: Callable[[torch.Tensor], torch.Tensor],
        max_len: int,
        kv: KVTensors,
        table: DraftRows,
        rows: PassedRows,
        platform: Platform,
        parts: tuple[GuessDraw, StepRecord, HeadReads, LastVectors],
    ) -> None:
        self._head, self._of_model, self._max_len, self._kv = head, of_model, max_len, kv
        self._table, self._rows, self._accelerator = table, rows, platform.accelerator
        self._draw, self._record, self._reads, self._last = parts
        self.replays: GuessReplays | None = None

    def guess(self, rows: Sequence[GuessRow], *, waits: bool = False) -> torch.Tensor:
        """Reads the last step, and returns as GuessesAhead.guess() does, [0, 0] for no rows. waits: the host has all
        tokens, and draws each guess before the next. Raises torch.OutOfMemoryError: rows whose last step is not read
        then begin again, and behind what is read nothing is lost."""
        most_of = {row.row: row.max_drafts for row in rows if self._fits(row)}
        places = {row.row: place for place, row in enumerate(rows)}
        span, last = self._span(most_of)
        numbers = span.rows_R.tolist()
        most_R, at_R = (np.array([of.get(row, 0) for row in numbers], np.int64) for of in (most_of, places))
        asked = _AskedGuesses(most_R, at_R)
        self._reads.read[span.rows_R] = MISSED  # if there is no memory for the first pass
        most = max((row.max_drafts for row in rows), default=0)
        with self._rows.forgetting():  # so that steps in flight have no guesses of rows that begin again
            ids_AD = self._replayed(span, asked, last, len(rows), most) if numbers and not waits else None
            if ids_AD is None:
                guesses = AheadGuesses(self._rows, len(rows), most)
                if not numbers:
                    return guesses.ids_AD
                passes = self._sent(span, asked, guesses, waits=waits)
                vectors_QH = self._first(*next(passes), span, last, guesses)
        self._reads.read[span.rows_R] = span.base_end_R
        self._last.note(span.rows_R, span.base_end_R)
        self._note(span)
        if ids_AD is not None:
            return ids_AD
        for place, (each, sent) in enumerate(passes, 1):
            vectors_QH = self._later(each, sent, vectors_QH, place, guesses)
        return guesses.ids_AD

    def _replayed(
        self, span: _Span, asked: _AskedGuesses, last: tuple[Heard, torch.Tensor] | None, num_asked: int, most: int
    ) -> torch.Tensor | None:
        """Returns the guesses of one replay; None where none holds such passes."""
        if self.replays is None:
            return None
        rows, own_S = self._rows_of(span, asked.most_R, 0)
        given = asked.most_R[own_S], asked.at_R[own_S], num_asked, most, _places(span)
        return self.replays.guess(rows, AskedGuesses(*given, self._reads.skipped[span.rows_R], last))

    def passes(self, step: GuessStep) -> None:
        """Does what CapturesPasses.passes() does."""
        sent = first = step.sent
        assert first.at_T is not None and first.skipped_R is not None
        skipped_R, row_S = first.skipped_R, first.place_T[first.logits_rows_S]
        tensors, vectors_TH, last_R = self._read(first, step.size.num_blocks, first.at_T, step.last, again=True)
        tensors = tensors._replace(logits_rows_S=last_R[row_S if step.size.num_places else row_S[:0]])
        for place in range(max(1, step.size.num_places)):
            if place:
                sent, skipped_R = step.later(place, 2), torch.where(step.asks(place), first.skipped_R[row_S], 0)
                tensors = step.tensors(sent, behind=1)
            batch = step.batch(sent, tensors).without_first(None, skipped_R, sent.place_T)
            logits_SV, vectors_TH = self._head.forward(tensors.input_ids_T, vectors_TH, batch, self._kv)
            if step.size.num_places:
                step.draw(self._of_model(logits_SV), place)

    # ---- what is read ----

    def _fits(self, row: GuessRow) -> bool:
        known, spare = self._table.num_known[row.row], self._table.max_accepted[row.row]
        return bool(known + spare + row.max_drafts <= self._max_len)

    def _span(self, asked: Collection[int]) -> tuple[_Span, tuple[Heard, torch.Tensor] | None]:
        """Returns what is read, rows of the last step first, and what that has left."""
        kept, span, last, table = self._record.take_ahead(), NOTHING, None, self._table
        if kept is not None:
            span, last = self._follow(kept[0]), kept[1:]
        waiting = [row for row in sorted(set(asked).difference(span.rows_R.tolist())) if self._is_read(row)]
        if not waiting:
            return span, last
        rows_R = np.array(waiting, np.int64)
        known_R, ones_R = table.num_known[rows_R], np.ones_like(rows_R)
        base_R = table.num_computed[rows_R] - table.num_accepted[rows_R]
        spare_R = table.max_accepted[rows_R]
        again = _Span(rows_R, known_R - 2, known_R - 1, spare_R, ones_R, MISSED * ones_R, base_R)
        return _Span(*(np.append(one, more) for one, more in zip(span, again, strict=True))), last

    def _is_read(self, row: int) -> bool:
        """Returns whether a row is all read, though it was not in the last step."""
        base = int(self._table.num_computed[row] - self._table.num_accepted[row])
        return self._last.has(row, base) and bool(self._reads.read[row] == base)

    def _follow(self, step: AheadStep) -> _Span:
        """Returns what the head can read of rows, as HeadDrafts does. A row that has missed something begins again:
        drafts of it in flight are places without guesses, so that its step begins where the host takes it to begin."""
        table, reads, rows_R, begin_R = self._table, self._reads, step.rows_R, step.begin_R.copy()
        for at in np.flatnonzero(reads.know(rows_R) | (reads.read[rows_R] != step.base_R)).tolist():
            row = int(rows_R[at])
            reads.skipped[row] = reads.lacking(row, int(begin_R[at]))
            reads.noted[row] = begin_R[at] = max(begin_R[at], reads.skipped[row] * table.block_size)
        end_R = step.begin_R + step.base_end_R - step.base_R
        is_known_R = table.num_known[rows_R] - table.num_accepted[rows_R] > step.base_end_R
        keeps_R = (begin_R < end_R) & is_known_R
        reads.read[rows_R[~keeps_R]] = MISSED
        less_R = begin_R - step.begin_R
        span = (rows_R, begin_R, end_R, step.spare_R, step.lens_R - less_R, step.first_R + less_R, step.base_end_R)
        return _Span(*(column[keeps_R] for column in span))

    def _note(self, span: _Span) -> None:
        """Notes in the blocks what is read for sure."""
        for row, end in zip(span.rows_R.tolist(), span.end_R.tolist(), strict=True):
            places = np.arange(self._reads.noted[row], end)
            self._reads.note(np.full_like(places, row), places)
            self._reads.noted[row] = end

    # ---- passes ----

    def _sent(
        self, span: _Span, asked: _AskedGuesses, guesses: AheadGuesses, *, waits: bool
    ) -> Iterator[tuple[_HeadPass, OnDevice]]:
        """Yields the passes, brought to the device together, or each behind the guesses of the one before."""
        passes: list[_HeadPass] = []
        arrays = StepArrays()
        while not passes or (asked.most_R > len(passes)).any():
            passes.append(self._pass(span, asked, passes, arrays, waits=waits))
            if waits:
                yield passes[-1], self._rows.send_passes([passes[-1].rows], arrays)[0]
                arrays = StepArrays()
                if passes[-1].sampling is not None:
                    self._tell(guesses, len(passes) - 1, span, asked)
        if not waits:
            yield from zip(passes, self._rows.send_passes([each.rows for each in passes], arrays), strict=True)

    def _pass(
        self, span: _Span, asked: _AskedGuesses, before: Sequence[_HeadPass], arrays: StepArrays, *, waits: bool
    ) -> _HeadPass:
        """Returns the pass behind others of the step. Rows may have been told meanwhile that they go no further."""
        most_R, place = asked.most_R, len(before)
        rows, own_Q = self._rows_of(span, most_R, place)
        source = _places(span) if not place else np.searchsorted(before[-1].own_Q, np.flatnonzero(most_R > place))
        sampling = None
        if len(own_Q):
            rows_Q = rows.sample_rows_S
            if waits:
                sampling = self._draw.prepare(rows_Q, self._table.num_known[rows_Q] + place, arrays)
            else:
                sampling = self._draw.prepare_ahead(rows_Q, place, arrays)
        skipped_R = self._reads.skipped[rows.rows_R]
        skipped = (skipped_R.tolist(), arrays.send(skipped_R)) if skipped_R.any() else None
        at_Q = np.searchsorted(rows.starts, rows.logits_rows_S, side="right") - 1
        asks_2Q = arrays.send(np.stack((at_Q, asked.at_R[own_Q])))
        return _HeadPass(rows, sampling, own_Q, asks_2Q, arrays.send(source), skipped)

    def _rows_of(self, span: _Span, most_R: Ints, place: int) -> tuple[StepRows, Ints]:
        """Returns a pass's rows, and the places in the span of those with a guess behind it."""
        own = np.flatnonzero(most_R > place) if place else np.arange(len(most_R))
        rows_R, at = span.rows_R[own], np.flatnonzero(most_R[own] > place)
        if place:
            begin_R, spare_R = self._table.num_known[rows_R] - 2 + place, self._table.max_accepted[rows_R]
            lens_R = np.ones_like(rows_R)
        else:
            begin_R, spare_R, lens_R = span.begin_R, span.spare_R, span.lens_R
        starts = np.zeros(len(own) + 1, np.int64)
        np.cumsum(lens_R, out=starts[1:])
        given = (rows_R, begin_R, begin_R + lens_R, starts, lens_R, starts[1:][at] - 1, rows_R[at], None, None, spare_R)
        return StepRows(*given, read_rows=None if place else rows_R), own[at]

    def _first(
        self,
        step: _HeadPass,
        sent: OnDevice,
        span: _Span,
        last: tuple[Heard, torch.Tensor] | None,
        guesses: AheadGuesses,
    ) -> torch.Tensor:
        """Reads a span, and draws behind the last token of each row that is computed for good, which the device knows;
        returns the vectors behind the guesses."""
        again = bool((span.first_R == MISSED).any())
        tensors, vectors_TH, last_R = self._read(sent, self._width(step), step.source(), last, again=again)
        tensors = tensors._replace(logits_rows_S=last_R[step.asks_2Q()[0]])
        return self._drawn(step, sent, tensors, vectors_TH, 0, guesses)

    def _read(
        self,
        sent: OnDevice,
        width: int,
        at_T: torch.Tensor,
        last: tuple[Heard, torch.Tensor] | None,
        *,
        again: bool,
    ) -> tuple[StepTensors, torch.Tensor, torch.Tensor]:
        """Returns a first pass's tensors, the vectors that it reads, and the place of each row's last token that is
        computed for good, whose vector is kept. Vectors of drafts that were rejected count for nothing. again: vectors
        that are kept are read."""
        known_R = self._rows.known(sent.rows_R)
        begin_R, last_R = places_read(known_R, sent, at_T, None if last is None else last[1])
        tensors = self._rows.pass_tensors(sent, width, begin_R, behind=1)
        read_TH = None if last is None else self._head.vectors(last[0], at_T.clamp(min=0))
        if again:
            kept_TH = self._last.at(sent.rows_R[sent.place_T])
            read_TH = kept_TH if read_TH is None else torch.where(at_T[:, None] < 0, kept_TH, read_TH)
        assert read_TH is not None, "nothing is read"
        is_known_T1 = (tensors.positions_T <= (known_R - 2)[sent.place_T])[:, None]
        vectors_TH = torch.where(is_known_T1, read_TH, 0)
        self._last.put(sent.rows_R, vectors_TH[last_R])
        return tensors, vectors_TH, last_R

    def _later(
        self, step: _HeadPass, sent: OnDevice, vectors_QH: torch.Tensor, place: int, guesses: AheadGuesses
    ) -> torch.Tensor:
        """Reads a guess of each row, behind the vectors that the pass before has put out; returns as _first() does."""
        tensors = self._rows.pass_tensors(sent, self._width(step), behind=1)
        return self._drawn(step, sent, tensors, vectors_QH[step.source()], place, guesses)

    def _drawn(
        self,
        step: _HeadPass,
        sent: OnDevice,
        tensors: StepTensors,
        vectors_TH: torch.Tensor,
        place: int,
        guesses: AheadGuesses,
    ) -> torch.Tensor:
        rows, spare_R = step.rows, step.rows.spare_R
        assert spare_R is not None
        lists = (rows.lens_R.tolist(), rows.most_R.tolist())
        spare = spare_R.tolist() if spare_R.any() else None
        batch = tensors.batch(*lists, self._table.block_size, spare_lens_list=spare)
        if step.skipped_R is not None:
            batch = batch.without_first(step.skipped_R[0], step.skipped_R[1](), sent.place_T)
        logits_QV, next_QH = self._head.forward(tensors.input_ids_T, vectors_TH, batch, self._kv)
        if step.sampling is not None:
            at_Q, asked_Q = step.asks_2Q()
            positions_Q = self._rows.known(sent.rows_R)[at_Q] + place
            guesses.draw(step.sampling, self._of_model(logits_QV), positions_Q, place, sent.rows_B, asked_Q)
        return next_QH

    def _width(self, step: _HeadPass) -> int:
        return int(self._table.num_blocks[step.rows.rows_R].max())

    def _tell(self, guesses: AheadGuesses, place: int, span: _Span, asked: _AskedGuesses) -> None:
        """Waits for the guesses up to a place, and writes them behind the rows' tokens; rows without one go no
        further."""
        host_AD = self._accelerator.to_host(guesses.ids_AD)
        self._accelerator.event().wait()
        for at in np.flatnonzero(asked.most_R > place).tolist():
            own = host_AD[asked.at_R[at], : place + 1].tolist()
            if own[place] < 0:
                asked.most_R[at] = place
            else:
                self._table.draft(int(span.rows_R[at]), own)


def _places(span: _Span) -> Ints:
    """Returns the place of each token in the last step, MISSED for those whose vectors are kept."""
    steps_T = np.arange(span.lens_R.sum()) - np.repeat(np.cumsum(span.lens_R) - span.lens_R, span.lens_R)
    first_T = np.repeat(span.first_R, span.lens_R)
    return np.where(first_T == MISSED, MISSED, first_T + steps_T)
