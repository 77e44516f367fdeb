"""DraftModel: a small model guesses the next tokens of rows, one after the other (vLLM's method "draft_model").

Leviathan et al., "Fast inference from transformers via speculative decoding" (2023). Its KV lies in the blocks of the
model, in layers behind the model's: what finds, copies, moves and frees blocks takes it along. It reads a row's tokens
only when the row has drafts again; the blocks know how far it has read (KVCache.drafted), so a row whose drafts are
paused costs nothing, and one that shares a prefix reads on behind it. Where that knowledge is wrong, as of blocks that
came back from a lower tier, guesses get worse and tokens stay what they are.

A guess is drawn as the model's token will be, by the row's own parameters and the same noise at the same position
(kernels/gumbel_noise.py). So where both models think alike they draw alike, at any temperature: the chance is nearly
that of rejection sampling. R rows of a pass, Q of them with a guess.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.kernels.step_arrays import StepArrays
from tandem.workers.models.decoder import Decoder
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import DeviceRows, StepRows, StepTensors
from tandem.workers.rank.drafters.guess_draw import DraftBlocks, DraftRows, GuessDraw
from tandem.workers.rank.drafters.no_memory import unless_full
from tandem.workers.speculation.proposer import ProposalRow

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
    """A Proposer. max_len: positions that the draft model has. kv, table, rows: of the model's runner."""

    def __init__(
        self, decoder: Decoder, max_len: int, kv: DraftBlocks, table: DraftRows, rows: DeviceRows, platform: Platform
    ) -> None:
        self._decoder, self._max_len, self._kv = decoder, max_len, kv
        self._table, self._rows = table, rows
        self._draw = GuessDraw(table, platform)
        self._groups = sorted({layer.group for layer in kv.draft.layers})
        self._has_windows = any(table.windows[group] is not None for group in self._groups)
        self._read = np.zeros(len(table.lives), np.int64)  # tokens of a row that the draft has read
        self._lives = np.full_like(self._read, -1)  # of the rows of which that is known

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        """Returns guesses of each row, none for one whose tokens are not all read yet."""
        return unless_full(lambda: self._guesses(rows), [()] * len(rows))

    # ---- inside ----

    def _guesses(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        numbers = np.array([row.row for row in rows], np.int64)
        known = np.array([len(row.token_ids) for row in rows], np.int64)
        most = np.array([row.max_drafts for row in rows], np.int64)
        most = np.where(known + most <= self._max_len, most, 0)
        drafts: list[list[int]] = [[] for _ in rows]
        first = self._first_pass(numbers, known, most)
        guessed = self._guess(first, drafts)
        self._note(first)
        for place in range(1, int(most.max(initial=0))):
            goes_on = guessed & (most > place)
            if not goes_on.any():
                break
            begin = known + place - 1
            guessed = self._guess(_Pass(numbers, begin, begin + goes_on, goes_on), drafts)
            self._read[numbers[goes_on]] += 1
        return [*drafts]

    def _first_pass(self, numbers: Ints, known: Ints, most: Ints) -> _Pass:
        """Returns the pass over what the draft has not read of the rows, up to CATCH_UP tokens beside the last ones."""
        self._follow(numbers, known)
        begin, room = self._read[numbers], CATCH_UP
        end = begin.copy()
        for place in np.flatnonzero(most).tolist():
            if self._has_windows:
                begin[place] = max(begin[place], self._first_held(int(numbers[place])) * self._table.block_size)
            lacking = int(known[place] - 1 - begin[place])
            end[place] = known[place] if lacking <= room else begin[place] + room
            room -= min(lacking, room)
        return _Pass(numbers, begin, end, (end == known) & (most > 0))

    def _follow(self, numbers: Ints, known: Ints) -> None:
        """Brings up to date how far rows are read: guesses may have been rejected, and of a row that is new here its
        blocks say it."""
        lives = self._table.lives
        if len(self._read) < len(lives):
            more = len(lives) - len(self._read)
            self._read = np.append(self._read, np.zeros(more, np.int64))
            self._lives = np.append(self._lives, np.full(more, -1, np.int64))
        for row in numbers[self._lives[numbers] != lives[numbers]].tolist():
            self._read[row] = self._found(row)
        self._lives[numbers] = lives[numbers]
        self._read[numbers] = np.minimum(self._read[numbers], known - 1)

    def _found(self, row: int) -> int:
        """Returns how many of a row's first tokens the draft has read, as the row's blocks say."""
        first = self._first_held(row)
        filled = self._kv.drafted[self._blocks(row)[first:, 0]]
        is_full = filled >= self._table.block_size
        whole = len(filled) if is_full.all() else int(is_full.argmin())
        return (first + whole) * self._table.block_size + (int(filled[whole]) if whole < len(filled) else 0)

    def _blocks(self, row: int) -> Ints:
        """Returns the row's blocks of the groups of the draft's layers, [blocks, groups]; below 0 for those that a
        window has given back, which are the first ones."""
        table, groups = self._table, len(self._table.windows)
        ids = table.block_ids[row, : table.num_blocks[row] * groups].reshape(-1, groups)
        return ids[:, self._groups].astype(np.int64)

    def _first_held(self, row: int) -> int:
        """Returns the first place from which on all blocks of a row are its own, for all layers of the draft. Those
        ahead of what windows see from behind the last full block may have been given to others, which nobody tells."""
        if not self._has_windows:
            return 0
        size, full = self._table.block_size, int(self._table.num_computed[row]) // self._table.block_size
        windows = [self._table.windows[group] for group in self._groups]
        seen = max(0 if window is None else max(0, full * size - window + 1) // size for window in windows)
        return max(seen, int((self._blocks(row) < 0).any(axis=1).sum()))

    def _note(self, first: _Pass) -> None:
        """Notes in the blocks what a first pass has read: tokens that are known stay what they are."""
        size = self._table.block_size
        for row, begin, end in zip(first.rows_R.tolist(), first.begin_R.tolist(), first.end_R.tolist(), strict=True):
            if end > begin:
                places = np.arange(begin // size, -(-end // size))
                self._kv.drafted[self._blocks(row)[places, 0]] = np.minimum(size, end - size * places)
        self._read[first.rows_R] = first.end_R

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
        if self._has_windows:
            tensors = _held(tensors)
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


def _held(tensors: StepTensors) -> StepTensors:
    """Returns a pass's tensors with another block of the row in place of each that a window has given back: the first
    tokens that are read of a row see ahead of them, where there is nothing."""

    def own(table_RN: torch.Tensor) -> torch.Tensor:
        return torch.where(table_RN < 0, table_RN.amax(1, keepdim=True), table_RN)

    further = tuple(group._replace(block_table_RN=own(group.block_table_RN)) for group in tensors.further_groups)
    return tensors._replace(block_table_RN=own(tensors.block_table_RN), further_groups=further)
