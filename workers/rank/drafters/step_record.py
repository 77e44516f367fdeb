"""StepRecord: what the last step has left, for heads that go on from it, by row.

A step's tensors last until the next one, in which its rows may have been freed, rolled back, or may have had drafts
rejected: what counts of a row is what the row table says has been computed.
"""

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.forward_batch import OnDevice
from tandem.workers.kernels.kv_store import NOT_KNOWN
from tandem.workers.models.step_tensors import Heard
from tandem.workers.platforms.tensor_rows import SPARE_ROWS
from tandem.workers.rank.drafters.guess_draw import DraftBlocks, DraftRows
from tandem.workers.speculation.proposer import Proposer

Ints = npt.NDArray[np.int64]
MISSED: Final = -1
REST_AFTER: Final = 64
"""Steps without drafts behind which a head reads no more, until a row has some."""


class DecodedStep(NamedTuple):
    """A step that the model has computed on this rank. rows_R, begin_R: its rows and the first position of each;
    starts: int64 [R + 1], their places among the step's tokens; heard: of these, until the next step. Of rows on a
    device that may be ahead of begin_R: positions_T, int64, the tokens' positions there; drafts_R: the rows' drafts."""

    rows_R: npt.NDArray[np.int64]
    begin_R: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    heard: Heard
    positions_T: torch.Tensor | None = None
    drafts_R: npt.NDArray[np.int64] | None = None


@runtime_checkable
class ReadsSteps(Proposer, Protocol):
    """A proposer that goes on from what the model has computed. With one stage each step calls one of propose() and
    catch_up(), then read(); with several, read(), and when the step is over one of the others, if anything is asked or
    the proposer keeps up."""

    @property
    def keeps_up(self) -> bool:
        """True while it guesses worse behind a step that it has not read, if no row of that was asked for."""
        ...

    def read(self, step: DecodedStep) -> None:
        """Takes what a step has left."""
        ...

    def catch_up(self) -> None:
        """Does what propose() does, in a step without drafts."""
        ...


class Computed(NamedTuple):
    """Rows whose tokens from begin_R to before end_R the last step has computed for good; first_R: where the first of
    these is among the step's tokens."""

    rows_R: Ints
    begin_R: Ints
    end_R: Ints
    first_R: Ints


class AheadStep(NamedTuple):
    """Rows of the last step, on a device that may be ahead of the host: which of a row's tokens are computed for good
    is known there. begin_R: the least first position, to which spare_R may come; lens_R: the row's tokens, whose first
    is at first_R among the step's; base_R, base_end_R: what was computed of it ahead of the step and behind it, without
    accepted drafts."""

    rows_R: Ints
    begin_R: Ints
    spare_R: Ints
    lens_R: Ints
    first_R: Ints
    base_R: Ints
    base_end_R: Ints


class StepRecord:
    """The last step of a rank. table: its rows."""

    def __init__(self, table: DraftRows) -> None:
        self._table = table
        self._step: DecodedStep | None = None
        self._lives_R = self._spare_R = self._base_R = np.empty(0, np.int64)

    def keep(self, step: DecodedStep) -> None:
        table, rows_R = self._table, step.rows_R
        self._step, self._lives_R = step, table.lives[rows_R].copy()
        if step.drafts_R is not None:
            self._spare_R = table.max_accepted[rows_R] - step.drafts_R
            self._base_R = step.begin_R - table.num_accepted[rows_R]

    def take(self) -> tuple[Computed, Heard] | None:
        """Returns what is kept, once; None where nothing is left of it."""
        step, self._step = self._step, None
        if step is None:
            return None
        table, rows_R = self._table, step.rows_R
        lens_R = np.diff(step.starts)
        begin_R = step.begin_R.copy()
        # drafts that were accepted ahead of the step have moved it; the host counts them when they are known
        end_R = np.minimum(table.num_computed[rows_R], begin_R + lens_R)
        alive = np.flatnonzero((table.lives[rows_R] == self._lives_R) & (end_R > begin_R))
        if not len(alive):
            return None
        return Computed(rows_R[alive], begin_R[alive], end_R[alive], step.starts[:-1][alive]), step.heard

    def take_ahead(self) -> tuple[AheadStep, Heard, torch.Tensor] | None:
        """Returns the same where the device may be ahead of the host, and the tokens' positions there."""
        step, self._step = self._step, None
        if step is None or step.positions_T is None or step.drafts_R is None:
            return None
        lens_R = np.diff(step.starts)
        alive = np.flatnonzero(self._table.lives[step.rows_R] == self._lives_R)
        if not len(alive):
            return None
        base_end_R = self._base_R + lens_R - step.drafts_R
        columns = (step.rows_R, step.begin_R, self._spare_R, lens_R, step.starts[:-1], self._base_R, base_end_R)
        return AheadStep(*(column[alive] for column in columns)), step.heard, step.positions_T


def places_read(
    known_R: torch.Tensor, sent: OnDevice, at_T: torch.Tensor, positions_T: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where the device's rows begin in what the last step has left, and the place of the last token that is
    computed for good among the tokens T that are read of it. known_R: the known tokens of the rows in `sent`; at_T: the
    tokens' places in that step, MISSED for a row's last token whose vector is kept; positions_T: of its tokens."""
    begin_R = known_R - 2
    if positions_T is not None:
        first_R = at_T[sent.starts[:-1].long().clamp(max=len(at_T) - 1)]
        begin_R = torch.where(first_R < 0, begin_R, positions_T[first_R.clamp(min=0)])
    begin_R = begin_R.clamp(min=0)  # of padding
    behind_R = (known_R - 2 - begin_R).clamp(min=0).minimum(sent.lens_R - 1)
    return begin_R, (sent.starts[:-1] + behind_R).clamp(min=0, max=len(at_T) - 1)


class LastVectors:
    """The vector behind the last token that the model has computed of each row, until it computes more of it: a row
    need not be in every step, as where adapters take turns. table: the rows; to_device: of the vectors' device."""

    def __init__(self, table: DraftRows, to_device: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._table, self._to_device = table, to_device
        self._lens = np.zeros(len(table.lives), np.int64)  # computed tokens of the row
        self._lives = np.full_like(self._lens, -1)
        self._vectors = torch.empty(0, 0)

    def hold(self, like_1H: torch.Tensor) -> None:
        """Keeps them where they are from now on, with room for rows of padding. like_1H: such a vector."""
        self._vectors = like_1H.new_zeros((len(self._table.lives) + SPARE_ROWS, like_1H.shape[1]))

    def keep(self, rows_R: Ints, lens_R: Ints, vectors_RH: torch.Tensor) -> None:
        """Takes those of rows of which so many tokens are computed: all of them, or those that has() counts."""
        self.put(self._on_device(rows_R), vectors_RH)
        self.note(rows_R, lens_R)

    def note(self, rows_R: Ints, lens_R: Ints) -> None:
        """Notes that those of rows are there, of which so many tokens are computed."""
        lives = self._table.lives
        if len(self._lens) < len(lives):
            more = len(lives) - len(self._lens)
            self._lens = np.append(self._lens, np.zeros(more, np.int64))
            self._lives = np.append(self._lives, np.full(more, -1, np.int64))
        self._lens[rows_R], self._lives[rows_R] = lens_R, lives[rows_R]

    def put(self, rows_R: torch.Tensor, vectors_RH: torch.Tensor) -> None:
        """Writes those of rows, which note() is told of. rows_R: on the device."""
        if len(self._vectors) < len(self._table.lives):
            held = self._vectors
            self._vectors = vectors_RH.new_zeros((len(self._table.lives), vectors_RH.shape[1]))
            self._vectors[: len(held)] = held if len(held) else 0
        self._vectors.index_copy_(0, rows_R, vectors_RH)

    def forget(self, rows_R: Ints) -> None:
        """Notes that those of rows are not there."""
        self._lives[rows_R] = -1

    def has(self, row: int, num_computed: int) -> bool:
        """Returns whether a row's is there, behind so many tokens."""
        if row >= len(self._lens) or self._lives[row] != self._table.lives[row]:
            return False
        return bool(self._lens[row] == num_computed)

    def of(self, rows_R: Ints) -> torch.Tensor:
        """Returns those of rows that have one [R, H]."""
        return self.at(self._on_device(rows_R))

    def at(self, rows_R: torch.Tensor) -> torch.Tensor:
        """Returns the same. rows_R: on the device."""
        return self._vectors[rows_R]

    def _on_device(self, rows_R: Ints) -> torch.Tensor:
        return self._to_device(torch.from_numpy(rows_R))


class HeadReads:
    """Counts of what a head has read of the rows of a rank. read: tokens of a row up to which it has the last ones, as
    its users count them, or MISSED; skipped: blocks of a row that it does not see; noted: tokens up to which the blocks
    know it."""

    def __init__(self, kv: DraftBlocks, table: DraftRows) -> None:
        self._kv, self._table = kv, table
        self._group = next(iter(kv.draft.layers)).group  # of windows: all layers of a head are in one
        self.read, self.skipped, self.noted = np.zeros((3, len(table.lives)), np.int64)
        self._lives = np.full_like(self.read, -1)

    def know(self, rows_R: Ints) -> npt.NDArray[np.bool_]:
        """Notes whose rows these are; returns which of them are new here."""
        lives = self._table.lives
        if len(self.read) < len(lives):
            more = np.zeros(len(lives) - len(self.read), np.int64)
            self.read, self.skipped, self.noted = (
                np.append(held, more) for held in (self.read, self.skipped, self.noted)
            )
            self._lives = np.append(self._lives, more - 1)
        is_new: npt.NDArray[np.bool_] = self._lives[rows_R] != lives[rows_R]
        self._lives[rows_R] = lives[rows_R]
        return is_new

    def lacking(self, row: int, num_tokens: int) -> int:
        """Returns the number of a row's first blocks, up to the last one of which the head has not read the greater
        part. Of a few tokens that it has not read, as the last ones of an answer, the KV is zero: worse guesses are
        less than no context."""
        size = self._table.block_size
        place_N = np.arange(-(-num_tokens // size))
        ids_N = self._blocks(np.full_like(place_N, row), place_N)
        filled_N = np.where(ids_N < 0, size, self._kv.drafted[ids_N])  # below 0: a window has given it back
        lacks_N = (filled_N != NOT_KNOWN) & (2 * filled_N < np.minimum(size, num_tokens - place_N * size))
        return int(np.flatnonzero(lacks_N).max(initial=-1)) + 1

    def note(self, rows_T: Ints, places_T: Ints) -> None:
        """Notes in the blocks that the head has read these tokens of rows."""
        block_T, offset_T = np.divmod(places_T, self._table.block_size)
        ids_T = self._blocks(rows_T, block_T)
        own = ids_T >= 0
        self._kv.drafted[ids_T[own]] = offset_T[own] + 1

    def _blocks(self, rows_N: Ints, places_N: Ints) -> Ints:
        """Returns the blocks at these places of rows."""
        groups = len(self._table.windows)
        return self._table.block_ids[rows_N, places_N * groups + self._group].astype(np.int64)
