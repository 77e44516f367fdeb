"""DeviceRows in a device's own memory: last tokens, counts and block tables as tensors, one packed copy per step.

The copy holds the step's rows, the tokens that the host knows, and what changed in the columns since the device last
saw these rows; ids, positions and slots are derived on the device. A copy of the columns on the host says what the
device has, so that no change can be missed, whatever made it. T tokens, R rows of a step, S tokens that are sampled, N
blocks of the longest row.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tandem.offload.copies.accelerator import Accelerator, Event
from tandem.workers.attention.forward_batch import GroupTable
from tandem.workers.platforms.device_rows import Columns, Ints, StepRows, StepTensors

Array = npt.NDArray[np.generic]
ALIGNED_BYTES: Final = 16
"""Arrays of a packed copy begin at multiples of it, so that a kernel is compiled for one alignment of each."""
STAGING_BUFFERS: Final = 4
"""Pinned buffers in turn, at first: more than there are steps in flight, so that the host finds one that was read."""
LEAST_BYTES: Final = 1 << 16
UNKNOWN: Final = -1
"""In place of a count or a block id on the device."""


class StepBuffer:
    """One static buffer on the device and the pinned memory that fills it. It grows only for a step with more than any
    before."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self._accelerator = accelerator
        self._device = device
        self._on_device = torch.empty(0, dtype=torch.uint8, device=device)
        self._staging: list[torch.Tensor] = []
        self._read: list[Event | None] = []
        self._turn = 0

    def fill(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Returns int64 and int32 arrays as aligned views of the buffer, by one copy in the order of the stream. They
        last until the next call."""
        starts, size = [], 0
        for array in arrays.values():
            starts.append(size)
            size += -(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        host = self._room(size)
        packed = host.numpy()
        for array, start in zip(arrays.values(), starts, strict=True):
            packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._accelerator.upload(host[:size], self._on_device[:size])
        self._read[self._turn] = self._accelerator.event()
        return {
            name: self._on_device[start : start + array.nbytes]
            .view(torch.from_numpy(array.reshape(-1)[:0]).dtype)
            .view(array.shape)
            for (name, array), start in zip(arrays.items(), starts, strict=True)
        }

    def _room(self, size: int) -> torch.Tensor:
        """Returns the next pinned buffer, which the device has read."""
        if size > len(self._on_device):
            capacity = max(LEAST_BYTES, 1 << (size - 1).bit_length())
            self._on_device = torch.empty(capacity, dtype=torch.uint8, device=self._device)
            self._staging = [self._accelerator.pinned_memory(capacity) for _ in range(STAGING_BUFFERS)]
            self._read = [None] * STAGING_BUFFERS
        self._turn = (self._turn + 1) % len(self._staging)
        last = self._read[self._turn]
        if last is not None and not last.is_done():  # more steps in flight than ever before: launching does not wait
            self._staging.insert(self._turn, self._accelerator.pinned_memory(len(self._on_device)))
            self._read.insert(self._turn, None)
        return self._staging[self._turn]


class TensorRows:
    """The rows. _known, _blocks: what the device's tensors hold or will when the work given so far has run."""

    def __init__(self, columns: Columns, accelerator: Accelerator, device: torch.device) -> None:
        self._columns = columns
        self._device = device
        self._buffer = StepBuffer(accelerator, device)
        self._known = np.zeros_like(columns.num_known)
        self._blocks = np.zeros_like(columns.block_ids)
        self._last_token = torch.zeros(len(self._known), dtype=torch.int64, device=device)
        self._num_known = torch.zeros_like(self._last_token)
        self._block_ids = torch.zeros(self._blocks.shape, dtype=torch.int32, device=device)
        self._sampled: tuple[Ints, torch.Tensor] | None = None

    def step(self, rows: StepRows) -> StepTensors:
        try:
            return self._step(rows)
        except torch.OutOfMemoryError:
            self._forget()
            raise

    def append(self, ids_S: torch.Tensor) -> bool:
        assert self._sampled is not None, "no step has sampled"
        rows, rows_S = self._sampled
        try:
            self._last_token.index_copy_(0, rows_S, ids_S)
            self._num_known.index_add_(0, rows_S, torch.ones_like(rows_S))
        except torch.OutOfMemoryError:
            self._forget()
            return False
        self._known[rows] += 1
        return True

    def _step(self, rows: StepRows) -> StepTensors:
        columns, size = self._columns, self._columns.block_size
        if len(columns.num_known) > len(self._known):
            self._grow()
        width = int(-(-rows.end_R.max() // size))
        counts = self._changed_counts(rows.rows_R)
        blocks = self._changed_blocks(rows.rows_R, width * len(columns.windows))
        place_T = np.repeat(np.arange(len(rows.rows_R)), rows.lens_R)
        positions_T = np.arange(rows.starts[-1]) + (rows.begin_R - rows.starts[:-1])[place_T]
        arrays: dict[str, Array] = {
            "ids_T": columns.token_ids[rows.rows_R[place_T], positions_T].astype(np.int64),
            "place_T": place_T,
            "rows_R": rows.rows_R,
            "back_R": columns.num_known[rows.rows_R] - rows.begin_R,
            "num_blocks_R": columns.num_blocks[rows.rows_R],
            "logits_rows_S": rows.logits_rows_S,
            "sample_rows_S": rows.sample_rows_S,
            "starts": rows.starts.astype(np.int32),
            "steps_T": np.arange(rows.starts[-1]) - rows.starts[:-1][place_T],
            "lens_R": rows.lens_R.astype(np.int32),
            "count_rows": counts,
            "counts": self._known[counts],
            "block_places": blocks,
            "blocks": self._blocks.reshape(-1)[blocks],
        }
        adapters = {"slots_T": rows.slots_T, "slots_S": rows.slots_S}
        sent = self._buffer.fill(arrays | {name: slots for name, slots in adapters.items() if slots is not None})
        if len(counts):
            self._num_known.index_copy_(0, sent["count_rows"], sent["counts"])
        if len(blocks):
            self._block_ids.view(-1).index_copy_(0, sent["block_places"], sent["blocks"])
        self._sampled = rows.sample_rows_S, sent["sample_rows_S"]
        return self._derived(sent, width)

    def _forget(self) -> None:
        """The device has run out of memory in the middle: nobody knows which changes it has got."""
        self._known.fill(UNKNOWN)
        self._blocks.fill(UNKNOWN)

    def _changed_counts(self, rows_R: Ints) -> Ints:
        """Notes the counts that the host has changed; returns their rows."""
        now_R = self._columns.num_known[rows_R]
        changed = rows_R[now_R != self._known[rows_R]]
        self._known[rows_R] = now_R
        return changed

    def _changed_blocks(self, rows_R: Ints, width: int) -> Ints:
        """Notes the rows' block ids that the host has changed; returns their places in the flat table."""
        now_RN = self._columns.block_ids[rows_R, :width]
        place_R, column = np.nonzero(now_RN != self._blocks[rows_R, :width])
        self._blocks[rows_R, :width] = now_RN
        return np.asarray(rows_R[place_R] * self._blocks.shape[1] + column)

    def _derived(self, sent: Mapping[str, torch.Tensor], width: int) -> StepTensors:
        rows_R, place_T, size = sent["rows_R"], sent["place_T"], self._columns.block_size
        begin_R = self._num_known[rows_R] - sent["back_R"]
        positions_T = begin_R[place_T] + sent["steps_T"]
        ids_T = torch.where(sent["ids_T"] < 0, self._last_token[rows_R][place_T], sent["ids_T"])
        tables_RN = [self._own_blocks(group, sent, begin_R, width) for group in range(len(self._columns.windows))]
        groups = [
            GroupTable(table_RN[place_T, positions_T // size].long() * size + positions_T % size, table_RN)
            for table_RN in tables_RN
        ]
        return StepTensors(
            ids_T,
            positions_T,
            groups[0].slot_mapping_T,
            sent["starts"],
            begin_R.int() + sent["lens_R"],
            groups[0].block_table_RN,
            sent["logits_rows_S"],
            sent.get("slots_T"),
            sent.get("slots_S"),
            tuple(groups[1:]),
        )

    def _own_blocks(
        self, group: int, sent: Mapping[str, torch.Tensor], begin_R: torch.Tensor, width: int
    ) -> torch.Tensor:
        """Returns what own_blocks() of device_rows.py does, for a group."""
        window, num_groups = self._columns.windows[group], len(self._columns.windows)
        table_RN = self._block_ids[sent["rows_R"], group : width * num_groups : num_groups]
        place_N = torch.arange(width, device=self._device)
        own_RN = place_N < sent["num_blocks_R"][:, None]
        if window is None:
            return torch.where(own_RN, table_RN, table_RN[:, :1])
        first_R1 = ((begin_R - (window - 1)).clamp(min=0) // self._columns.block_size)[:, None]
        return torch.where(own_RN & (place_N >= first_R1), table_RN, table_RN.gather(1, first_R1))

    def _grow(self) -> None:
        """Follows columns that have grown: rows beyond the settings' are rare."""
        more = len(self._columns.num_known) - len(self._known)
        self._last_token, self._num_known, self._block_ids = (
            torch.cat((held, held.new_zeros((more, *held.shape[1:]))))
            for held in (self._last_token, self._num_known, self._block_ids)
        )
        self._known = np.append(self._known, np.zeros(more, np.int64))
        self._blocks = np.append(self._blocks, np.zeros((more, self._blocks.shape[1]), np.int32), axis=0)
