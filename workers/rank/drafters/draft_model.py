"""DraftModel: a small model guesses the next tokens of rows, one after the other (vLLM's method "draft_model").

Leviathan et al., "Fast inference from transformers via speculative decoding" (2023). Its KV lies in the blocks of the
model, in layers behind the model's: what finds, copies, moves and frees blocks takes it along. It reads a row's tokens
only when the row has drafts again; the blocks know how far it has read (KVCache.drafted), so a row whose drafts are
paused costs nothing, and one that shares a prefix reads on behind it. Where that knowledge is wrong, guesses get worse
and tokens stay what they are.

A guess is drawn as the model's token will be, by the row's own parameters and the same noise at the same position
(kernels/gumbel_noise.py). So where both models think alike they draw alike, at any temperature: the chance is nearly
that of rejection sampling. R rows of a pass, Q of them with a guess.
"""

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.forward_batch import StepShape
from tandem.workers.kernels.step_arrays import StepArrays
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.step_tensors import Heard
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import NO_DRAFT, DeviceRows, PassedRows, StepRows
from tandem.workers.rank.captured.guess_replays import GuessReplays, GuessStep
from tandem.workers.rank.drafters.draft_ahead import DraftAhead
from tandem.workers.rank.drafters.draft_reads import DraftReads, held
from tandem.workers.rank.drafters.guess_draw import DraftBlocks, DraftRows, GuessDraw, GuessRoom, unless_full
from tandem.workers.speculation.proposer import GuessRow, ProposalRow

Ints = npt.NDArray[np.int64]
CATCH_UP: Final = 512
"""Tokens that the draft reads in a step beside the rows' last ones: a long prompt is read over several steps, in which
its row has no drafts, as all rows wait for it."""


class _Pass(NamedTuple):
    """Rows of a pass of the draft: positions begin_R to before end_R; guesses_R: whether one is drawn behind."""

    rows_R: Ints
    begin_R: Ints
    end_R: Ints
    guesses_R: npt.NDArray[np.bool_]


class DraftModel:
    """A Proposer, and where rows live on a device GuessesAhead that CapturesPasses. max_len: positions that the draft
    model has. kv, table, rows: of the model's runner; room: for guesses of the device."""

    reads_along = False

    def __init__(
        self,
        decoder: Decoder,
        max_len: int,
        kv: DraftBlocks,
        table: DraftRows,
        rows: DeviceRows,
        room: GuessRoom,
        platform: Platform,
    ) -> None:
        self._decoder, self._max_len, self._kv = decoder, max_len, kv
        self._table, self._rows, self._room = table, rows, room
        self._draw = GuessDraw(table, platform)
        self._reads = DraftReads(kv, table)
        self._ahead: DraftAhead | None = None
        if isinstance(rows, PassedRows):
            self._ahead = DraftAhead(decoder, max_len, kv.draft, table, rows, self._draw, self._reads)

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        """Returns guesses of each row, none for one whose tokens are not all read yet."""
        return unless_full(lambda: self._guesses(rows), [()] * len(rows))

    def guess(self, rows: Sequence[GuessRow]) -> torch.Tensor:
        assert self._ahead is not None, "rows whose tokens the host has"
        ahead = self._ahead
        guesses_QD = unless_full(lambda: ahead.guess(rows, CATCH_UP), None)
        return self._room.filled(rows, NO_DRAFT) if guesses_QD is None else guesses_QD

    # ---- captures ----

    def replay_key(self, num_blocks: int) -> Hashable | None:
        return self._decoder.replay_key(StepShape(1, 1, num_blocks), self._kv.draft)

    def hold(self, heard: Heard) -> None:
        """The weights and the cache stay where they are, and nothing else is used."""

    def passes(self, step: GuessStep) -> None:
        assert self._ahead is not None, "rows whose tokens the host has"
        self._ahead.passes(step)

    def take(self, replays: GuessReplays) -> None:
        assert self._ahead is not None, "rows whose tokens the host has"
        self._ahead.replays = replays

    # ---- inside ----

    def _guesses(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        numbers = np.array([row.row for row in rows], np.int64)
        known = np.array([len(row.token_ids) for row in rows], np.int64)
        most = np.array([row.max_drafts for row in rows], np.int64)
        most = np.where(known + most <= self._max_len, most, 0)
        drafts: list[list[int]] = [[] for _ in rows]
        first = self._first_pass(numbers, known, most)
        guessed = self._guess(first, drafts)
        self._reads.take(numbers, first.end_R, first.guesses_R)
        for place in range(1, int(most.max(initial=0))):
            goes_on = guessed & (most > place)
            if not goes_on.any():
                break
            begin = known + place - 1
            guessed = self._guess(_Pass(numbers, begin, begin + goes_on, goes_on), drafts)
            self._reads.go_ahead(numbers[goes_on])
        return [*drafts]

    def _first_pass(self, numbers: Ints, known: Ints, most: Ints) -> _Pass:
        """Returns the pass over what the draft has not read of the rows, up to CATCH_UP tokens beside the last ones."""
        begin, room = self._reads.exact(numbers), CATCH_UP
        end = begin.copy()
        for place in np.flatnonzero(most).tolist():
            if self._reads.has_windows:
                begin[place] = max(begin[place], self._reads.first_held(int(numbers[place])) * self._table.block_size)
            lacking = int(known[place] - 1 - begin[place])
            end[place] = known[place] if lacking <= room else begin[place] + room
            room -= min(lacking, room)
        return _Pass(numbers, begin, end, (end == known) & (most > 0))

    def _guess(self, step: _Pass, drafts: list[list[int]]) -> npt.NDArray[np.bool_]:
        """Runs one pass over the rows that have tokens in it, and draws a token behind those that want one: adds it to
        the row's drafts, where the next pass reads it. Returns which rows have got one."""
        guessed = np.zeros(len(step.rows_R), np.bool_)
        own = np.flatnonzero(step.end_R > step.begin_R)
        if not len(own):
            return guessed
        rows_R, begin_R, end_R = step.rows_R[own], step.begin_R[own], step.end_R[own]
        places, arrays = np.flatnonzero(step.guesses_R[own]), StepArrays()
        rows_Q, positions_Q = rows_R[places], end_R[places]
        sampling = self._draw.prepare(rows_Q, positions_Q, arrays) if len(places) else None
        lens_R = end_R - begin_R
        starts = np.zeros(len(rows_R) + 1, np.int64)
        np.cumsum(lens_R, out=starts[1:])
        wanted = starts[1:][places] - 1
        step_rows = StepRows(rows_R, begin_R, end_R, starts, lens_R, wanted, rows_Q, None, None)
        tensors = self._rows.step(step_rows, arrays)
        if self._reads.has_windows:
            tensors = held(tensors)
        batch = tensors.batch(lens_R.tolist(), end_R.tolist(), self._table.block_size)
        logits_QV = self._decoder.forward(batch, self._kv.draft, None)
        if sampling is None:
            return guessed
        for place, token in zip(own[places].tolist(), self._draw.draw(sampling, logits_QV), strict=True):
            if token is not None:
                drafts[place].append(token)
                self._table.draft(int(step.rows_R[place]), drafts[place])
                guessed[place] = True
        return guessed
