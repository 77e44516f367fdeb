"""HeadDrafts: guesses of an EAGLE head or an MTP layer, token after token, from what the model has computed of rows.

The head has KV for each token that it has read, in the model's blocks. It reads the tokens of a step at the beginning
of the next one, with pipeline stages at the step's end, when the tokens behind them are known, whether or not a row has
drafts in it; else it would miss what only that step has. Where no row has had drafts for some steps it rests. Of what
it has missed it can have no KV any more: it sees such a row from the block on behind which it has read it
(KVCache.drafted), as though it began there, and where the newest tokens are missing, from the next block on. R rows of
a pass, Q of them with a guess.
"""

from collections.abc import Collection, Hashable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.forward_batch import StepShape
from tandem.workers.kernels.step_arrays import StepArrays
from tandem.workers.models.step_tensors import Heard
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import NO_DRAFT, DeviceRows, PassedRows, StepRows
from tandem.workers.rank.captured.guess_replays import GuessReplays, GuessStep
from tandem.workers.rank.drafters.guess_draw import DraftBlocks, DraftRows, GuessDraw, GuessRoom, unless_full
from tandem.workers.rank.drafters.head_ahead import HeadAhead, VectorHead
from tandem.workers.rank.drafters.step_record import (
    MISSED,
    REST_AFTER,
    Computed,
    DecodedStep,
    HeadReads,
    LastVectors,
    StepRecord,
)
from tandem.workers.speculation.proposer import GuessRow, ProposalRow

Ints = npt.NDArray[np.int64]
NOTHING: Final = Computed(*(np.empty(0, np.int64) for _ in Computed._fields))


class HeadDrafts:
    """A Proposer that ReadsSteps, and where rows live on a device GuessesAhead that CapturesPasses. ids: the model's id
    of each id of the head, int64; None: the same. max_len: positions that the head has. kv, table, rows: of the model's
    runner; room: for guesses of the device. appends: what steps sample is added to rows there, else the host has it."""

    reads_along = True

    def __init__(
        self,
        head: VectorHead,
        ids: torch.Tensor | None,
        vocab_size: int,
        max_len: int,
        kv: DraftBlocks,
        table: DraftRows,
        rows: DeviceRows,
        room: GuessRoom,
        platform: Platform,
        *,
        appends: bool,
    ) -> None:
        self._head, self._ids, self._vocab_size, self._max_len = head, ids, vocab_size, max_len
        self._kv, self._table, self._rows, self._room, self._platform = kv, table, rows, room, platform
        self._draw, self._record, self._reads = GuessDraw(table, platform), StepRecord(table), HeadReads(kv, table)
        self._last = LastVectors(table, platform.accelerator.to_device)
        self._ahead: HeadAhead | None = None
        if appends and isinstance(rows, PassedRows):
            parts = self._draw, self._record, self._reads, self._last
            self._ahead = HeadAhead(head, self._of_model, max_len, kv.draft, table, rows, platform, parts)
        self._idle = 0

    @property
    def keeps_up(self) -> bool:
        return self._idle < REST_AFTER

    def read(self, step: DecodedStep) -> None:
        if self.keeps_up:
            self._record.keep(step)

    def catch_up(self) -> None:
        self._idle += 1
        if self._ahead is None:
            unless_full(lambda: self._absorb((), {}), None)
        else:
            ahead = self._ahead
            unless_full(lambda: ahead.guess(()), None)

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        self._idle = 0
        if self._ahead is None:
            return unless_full(lambda: self._guesses(rows), [()] * len(rows))
        told = self._guessed([GuessRow(row.row, row.max_drafts) for row in rows], waits=True)
        host_AD = self._platform.accelerator.to_host(told)
        self._platform.accelerator.event().wait()
        return [[token for token in own if token >= 0] for own in host_AD.tolist()]

    def guess(self, rows: Sequence[GuessRow]) -> torch.Tensor:
        self._idle = 0
        return self._guessed(rows, waits=False)

    # ---- captures ----

    def replay_key(self, num_blocks: int) -> Hashable | None:
        return self._head.replay_key(StepShape(1, 1, num_blocks), self._kv.draft)

    def hold(self, heard: Heard) -> None:
        """The vectors of rows stay where they are."""
        self._last.hold(self._head.vectors(heard, torch.zeros(1, dtype=torch.int64, device=self._platform.device)))

    def passes(self, step: GuessStep) -> None:
        assert self._ahead is not None, "rows whose tokens the host has"
        self._ahead.passes(step)

    def take(self, replays: GuessReplays) -> None:
        assert self._ahead is not None, "rows whose tokens the host has"
        self._ahead.replays = replays

    # ---- inside ----

    def _guessed(self, rows: Sequence[GuessRow], *, waits: bool) -> torch.Tensor:
        """Returns the guesses of a device."""
        assert self._ahead is not None, "rows whose tokens the host has"
        ahead = self._ahead
        guesses_QD = unless_full(lambda: ahead.guess(rows, waits=waits), None)
        return self._room.filled(rows, NO_DRAFT) if guesses_QD is None else guesses_QD

    def _guesses(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        asked = {row.row: row for row in rows if len(row.token_ids) + row.max_drafts <= self._max_len}
        drafts: dict[int, list[int]] = {}
        numbers, vectors_QH = self._absorb(asked.keys(), drafts)
        while True:
            goes_on = [at for at, row in enumerate(numbers) if len(drafts[row]) < asked[row].max_drafts]
            if not goes_on:
                return [drafts.get(row.row, ()) for row in rows]
            own = [numbers[at] for at in goes_on]
            # the vector behind the i-th guess of a row of L tokens stands at L - 2 + i
            begin = np.array([len(asked[row].token_ids) - 2 + len(drafts[row]) for row in own], np.int64)
            step = Computed(np.array(own, np.int64), begin, begin + 1, np.arange(len(own)))
            last = torch.tensor([drafts[row][-1] for row in own])
            numbers, vectors_QH = self._pass(step, last, vectors_QH[goes_on], step.first_R, drafts)

    def _absorb(self, asked: Collection[int], drafts: dict[int, list[int]]) -> tuple[list[int], torch.Tensor]:
        """Reads the last step, and guesses a token of each row that asks for it and whose last token is read. Returns
        as _pass() does."""
        kept = self._record.take()
        computed = NOTHING if kept is None else self._follow(kept[0])
        vectors = [] if kept is None or not len(computed.rows_R) else [self._vectors_of(computed, kept[1])]
        waiting = self._waiting(set(asked).difference(computed.rows_R.tolist()))
        if len(waiting):
            vectors.append(self._last.of(waiting))
            again = Computed(waiting, self._reads.read[waiting] - 1, self._reads.read[waiting], np.zeros_like(waiting))
            computed = Computed(*(np.append(one, more) for one, more in zip(computed, again, strict=True)))
        if not vectors:
            return [], torch.empty(0)
        row_T, places_T = _places(computed)
        ids_T = self._table.token_ids[computed.rows_R[row_T], places_T + 1].astype(np.int64)
        asks = np.flatnonzero([row in asked for row in computed.rows_R.tolist()])
        self._reads.read[computed.rows_R] = MISSED  # if there is no memory for the pass
        guessed = self._pass(computed, torch.from_numpy(ids_T), torch.cat(vectors), asks, drafts)
        self._reads.read[computed.rows_R] = computed.end_R
        self._reads.note(computed.rows_R[row_T], places_T)
        return guessed

    def _vectors_of(self, computed: Computed, heard: Heard) -> torch.Tensor:
        """Returns the vectors of what a step has computed, and keeps those of the last tokens."""
        row_T, places_T = _places(computed)
        at_T = torch.from_numpy(computed.first_R[row_T] + places_T - computed.begin_R[row_T])
        vectors_TH = self._head.vectors(heard, self._platform.accelerator.to_device(at_T))
        ends = torch.from_numpy(np.cumsum(computed.end_R - computed.begin_R) - 1)
        last_RH = vectors_TH[self._platform.accelerator.to_device(ends)]
        self._last.keep(computed.rows_R, computed.end_R, last_RH)
        return vectors_TH

    def _waiting(self, rows: Collection[int]) -> Ints:
        """Returns those of rows that are all read, and were not in the last step."""
        known = self._table.num_known
        return np.array([row for row in sorted(rows) if self._is_read(row, int(known[row]) - 1)], np.int64)

    def _is_read(self, row: int, num_tokens: int) -> bool:
        return self._last.has(row, num_tokens) and bool(self._reads.read[row] == num_tokens)

    def _follow(self, computed: Computed) -> Computed:
        """Returns what the head can read of rows: all, where it has read what comes before or sees the row from a block
        on behind which it has; else from the next block on."""
        rows_R, begin_R, size = computed.rows_R, computed.begin_R.copy(), self._table.block_size
        for at in np.flatnonzero(self._reads.know(rows_R) | (self._reads.read[rows_R] != begin_R)).tolist():
            skipped = self._reads.lacking(int(rows_R[at]), int(begin_R[at]))
            self._reads.skipped[rows_R[at]] = skipped
            begin_R[at] = max(begin_R[at], skipped * size)
        keeps = (begin_R < computed.end_R) & (self._table.num_known[rows_R] > computed.end_R)
        self._reads.read[rows_R[~keeps]] = MISSED
        first_R = computed.first_R + begin_R - computed.begin_R
        return Computed(rows_R[keeps], begin_R[keeps], computed.end_R[keeps], first_R[keeps])

    def _pass(
        self, step: Computed, ids_T: torch.Tensor, vectors_TH: torch.Tensor, asks: Ints, drafts: dict[int, list[int]]
    ) -> tuple[list[int], torch.Tensor]:
        """Runs the head over vectors, and adds a guess to the drafts of each row of the step at `asks`, where the next
        pass finds it. Returns the rows that have got one, and the vectors behind them."""
        rows_R, begin_R, end_R = step.rows_R, step.begin_R, step.end_R
        lens_R = end_R - begin_R
        starts = np.zeros(len(rows_R) + 1, np.int64)
        np.cumsum(lens_R, out=starts[1:])
        rows_Q, arrays = rows_R[asks], StepArrays()
        sampling = self._draw.prepare(rows_Q, end_R[asks] + 1, arrays) if len(asks) else None
        wanted = starts[1:][asks] - 1
        step_rows = StepRows(rows_R, begin_R, end_R, starts, lens_R, wanted, rows_Q, None, None)
        tensors = self._rows.step(step_rows, arrays)
        batch = tensors.batch(lens_R.tolist(), end_R.tolist(), self._table.block_size)
        skipped_R, to_device = self._reads.skipped[rows_R], self._platform.accelerator.to_device
        if skipped_R.any():
            row_T = np.repeat(np.arange(len(rows_R)), lens_R)
            batch = batch.without_first(
                skipped_R.tolist(), *(to_device(torch.from_numpy(a)) for a in (skipped_R, row_T))
            )
        ids_T = self._platform.accelerator.to_device(ids_T)
        logits_QV, next_QH = self._head.forward(ids_T, vectors_TH, batch, self._kv.draft)
        if sampling is None:
            return [], next_QH
        got: dict[int, int] = {}
        for at, (row, token) in enumerate(
            zip(rows_Q.tolist(), self._draw.draw(sampling, self._of_model(logits_QV)), strict=True)
        ):
            if token is not None:
                drafts.setdefault(row, []).append(token)
                self._table.draft(row, drafts[row])
                got[row] = at
        return [*got], next_QH[[*got.values()]]

    def _of_model(self, logits_QV: torch.Tensor) -> torch.Tensor:
        """Returns logits over the model's vocabulary; ids that the head does not know cannot be chosen."""
        if self._ids is None:
            return logits_QV
        whole_QV = logits_QV.new_full((len(logits_QV), self._vocab_size), float("-inf"))
        whole_QV[:, self._ids] = logits_QV
        return whole_QV


def _places(computed: Computed) -> tuple[Ints, Ints]:
    """Returns the row of the step of each token, and its place in that row."""
    lens_R = computed.end_R - computed.begin_R
    row_T = np.repeat(np.arange(len(lens_R)), lens_R)
    return row_T, np.arange(len(row_T)) - (np.cumsum(lens_R) - lens_R - computed.begin_R)[row_T]
