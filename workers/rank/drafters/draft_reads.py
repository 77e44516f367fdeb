"""DraftReads: how far a draft model has read the rows of a rank, where the host knows all tokens, and where the device
is ahead of it.

Blocks know it of rows that are new here (KVCache.drafted). Of a row that has had a guess it is known from then: what
the model keeps of the guesses the draft has read, and each step since has brought tokens that it has not.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.platforms.device_rows import StepTensors
from tandem.workers.rank.drafters.guess_draw import DraftBlocks, DraftRows

Ints = npt.NDArray[np.int64]
NEVER: Final = -1


class DraftReads:
    """The rows of one rank, of which all tokens ahead of `_read` have KV of the draft. _guessed: behind which of a
    row's steps the draft has last read all known tokens and guessed; _ahead: guesses that it has read behind them."""

    def __init__(self, kv: DraftBlocks, table: DraftRows) -> None:
        self._kv, self._table = kv, table
        self._groups = sorted({layer.group for layer in kv.draft.layers})
        self.has_windows = any(table.windows[group] is not None for group in self._groups)
        self._read, self._ahead = np.zeros((2, len(table.lives)), np.int64)
        self._guessed, self._lives = np.full((2, len(table.lives)), NEVER)

    def exact(self, rows_R: Ints) -> Ints:
        """Returns how many of each row's tokens the draft has read, at most all but the last one. The host knows all
        tokens. Each step since has drawn one of them, all others are guesses that the model has kept; with pipeline
        stages, where nothing counts these, none are taken for kept."""
        self._follow(rows_R)
        read_R, known_R, steps_R = self._read[rows_R], self._table.num_known[rows_R], self._steps_since(rows_R)
        kept_R = np.clip(known_R - read_R - np.maximum(1, steps_R), 0, self._ahead[rows_R])
        least_R = np.where(steps_R < 0, 0, known_R - steps_R - 1)
        return np.minimum(np.maximum(read_R + kept_R, least_R), known_R - 1)

    def lacking(self, rows_R: Ints) -> Ints:
        """Returns of how many of its last tokens each row may lack KV, the last one among them, wherever the device
        is. The draft has read, in steps with guesses, all but two: the model keeps them all, and draws one more."""
        self._follow(rows_R)
        table, steps_R = self._table, self._steps_since(rows_R)
        most_R = table.num_known[rows_R] + table.max_accepted[rows_R] - self._read[rows_R]
        return np.maximum(1, np.where(steps_R >= 0, np.minimum(most_R, steps_R + 1), most_R))

    def read(self, row: int) -> int:
        """Returns how many of a row's first tokens are read for sure."""
        return int(self._read[row])

    def take(self, rows_R: Ints, end_R: Ints, guessed_R: npt.NDArray[np.bool_]) -> None:
        """Notes that rows are read up to `end`, here and in their blocks: tokens that are known stay what they are.
        guessed_R: those of which all known tokens are read, and that may have guesses."""
        size, table = self._table.block_size, self._table
        for row, read, end in zip(rows_R.tolist(), self._read[rows_R].tolist(), end_R.tolist(), strict=True):
            begin = max(read, self.first_held(row) * size)
            if end > begin:
                places = np.arange(begin // size, -(-end // size))
                self._kv.drafted[self._blocks(row)[places, 0]] = np.minimum(size, end - size * places)
        self._read[rows_R] = end_R
        steps_R = table.num_known[rows_R] - table.num_accepted[rows_R]
        self._guessed[rows_R] = np.where(guessed_R, steps_R, NEVER)
        self._ahead[rows_R] = 0

    def go_ahead(self, rows_R: Ints) -> None:
        """Notes that one more guess of each row is read, which the host knows."""
        self._ahead[rows_R] += 1

    def first_held(self, row: int) -> int:
        """Returns the first place from which on all blocks of a row are its own, for all layers of the draft. Those
        ahead of what windows see from behind the last full block may have been given to others, which nobody tells."""
        if not self.has_windows:
            return 0
        size, full = self._table.block_size, int(self._table.num_computed[row]) // self._table.block_size
        windows = [self._table.windows[group] for group in self._groups]
        seen = max(0 if window is None else max(0, full * size - window + 1) // size for window in windows)
        return max(seen, int((self._blocks(row) < 0).any(axis=1).sum()))

    # ---- inside ----

    def _steps_since(self, rows_R: Ints) -> Ints:
        """Returns how many steps rows have had since their last guess; below 0 for rows without one."""
        table, guessed_R = self._table, self._guessed[rows_R]
        return np.where(guessed_R < 0, -1, table.num_known[rows_R] - table.num_accepted[rows_R] - guessed_R)

    def _follow(self, rows_R: Ints) -> None:
        """Finds out about rows that are new here."""
        lives = self._table.lives
        if len(self._read) < len(lives):
            more = len(lives) - len(self._read)
            self._read, self._ahead = (np.append(held, np.zeros(more, np.int64)) for held in (self._read, self._ahead))
            never = np.full(more, NEVER, np.int64)
            self._guessed, self._lives = (np.append(held, never) for held in (self._guessed, self._lives))
        for row in rows_R[self._lives[rows_R] != lives[rows_R]].tolist():
            self._read[row] = min(self._found(row), int(self._table.num_known[row]) - 1)
            self._guessed[row], self._ahead[row] = NEVER, 0
        self._lives[rows_R] = lives[rows_R]

    def _found(self, row: int) -> int:
        """Returns how many of a row's first tokens the draft has read, as the row's blocks say."""
        first = self.first_held(row)
        filled = self._kv.drafted[self._blocks(row)[first:, 0]]
        is_full = filled >= self._table.block_size
        whole = len(filled) if is_full.all() else int(is_full.argmin())
        return (first + whole) * self._table.block_size + (max(0, int(filled[whole])) if whole < len(filled) else 0)

    def _blocks(self, row: int) -> Ints:
        """Returns the row's blocks of the groups of the draft's layers, [blocks, groups]; below 0 for those that a
        window has given back, which are the first ones."""
        table, groups = self._table, len(self._table.windows)
        ids = table.block_ids[row, : table.num_blocks[row] * groups].reshape(-1, groups)
        return ids[:, self._groups].astype(np.int64)


def held(tensors: StepTensors) -> StepTensors:
    """Returns a pass's tensors with another block of the row in place of each that a window has given back: the first
    tokens that are read of a row see ahead of them, where there is nothing."""

    def own(table_RN: torch.Tensor) -> torch.Tensor:
        return torch.where(table_RN < 0, table_RN.amax(1, keepdim=True), table_RN)

    further = tuple(group._replace(block_table_RN=own(group.block_table_RN)) for group in tensors.further_groups)
    return tensors._replace(block_table_RN=own(tensors.block_table_RN), further_groups=further)
