"""DeviceRows: a device's view of a rank's rows, from which a step's tensors come; a Protocol, and its form on CPUs.

Last tokens, counts of known tokens and block tables live on the device, so that what a step samples is read by the next
one before the host knows it (tensor_rows.py). On CPUs these are the row table's own columns, and nothing is copied.
T tokens, R rows of a step, S tokens that are sampled, N blocks of the longest row.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.forward_batch import ForwardBatch, GroupTable, OnDevice, StepCopy, StepFrame
from tandem.workers.kernels.step_arrays import Array, StepArrays

Ints = npt.NDArray[np.int64]
PENDING: Final = -1
"""Stands in token_ids for a token that was sampled and has not reached the host."""
NO_DRAFT: Final = -2
"""Stands for a draft where nothing was guessed. No sampled token equals it."""
NO_PLACE: Final = -3
"""The same behind the last token of a row, where there is no place for a draft."""

NOT_FINITE_ID: Final = -1
"""Stands for a sampled token when the logits were not finite. No draft equals it."""


class Guess(Protocol):
    """Guesses drafts on the device. All TP ranks must guess the same."""

    def __call__(
        self, tokens_QL: torch.Tensor, num_known_Q: torch.Tensor, most_Q: torch.Tensor, num_drafts: int, /
    ) -> torch.Tensor:
        """Returns num_drafts ids for each row, the next tokens in order, NO_DRAFT from the first place on for which
        nothing is guessed; int64 [Q, D]. tokens_QL: int32, of which the first num_known_Q count. most_Q: the most
        drafts of each row. Reads nothing back."""
        ...


class Columns(Protocol):
    """The host's columns of rows, as of workers/rank/row_table.py, which explains them. token_ids int32 [rows, tokens],
    block_ids int32 [rows, blocks x groups], counts int64 [rows]. windows: of each group of layers, None where a token
    sees all. told_blocks: how many of a row's first block ids are as the device was last told."""

    block_size: int
    token_ids: npt.NDArray[np.int32]
    block_ids: npt.NDArray[np.int32]
    num_known: Ints
    num_blocks: Ints
    told_blocks: Ints
    windows: tuple[int | None, ...]
    num_unread: Ints
    num_accepted: Ints
    lives: Ints


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's rows on the host. Where drafts of earlier steps are in flight, positions count one token for each of
    these steps."""

    rows_R: Ints
    begin_R: Ints  # the first position that a row computes
    end_R: Ints  # the last one + 1
    starts: Ints  # int64 [R + 1], the rows' places among the tokens
    lens_R: Ints  # their numbers of tokens
    logits_rows_S: Ints  # places of the logits
    sample_rows_S: Ints  # rows of the sampled tokens
    slots_T: npt.NDArray[np.int32] | None  # adapter slots of the tokens; None: no adapters
    slots_S: npt.NDArray[np.int32] | None  # of those sampled
    spare_R: Ints | None = None  # by how much a row may be ahead of its positions; None: no row is
    drafts: "StepDrafts | None" = None  # where rows have any
    read_rows: Ints | None = None  # rows whose tokens are read on the device (DeviceRows.tokens); None: none

    @property
    def most_R(self) -> Ints:
        """The last position + 1 that a row may compute."""
        return self.end_R if self.spare_R is None else self.end_R + self.spare_R


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts of a step, which are the last tokens of their rows."""

    most_R: Ints  # places for drafts of each row
    behind_S: npt.NDArray[np.bool_]  # behind a token that samples comes a draft of its row
    guessed: bool  # the device guesses; else they are in token_ids behind the known tokens
    guesses_QD: torch.Tensor | None = None  # what was guessed there, by Q rows; None: the rows guess


class StepTensors(NamedTuple):
    """The tensors of a ForwardBatch, and the adapter slots. drafts_S: int64, the draft behind each token that samples,
    or NO_DRAFT or NO_PLACE; None for a step without drafts."""

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slot_mapping_T: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table_RN: torch.Tensor
    logits_rows_S: torch.Tensor
    slots_T: torch.Tensor | None
    slots_S: torch.Tensor | None
    drafts_S: torch.Tensor | None = None
    further_groups: tuple[GroupTable, ...] = ()

    def batch(self, query_lens: list[int], seq_lens: list[int], block_size: int, **more: Any) -> ForwardBatch:
        """Returns them as a step's inputs. query_lens, seq_lens: as its lists. more: its fields that these lack."""
        lists = (query_lens, seq_lens, block_size)
        return ForwardBatch(*self[:7], *lists, further_groups=self.further_groups, **more)


class DeviceRows(Protocol):
    """One rank's rows on its device, made once from the row table's columns. is_ahead: the device's counts may be
    ahead of the host's, so that positions come from there. has_forgotten: it ran out of memory, and does not know what
    it has: the host must have entered all tokens before the next step is made. guesses: drafts can be guessed there."""

    is_ahead: bool
    has_forgotten: bool

    @property
    def guesses(self) -> bool: ...

    @property
    def tokens(self) -> torch.Tensor:
        """The rows' tokens, int32 [rows, tokens], once step() was called: of its read_rows the known ones, and behind
        them the drafts of this step; for others some id of the vocabulary. Where device and host have memory of their
        own, only for rows that keep their tokens."""
        ...

    def step(self, rows: StepRows, beside: StepArrays) -> StepTensors:
        """Brings the columns' changes of these rows to the device, with the arrays of other parts of the step, and
        derives the step's tensors there. All of them last until the next call."""
        ...

    def send_late(self, arrays: StepArrays) -> None:
        """Brings more arrays of this step to the device, by one copy behind the forward pass. They last until the next
        call."""
        ...

    def append(self, ids_S: torch.Tensor | None) -> bool:
        """Adds the tokens that the last step sampled to its rows, int64 [S] on the device: one each, and with drafts
        those up to the first that is not the draft in its place; None: a capture has added them. The host counts one
        for each row at once, and learns the rest later. Returns False, and raises nothing, if there is no memory for
        that: then the host must have entered them before the next step is made."""
        ...


@runtime_checkable
class FramedRows(Protocol):
    """DeviceRows whose step has parts: what comes behind its copy may be in a capture, which finds it in a frame.
    num_groups: of layers with block tables of their own."""

    num_groups: int

    def hold(self, scratch_block: int, most_guesses: int) -> tuple[int, int]:
        """Keeps the rows where they are from now on. Returns two rows of padding: one without known tokens, all of
        whose blocks are scratch_block, and one that may be written. most_guesses: of a step's drafts."""
        ...

    def pack(self, rows: StepRows) -> StepCopy[Array]:
        """Returns a step's arrays. Their changes of the columns count as brought to the device."""
        ...

    def send(
        self, rows: StepRows, packed: StepCopy[Array], beside: StepArrays, frame: StepFrame | None = None
    ) -> OnDevice:
        """Brings them to the device, as step() does, and takes the changes there. frame: gets the others."""
        ...

    def derived(self, sent: OnDevice, width: int, *, notes: bool) -> StepTensors:
        """Returns the step's tensors. width: of block tables. notes: drafts are noted for those who read tokens."""
        ...

    def expect(self, numbers: Ints, sent: OnDevice, most: int, drafts_S: torch.Tensor | None) -> None:
        """Says what append() is about: numbers: rows_B on the host; most: drafts of a row; drafts_S: as derived."""
        ...

    def add(self, sent: OnDevice, most: int, drafts_S: torch.Tensor | None, ids_S: torch.Tensor) -> None:
        """Notes every sampled token behind its row's known ones, and counts those that are accepted, on the device."""
        ...


@runtime_checkable
class PassedRows(Protocol):
    """DeviceRows over which a drafter runs ahead of the host: passes read tokens that are on the device alone."""

    @property
    def tokens(self) -> torch.Tensor: ...

    def forgetting(self) -> AbstractContextManager[None]:
        """Returns what forgets what the device has where it runs out of memory inside: nobody knows which changes it
        has got, or what a drafter has read. The host then reads all steps ahead."""
        ...

    def send_passes(self, passes: Sequence[StepRows], beside: StepArrays) -> list[OnDevice]:
        """Brings the rows of passes to the device, with arrays of their other parts and what columns of these rows have
        changed, by one copy. They last until the next call. Positions count from the device's known tokens on, which
        may be ahead by spare_R; the first pass has read_rows. Raises torch.OutOfMemoryError, and has then forgotten."""
        ...

    def pass_tensors(
        self, sent: OnDevice, width: int, begin_R: torch.Tensor | None = None, behind: int = 0
    ) -> StepTensors:
        """Returns a pass's tensors. width: of block tables; begin_R: int64, the first positions, where the host does
        not know how far from the known tokens' end these are. input_ids_T are known or noted tokens, so many places
        behind the positions."""
        ...

    def known(self, rows_R: torch.Tensor) -> torch.Tensor:
        """Returns how many tokens of rows the device knows."""
        ...

    def note_guesses(self, rows_Q: torch.Tensor, place: int, ids_Q: torch.Tensor) -> None:
        """Notes a guess of each row, so many places behind its known tokens; NO_DRAFT as some token."""
        ...


class HostRows:
    """The columns themselves: tokens are there before the next step is made."""

    is_ahead = has_forgotten = guesses = False

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    @property
    def tokens(self) -> torch.Tensor:
        return torch.from_numpy(self._columns.token_ids)

    def step(self, rows: StepRows, beside: StepArrays) -> StepTensors:
        self.send_late(beside)
        columns, size = self._columns, self._columns.block_size
        lens_R = rows.lens_R
        if rows.starts[-1] == len(lens_R):  # one token each
            row_T, positions_T = rows.rows_R, rows.begin_R
        else:
            row_T = np.repeat(rows.rows_R, lens_R)
            positions_T = np.arange(rows.starts[-1]) + np.repeat(rows.begin_R - rows.starts[:-1], lens_R)
        block_T, offset_T = np.divmod(positions_T, size)
        groups = self._tables(rows, row_T, block_T, offset_T)
        ids_T = columns.token_ids[row_T, positions_T].astype(np.int64)
        drafts_S = None
        if rows.drafts is not None:
            behind_S = np.minimum(rows.logits_rows_S + 1, len(ids_T) - 1)
            drafts_S = torch.from_numpy(np.where(rows.drafts.behind_S, ids_T[behind_S], NO_PLACE))
        return StepTensors(
            torch.from_numpy(ids_T),
            torch.from_numpy(positions_T),
            groups[0].slot_mapping_T,
            torch.from_numpy(rows.starts.astype(np.int32)),
            torch.from_numpy(rows.end_R.astype(np.int32)),
            groups[0].block_table_RN,
            torch.from_numpy(rows.logits_rows_S),
            None if rows.slots_T is None else torch.from_numpy(rows.slots_T),
            None if rows.slots_S is None else torch.from_numpy(rows.slots_S),
            drafts_S,
            tuple(groups[1:]),
        )

    def send_late(self, arrays: StepArrays) -> None:
        if arrays.arrays:
            arrays.arrive([torch.from_numpy(array) for array in arrays.arrays])

    def append(self, ids_S: torch.Tensor | None) -> bool:
        """The host enters them."""
        return True

    def _tables(self, rows: StepRows, row_T: Ints, block_T: Ints, offset_T: Ints) -> list[GroupTable]:
        """Returns the slots and block tables of each group of layers."""
        columns, count = self._columns, len(self._columns.windows)
        width = int(-(-rows.end_R.max() // columns.block_size))
        seen = {window: _seen(columns, rows, window, width) for window in dict.fromkeys(columns.windows)}
        ids = columns.block_ids.reshape(len(columns.block_ids), -1, count)
        slots_TG = ids[row_T, block_T].astype(np.int64) * columns.block_size + offset_T[:, None]
        slots_GT, ids_RNG = np.array(slots_TG.T, order="C"), ids[rows.rows_R, :width]
        tables = (own_blocks(ids_RNG[..., group], *seen[window]) for group, window in enumerate(columns.windows))
        return [GroupTable(*map(torch.from_numpy, pair)) for pair in zip(slots_GT, tables, strict=True)]


def _seen(
    columns: Columns, rows: StepRows, window: int | None, width: int
) -> tuple[npt.NDArray[np.bool_], Ints | None]:
    """Returns which entries of the rows' block tables a window sees [R, width], and each row's first one; None: the
    first of all."""
    place_N = np.arange(width)
    own_RN = place_N < columns.num_blocks[rows.rows_R, None]
    if window is None:
        return own_RN, None
    first_R = np.maximum(0, rows.begin_R + 1 - window) // columns.block_size
    return own_RN & (place_N >= first_R[:, None]), first_R


def own_blocks(
    table_RN: npt.NDArray[np.int32], own_RN: npt.NDArray[np.bool_], first_R: Ints | None
) -> npt.NDArray[np.int32]:
    """Returns block tables in which a row repeats its first visible block in place of those behind its end and ahead of
    its window, which may be another row's by now.

    Attention may read what it then weighs with 0, and 0 x NaN is NaN: a failed row must not harm others.
    """
    fill_R1 = table_RN[:, :1] if first_R is None else table_RN[np.arange(len(first_R)), first_R][:, None]
    return np.where(own_RN, table_RN, fill_R1)
