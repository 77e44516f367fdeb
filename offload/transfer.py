"""Copies KV blocks between the device's planes and a host slab. Used by workers/rank/kv_mover.py on its own thread.

A slot holds one block of every plane, one after the other in the planes' order (layer by layer): the scattered pieces
of a block on the device are one contiguous stretch in the slab. On CPU each piece is one memcpy, which lets other
threads run; on CUDA pieces are gathered on the device into a staging buffer, on a stream of their own, so that each
block crosses the link in one copy. B blocks of a ticket.
"""

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

STAGING_BLOCKS = 32


class BlockCopier(Protocol):
    """Moves whole blocks; returns when the bytes have arrived."""

    slot_bytes: int

    def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Device to host. What wrote the blocks must have run."""
        ...

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Host to device. Nobody else uses the blocks meanwhile."""
        ...


def make_copier(planes: Sequence[torch.Tensor], slab_SB: torch.Tensor) -> BlockCopier:
    """planes: tensors whose dim 0 is the block, contiguous per block; slab: uint8 [slots, slot bytes]."""
    return CudaCopier(planes, slab_SB) if planes[0].is_cuda else CpuCopier(planes, slab_SB)


def bytes_per_slot(planes: Sequence[torch.Tensor]) -> int:
    """What one block takes over all planes."""
    return sum(_piece_bytes(plane) for plane in planes)


def _piece_bytes(plane: torch.Tensor) -> int:
    assert plane[0].is_contiguous(), "a block of a plane is one stretch of memory"
    return int(plane[0].numel() * plane.element_size())


class CpuCopier:
    """memcpy, piece by piece, without the interpreter's lock while bytes move."""

    def __init__(self, planes: Sequence[torch.Tensor], slab_SB: torch.Tensor) -> None:
        self.slot_bytes = bytes_per_slot(planes)
        self._memory = (list(planes), slab_SB)  # keeps what the addresses point to
        self._slab = slab_SB.data_ptr()
        self._planes = [(p.data_ptr(), p.stride(0) * p.element_size(), _piece_bytes(p)) for p in planes]
        self._copy = ctypes.CDLL(None).memcpy
        self._copy.restype = ctypes.c_void_p
        self._copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        copy, offset = self._copy, 0
        for base, stride, size in self._planes:
            for block_id, slot in zip(block_ids, slots, strict=True):
                copy(self._slab + slot * self.slot_bytes + offset, base + block_id * stride, size)
            offset += size

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        copy, offset = self._copy, 0
        for base, stride, size in self._planes:
            for block_id, slot in zip(block_ids, slots, strict=True):
                copy(base + block_id * stride, self._slab + slot * self.slot_bytes + offset, size)
            offset += size


class CudaCopier:
    """Gather or scatter on the device, one contiguous copy a block over the link, on a stream of its own."""

    def __init__(self, planes: Sequence[torch.Tensor], slab_SB: torch.Tensor) -> None:
        self.slot_bytes = bytes_per_slot(planes)
        self._device = planes[0].device
        self._planes = [plane.view(plane.shape[0], -1).view(torch.uint8) for plane in planes]
        self._slab_SB = slab_SB
        self._stream = torch.cuda.Stream(self._device)
        self._staging_BB = torch.empty(STAGING_BLOCKS, self.slot_bytes, dtype=torch.uint8, device=self._device)

    def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for start in range(0, len(slots), STAGING_BLOCKS):
                part = slots[start : start + STAGING_BLOCKS]
                index_B = torch.tensor(block_ids[start : start + STAGING_BLOCKS], device=self._device)
                for plane, piece in self._pieces(len(part)):
                    piece.copy_(plane.index_select(0, index_B))
                for place, slot in enumerate(part):
                    self._slab_SB[slot].copy_(self._staging_BB[place], non_blocking=True)
            self._stream.synchronize()

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for start in range(0, len(slots), STAGING_BLOCKS):
                part = slots[start : start + STAGING_BLOCKS]
                for place, slot in enumerate(part):
                    self._staging_BB[place].copy_(self._slab_SB[slot], non_blocking=True)
                index_B = torch.tensor(block_ids[start : start + STAGING_BLOCKS], device=self._device)
                for plane, piece in self._pieces(len(part)):
                    plane.index_copy_(0, index_B, piece)
            self._stream.synchronize()

    def _pieces(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each plane beside its part of the staging buffer, [count, piece bytes]."""
        pairs, offset = [], 0
        for plane in self._planes:
            pairs.append((plane, self._staging_BB[:count, offset : offset + plane.shape[1]]))
            offset += plane.shape[1]
        return pairs
