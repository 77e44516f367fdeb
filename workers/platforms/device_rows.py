"""DeviceRows: a device's view of a rank's rows, from which a step's tensors come; a Protocol, and its form on CPUs.

Last tokens, counts of known tokens and block tables live on the device, so that what a step samples is read by the next
one before the host knows it (tensor_rows.py). On CPUs these are the row table's own columns, and nothing is copied.
T tokens, R rows of a step, S tokens that are sampled, N blocks of the longest row.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.forward_batch import GroupTable

Ints = npt.NDArray[np.int64]
PENDING: Final = -1
"""Stands in token_ids for a token that was sampled and has not reached the host."""


class Columns(Protocol):
    """The host's columns of rows, as of workers/rank/row_table.py. token_ids int32 [rows, tokens], block_ids int32
    [rows, blocks x groups], counts int64 [rows]. windows: of each group of layers, None where a token sees all."""

    block_size: int
    token_ids: npt.NDArray[np.int32]
    block_ids: npt.NDArray[np.int32]
    num_known: Ints
    num_blocks: Ints
    windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's rows on the host. begin_R, end_R: the first position that a row computes, and the last + 1.
    starts: int64 [R + 1], the rows' places among the tokens. lens_R: their
    numbers of tokens. logits_rows_S: places of the logits. sample_rows_S: rows
    of the sampled tokens. slots_T, slots_S: int32, adapter slots of the tokens and of those sampled, None without
    adapters."""

    rows_R: Ints
    begin_R: Ints
    end_R: Ints
    starts: Ints
    lens_R: Ints
    logits_rows_S: Ints
    sample_rows_S: Ints
    slots_T: npt.NDArray[np.int32] | None
    slots_S: npt.NDArray[np.int32] | None


class StepTensors(NamedTuple):
    """The tensors of a ForwardBatch, and the adapter slots."""

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slot_mapping_T: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table_RN: torch.Tensor
    logits_rows_S: torch.Tensor
    slots_T: torch.Tensor | None
    slots_S: torch.Tensor | None
    further_groups: tuple[GroupTable, ...] = ()


class DeviceRows(Protocol):
    """One rank's rows on its device, made once from the row table's columns."""

    def step(self, rows: StepRows) -> StepTensors:
        """Brings the columns' changes of these rows to the device, and derives the step's tensors there. They last
        until the next call."""
        ...

    def append(self, ids_S: torch.Tensor) -> bool:
        """Adds one token to each row that the last step sampled, int64 [S] on the device; the host counts them as known
        at once, and learns their values later. Rows are distinct. Returns False, and raises nothing, if there is no
        memory for that: then the host must have entered them before the next step is made."""
        ...


class HostRows:
    """The columns themselves: tokens are there before the next step is made."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def step(self, rows: StepRows) -> StepTensors:
        columns, size = self._columns, self._columns.block_size
        lens_R = rows.lens_R
        if rows.starts[-1] == len(lens_R):  # one token each
            row_T, positions_T = rows.rows_R, rows.begin_R
        else:
            row_T = np.repeat(rows.rows_R, lens_R)
            positions_T = np.arange(rows.starts[-1]) + np.repeat(rows.begin_R - rows.starts[:-1], lens_R)
        block_T, offset_T = np.divmod(positions_T, size)
        groups = self._tables(rows, row_T, block_T, offset_T)
        return StepTensors(
            torch.from_numpy(columns.token_ids[row_T, positions_T].astype(np.int64)),
            torch.from_numpy(positions_T),
            groups[0].slot_mapping_T,
            torch.from_numpy(rows.starts.astype(np.int32)),
            torch.from_numpy(rows.end_R.astype(np.int32)),
            groups[0].block_table_RN,
            torch.from_numpy(rows.logits_rows_S),
            None if rows.slots_T is None else torch.from_numpy(rows.slots_T),
            None if rows.slots_S is None else torch.from_numpy(rows.slots_S),
            tuple(groups[1:]),
        )

    def append(self, ids_S: torch.Tensor) -> bool:
        """The host enters them."""
        return True

    def _tables(self, rows: StepRows, row_T: Ints, block_T: Ints, offset_T: Ints) -> list[GroupTable]:
        """Returns the slots and block tables of each group of layers."""
        columns, count = self._columns, len(self._columns.windows)
        width = int(-(-rows.end_R.max() // columns.block_size))
        seen = {window: _seen(columns, rows, window, width) for window in dict.fromkeys(columns.windows)}
        tables = []
        for group, window in enumerate(columns.windows):
            ids = columns.block_ids[:, group::count]
            slots_T = ids[row_T, block_T].astype(np.int64) * columns.block_size + offset_T
            table_RN = own_blocks(ids[rows.rows_R, :width], *seen[window])
            tables.append(GroupTable(torch.from_numpy(slots_T), torch.from_numpy(table_RN)))
        return tables


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
