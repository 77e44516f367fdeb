"""MedusaHeads: a head for each of the next places, over the model's last hidden state (Cai et al. 2024, Medusa); and
MedusaDrafts, their guesses: all places of a row from what the model has behind its last computed token.

A head is a block, x + silu(linear(x)) as often as it has layers, and a vocabulary table. None sees the guesses ahead of
its own, and none has KV, so they guess again at once, whatever they have not seen of a row. On a device that is ahead
of the host, that is where the last computed token is known. S rows, Q of them with a guess, H hidden size, V
vocabulary.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.embedding import VocabParallelHead
from tandem.parallel.linear import ColumnParallelLinear
from tandem.workers.attention.forward_batch import OnDevice
from tandem.workers.kernels.step_arrays import StepArrays
from tandem.workers.models.spec.config.head_config import HeadSpec, MedusaParams
from tandem.workers.models.step_tensors import Heard
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import NO_DRAFT, DeviceRows, PassedRows, StepRows
from tandem.workers.rank.captured.guess_replays import AskedGuesses, GuessReplays, GuessStep
from tandem.workers.rank.drafters.guess_draw import AheadGuesses, DraftRows, GuessDraw, GuessRoom, unless_full
from tandem.workers.rank.drafters.step_record import (
    MISSED,
    REST_AFTER,
    AheadStep,
    DecodedStep,
    LastVectors,
    StepRecord,
    places_read,
)
from tandem.workers.speculation.proposer import GuessRow, ProposalRow

Ints = npt.NDArray[np.int64]
Normed = Callable[[Heard, torch.Tensor], torch.Tensor]
"""Returns the hidden states [S, H] after the model's final norm at indices S of a step's tokens."""


class MedusaHeads:
    """The heads, whole on this rank."""

    def __init__(self, spec: HeadSpec, platform: Platform, dtype: torch.dtype) -> None:
        assert isinstance(spec.params, MedusaParams)
        alone, make = ParallelContext.single(), partial(platform.linear, dtype=dtype)
        self._blocks = [
            [ColumnParallelLinear((weight,), (bias,), alone, make) for weight, bias in block]
            for block in spec.params.blocks
        ]
        self._tables = [VocabParallelHead(table, alone, make) for table in spec.params.tables]

    def logits(self, hidden_SH: torch.Tensor, place: int) -> torch.Tensor:
        """Returns the logits [S, V], float32, of the guess at a place, from 0 on. hidden_SH: after the final norm,
        behind the last token that the model has computed of each row."""
        for layer in self._blocks[place]:
            hidden_SH = hidden_SH + functional.silu(layer(hidden_SH))
        return self._tables[place](hidden_SH)

    def slots(self) -> Iterator[ParameterSlot]:
        for block in self._blocks:
            for layer in block:
                yield from layer.slots()
        for table in self._tables:
            yield from table.slots()


class MedusaDrafts:
    """A Proposer that ReadsSteps. table, rows: of the model's runner; room: for guesses of the device; most: heads.
    appends: what steps sample is added to rows there, so that on a device it is GuessesAhead that CapturesPasses."""

    reads_along = True
    keeps_up = False  # with several stages, where this is asked, guesses are made of the step that is just over

    def __init__(
        self,
        heads: MedusaHeads,
        most: int,
        normed: Normed,
        table: DraftRows,
        rows: DeviceRows,
        room: GuessRoom,
        platform: Platform,
        *,
        appends: bool,
    ) -> None:
        self._heads, self._most, self._normed = heads, most, normed
        self._table, self._rows, self._room, self._platform = table, rows, room, platform
        self._draw, self._record = GuessDraw(table, platform), StepRecord(table)
        self._last = LastVectors(table, platform.accelerator.to_device)
        self._ahead = rows if appends and isinstance(rows, PassedRows) else None
        self.replays: GuessReplays | None = None
        self._idle = 0

    def read(self, step: DecodedStep) -> None:
        if self._idle < REST_AFTER:
            self._record.keep(step)

    def catch_up(self) -> None:
        self._idle += 1
        unless_full(self._take, None)

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        self._idle = 0
        return unless_full(lambda: self._guesses(rows), [()] * len(rows))

    def guess(self, rows: Sequence[GuessRow]) -> torch.Tensor:
        assert self._ahead is not None, "rows whose tokens the host has"
        self._idle = 0
        ahead = self._ahead
        guesses_QD = unless_full(lambda: self._guess_ahead(ahead, rows), None)
        return self._room.filled(rows, NO_DRAFT) if guesses_QD is None else guesses_QD

    # ---- captures ----

    def replay_key(self, num_blocks: int) -> Hashable | None:
        return ()

    def hold(self, heard: Heard) -> None:
        """The vectors of rows stay where they are."""
        self._last.hold(self._normed(heard, torch.zeros(1, dtype=torch.int64, device=self._platform.device)))

    def passes(self, step: GuessStep) -> None:
        assert self._ahead is not None and step.sent.at_T is not None, "rows whose tokens the host has"
        sent = step.sent
        hidden_RH = self._read(self._ahead, sent, step.sent.at_T, step.last, again=True)
        hidden_SH = hidden_RH[sent.place_T[sent.logits_rows_S]]
        for place in range(min(step.size.num_places, self._most)):
            step.draw(self._heads.logits(hidden_SH, place), place)

    def take(self, replays: GuessReplays) -> None:
        self.replays = replays

    # ---- inside ----

    def _take(self) -> None:
        """Keeps of the last step what guesses are made of."""
        if self._ahead is not None:
            self._guess_ahead(self._ahead, ())
            return
        kept = self._record.take()
        if kept is not None:
            (rows_R, begin_R, end_R, first_R), heard = kept
            at_R = self._platform.accelerator.to_device(torch.from_numpy(first_R + end_R - begin_R - 1))
            self._last.keep(rows_R, end_R, self._normed(heard, at_R))

    def _has(self, row: int, num_tokens: int) -> bool:
        """Returns whether what the model has behind a row's last computed token is there, one of so many that are
        known."""
        accepted = 0 if self._ahead is None else int(self._table.num_accepted[row])
        return self._last.has(row, num_tokens - 1 - accepted)

    def _guess_ahead(self, ahead: PassedRows, rows: Sequence[GuessRow]) -> torch.Tensor:
        """Takes the last step, and returns as GuessesAhead.guess() does, by one replay where one holds it."""
        most, kept = max((row.max_drafts for row in rows), default=0), self._record.take_ahead()
        step = None if kept is None else kept[0]
        if step is not None:
            self._last.note(step.rows_R, step.base_end_R)
        has = [self._has(row.row, int(self._table.num_known[row.row])) for row in rows]
        own_S = np.flatnonzero(np.array(has, np.bool_))
        if step is None and not len(own_S):
            return AheadGuesses(ahead, len(rows), most).ids_AD
        numbers_S = np.array([rows[at].row for at in own_S.tolist()], np.int64)
        most_S = np.array([min(rows[at].max_drafts, self._most) for at in own_S.tolist()], np.int64)
        read, at_T = _to_read(self._table, step, numbers_S)
        given = most_S, own_S, len(rows), most, at_T
        asked = AskedGuesses(*given, last=None if kept is None else kept[1:])
        try:
            ids_AD = None if self.replays is None else self.replays.guess(read, asked)
            if ids_AD is not None:
                return ids_AD
            run = self._launched(ahead, read, asked)
        except torch.OutOfMemoryError:
            if step is not None:
                self._last.forget(step.rows_R)
            raise
        return run()

    def _launched(self, ahead: PassedRows, read: StepRows, asked: AskedGuesses) -> Callable[[], torch.Tensor]:
        """Reads the last step; returns what then draws place after place."""
        guesses, arrays, rows_S = AheadGuesses(ahead, asked.num_asked, asked.most), StepArrays(), read.sample_rows_S
        row_S = np.searchsorted(read.starts, read.logits_rows_S, side="right") - 1
        places = [np.flatnonzero(asked.most_S > place) for place in range(int(asked.most_S.max(initial=0)))]
        sampling = [self._draw.prepare_ahead(rows_S[at], place, arrays) for place, at in enumerate(places)]
        indices = [arrays.send(np.stack((row_S[at], asked.asked_S[at]))) for at in places]
        at_T = arrays.send(asked.at_T)
        (sent,) = ahead.send_passes([read], arrays)
        hidden_RH = self._read(ahead, sent, at_T(), asked.last, again=bool((asked.at_T == MISSED).any()))
        known_R = ahead.known(sent.rows_R)

        def draw() -> torch.Tensor:
            for place, (each, sent_at) in enumerate(zip(sampling, indices, strict=True)):
                row_Q, asked_Q = sent_at()
                logits_QV = self._heads.logits(hidden_RH[row_Q], place)
                guesses.draw(each, logits_QV, known_R[row_Q] + place, place, sent.rows_R[row_Q], asked_Q)
            return guesses.ids_AD

        return draw

    def _read(
        self,
        ahead: PassedRows,
        sent: OnDevice,
        at_T: torch.Tensor,
        last: tuple[Heard, torch.Tensor] | None,
        *,
        again: bool,
    ) -> torch.Tensor:
        """Returns, and keeps, what the model has behind each row's last token that is computed for good [R, H]. again:
        of some rows what is kept."""
        _, last_R = places_read(ahead.known(sent.rows_R), sent, at_T, None if last is None else last[1])
        at_R = at_T[last_R]
        hidden_RH = None if last is None else self._normed(last[0], at_R.clamp(min=0))
        if again:
            kept_RH = self._last.at(sent.rows_R)
            hidden_RH = kept_RH if hidden_RH is None else torch.where(at_R[:, None] < 0, kept_RH, hidden_RH)
        assert hidden_RH is not None, "nothing is read"
        self._last.put(sent.rows_R, hidden_RH)
        return hidden_RH

    def _guesses(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        drafts: dict[int, list[int]] = {row.row: [] for row in rows}
        self._take()
        own = [row for row in rows if self._has(row.row, len(row.token_ids))]
        if not own:
            return [()] * len(rows)
        hidden_SH = self._last.of(np.array([row.row for row in own], np.int64))
        going = list(range(len(own)))
        for place in range(self._most):
            going = [at for at in going if own[at].max_drafts > place]
            if not going:
                break
            going = self._guess(place, [own[at] for at in going], going, hidden_SH, drafts)
        return [drafts[row.row] for row in rows]

    def _guess(
        self, place: int, rows: list[ProposalRow], at: list[int], hidden_SH: torch.Tensor, drafts: dict[int, list[int]]
    ) -> list[int]:
        """Adds a guess to the drafts of rows; returns those of `at`, the rows' places in hidden_SH, that have got
        one."""
        arrays = StepArrays()
        numbers = np.array([row.row for row in rows], np.int64)
        positions = np.array([len(row.token_ids) + place for row in rows], np.int64)
        sampling = self._draw.prepare(numbers, positions, arrays)
        self._rows.send_late(arrays)
        found = self._draw.draw(sampling, self._heads.logits(hidden_SH[at], place))
        got = []
        for index, row, token in zip(at, rows, found, strict=True):
            if token is not None:
                drafts[row.row].append(token)
                self._table.draft(row.row, drafts[row.row])
                got.append(index)
        return got


def _to_read(table: DraftRows, step: AheadStep | None, numbers_S: Ints) -> tuple[StepRows, Ints]:
    """Returns the rows of the last step, and those that have guesses though they were not in it; and the place of each
    of their tokens in it, MISSED for the latter. numbers_S: the rows with guesses."""
    rows_R = np.empty(0, np.int64) if step is None else step.rows_R
    waiting = numbers_S[~np.isin(numbers_S, rows_R)]
    begin_R, lens_R, first_R = table.num_known[waiting] - 2, np.ones_like(waiting), np.full_like(waiting, MISSED)
    spare_R, rows_R = table.max_accepted[waiting], np.append(rows_R, waiting)
    if step is not None:
        begin_R, lens_R = np.append(step.begin_R, begin_R), np.append(step.lens_R, lens_R)
        first_R, spare_R = np.append(step.first_R, first_R), np.append(step.spare_R, spare_R)
    starts = np.zeros(len(rows_R) + 1, np.int64)
    np.cumsum(lens_R, out=starts[1:])
    row_S = np.array([int(np.flatnonzero(rows_R == row)[0]) for row in numbers_S.tolist()], np.int64)
    first_T = np.repeat(first_R, lens_R)
    at_T = np.where(first_T == MISSED, MISSED, first_T + np.arange(starts[-1]) - np.repeat(starts[:-1], lens_R))
    given = (rows_R, begin_R, begin_R + lens_R, starts, lens_R, starts[1:][row_S] - 1, numbers_S, None, None, spare_R)
    return StepRows(*given, read_rows=numbers_S), at_T
