"""StepBuffer: the one copy of a step's host arrays to a device."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from tandem.offload.copies.accelerator import Accelerator, DeviceEvent
from tandem.workers.kernels.step_arrays import Array

ALIGNED_BYTES: Final = 16
"""Arrays of a packed copy begin at multiples of it, so that a kernel is compiled for one alignment of each."""
STAGING_BUFFERS: Final = 4
"""Pinned buffers in turn, at first: more than there are steps in flight, so that the host finds one that was read."""
LEAST_BYTES: Final = 1 << 16


class StepBuffer:
    """One static buffer on the device, bytes, and the pinned memory that fills it. It grows only for a step with more
    than any before."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self._accelerator = accelerator
        self._device = device
        self.on_device = torch.empty(0, dtype=torch.uint8, device=device)
        self._staging: list[torch.Tensor] = []
        self._read: list[DeviceEvent | None] = []
        self._turn = 0

    def fill(self, arrays: Sequence[Array], unseen: int = 0) -> list[torch.Tensor]:
        """Returns the arrays but for the first ones, `unseen`, as aligned views of the buffer, by one copy in the order
        of the stream. They last until the next call."""
        starts, size = places_of(arrays)
        host = self._room(size)
        packed = host.numpy()
        for array, start in zip(arrays, starts, strict=True):
            packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._accelerator.upload(host[:size], self.on_device[:size])
        self._read[self._turn] = self._accelerator.event()
        return views_of(self.on_device, arrays, unseen)

    def _room(self, size: int) -> torch.Tensor:
        """Returns the next pinned buffer, which the device has read."""
        if size > len(self.on_device) or not self._staging:
            capacity = max(LEAST_BYTES, 1 << (size - 1).bit_length())
            self.on_device = torch.empty(capacity, dtype=torch.uint8, device=self._device)
            self._staging = [self._accelerator.pinned_memory(capacity) for _ in range(STAGING_BUFFERS)]
            self._read = [None] * STAGING_BUFFERS
        self._turn = (self._turn + 1) % len(self._staging)
        last = self._read[self._turn]
        if last is not None and not last.is_done():  # more steps in flight than ever before: launching does not wait
            self._staging.insert(self._turn, self._accelerator.pinned_memory(len(self.on_device)))
            self._read.insert(self._turn, None)
        return self._staging[self._turn]


def places_of(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Returns where each array begins in a packed copy, and the bytes of all."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
    return starts, size


def views_of(memory: torch.Tensor, arrays: Sequence[Array], unseen: int = 0) -> list[torch.Tensor]:
    """Returns the arrays' places in a packed copy, bytes, as tensors of their shapes and dtypes. unseen: as in fill."""
    starts, _ = places_of(arrays)
    return [
        memory[start : start + array.nbytes].view(torch.from_numpy(array.reshape(-1)[:0]).dtype).view(array.shape)
        for array, start in zip(arrays[unseen:], starts[unseen:], strict=True)
    ]
