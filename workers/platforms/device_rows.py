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
UNLIMITED: Final = 1 << 40
"""In place of a window, where a token sees all before it."""


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
        columns, size, count = self._columns, self._columns.block_size, len(self._columns.windows)
        width = int(-(-rows.end_R.max() // size))
        ids = columns.block_ids.reshape(len(columns.block_ids), -1, count)
        tables_RNG = own_blocks(columns, ids[rows.rows_R, :width], rows)
        if count == 1:
            slots_T = ids[row_T, block_T, 0].astype(np.int64) * size + offset_T
            return [GroupTable(torch.from_numpy(slots_T), torch.from_numpy(np.ascontiguousarray(tables_RNG[..., 0])))]
        slots_GT = ids[row_T, block_T].T.astype(np.int64, order="C") * size + offset_T
        tables_GRN = np.ascontiguousarray(np.moveaxis(tables_RNG, 2, 0))
        return [
            GroupTable(*pair) for pair in zip(torch.from_numpy(slots_GT), torch.from_numpy(tables_GRN), strict=True)
        ]


def own_blocks(columns: Columns, tables_RNG: npt.NDArray[np.int32], rows: StepRows) -> npt.NDArray[np.int32]:
    """Returns the block tables of a step's rows in each group of layers; a row repeats a block of its own in place of
    those behind its end and those ahead of its first query's window, which may be another row's by now.

    Attention may read what it then weighs with 0, and 0 x NaN is NaN: a failed row must not harm others.
    """
    place_N1 = np.arange(tables_RNG.shape[1])[:, None]
    own_RN1 = place_N1 < columns.num_blocks[rows.rows_R, None, None]
    if columns.windows == (None,):
        return np.where(own_RN1, tables_RNG, tables_RNG[:, :1])
    windows_G = np.array([UNLIMITED if window is None else window for window in columns.windows])
    first_R1G = np.maximum(0, rows.begin_R[:, None, None] + 1 - windows_G) // columns.block_size
    fill_R1G = np.take_along_axis(tables_RNG, first_R1G, 1)
    return np.where(own_RN1 & (place_N1 >= first_R1G), tables_RNG, fill_R1G)
