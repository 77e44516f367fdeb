"""Copies KV blocks between the device's planes and a host slab. The KV lane calls it on its own thread.

A plane is one of a layer's tensors, of keys, values or scales; layers may have other planes each. A slot holds one
block of every plane, one after the other in the planes' order (layer by layer), so a block that is scattered on the
device is contiguous in the slab. On CPU each piece is one memcpy, which releases the interpreter's lock. On other
devices pieces are gathered into a staging buffer on the device, on a separate stream, so that each block crosses the
link in one copy. B: blocks of a ticket.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol

import torch

from tandem.offload.copies.accelerator import Accelerator

STAGING_BLOCKS = 32
GROUP_BYTES = 256 * 1024
OnLayer = Callable[[int], None]


class BlockCopier(Protocol):
    """Copies whole blocks; its methods return when the bytes have arrived."""

    slot_bytes: int

    def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copies blocks from the device to slots. The kernels that write the blocks must have finished."""
        ...

    def load(self, slots: Sequence[int], block_ids: Sequence[int], on_layer: OnLayer) -> None:
        """Copies slots to blocks on the device, layer by layer. Nothing else may use the blocks meanwhile.

        on_layer(i) is called in order of i, in the stream of the copies: steps that are launched after it may use layer
        i when they wait for an event recorded there.
        """
        ...


def bytes_per_slot(planes: Sequence[torch.Tensor]) -> int:
    """Returns the bytes of one block, summed over all planes."""
    return sum(_piece_bytes(plane) for plane in planes)


def _piece_bytes(plane: torch.Tensor) -> int:
    assert plane[0].is_contiguous(), "a block of a plane is one stretch of memory"
    return int(plane[0].numel() * plane.element_size())


class CpuCopier:
    """Copies piece by piece with memcpy, which runs without the interpreter's lock.

    layers: the planes of each layer, tensors whose dim 0 is the block, contiguous per block. slab_SB: uint8 [slots,
    slot bytes].
    """

    def __init__(self, layers: Sequence[Sequence[torch.Tensor]], slab_SB: torch.Tensor) -> None:
        planes = [plane for layer in layers for plane in layer]
        self.slot_bytes = bytes_per_slot(planes)
        self._ends = {last: layer for layer, last in enumerate(accumulate(map(len, layers)))}
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

    def load(self, slots: Sequence[int], block_ids: Sequence[int], on_layer: OnLayer) -> None:
        copy, offset = self._copy, 0
        for number, (base, stride, size) in enumerate(self._planes, 1):
            for block_id, slot in zip(block_ids, slots, strict=True):
                copy(base + block_id * stride, self._slab + slot * self.slot_bytes + offset, size)
            offset += size
            if number in self._ends:
                on_layer(self._ends[number])


class StreamCopier:
    """Gathers and scatters on the device and makes few copies per block over the link, on a separate stream.

    Loads go by groups of layers of at least GROUP_BYTES a block, so that each copy is large enough for the link and the
    first layers arrive early. Arguments as of CpuCopier; the calling thread has activated the accelerator.
    """

    def __init__(
        self, accelerator: Accelerator, layers: Sequence[Sequence[torch.Tensor]], slab_SB: torch.Tensor
    ) -> None:
        planes, num_layers = [plane for layer in layers for plane in layer], len(layers)
        self.slot_bytes = bytes_per_slot(planes)
        self._accelerator = accelerator
        self._planes = [plane.view(torch.uint8).view(plane.shape[0], -1) for plane in planes]
        self._slab_SB = slab_SB
        self._stream = accelerator.stream()
        self._staging_BB = torch.empty(STAGING_BLOCKS, self.slot_bytes, dtype=torch.uint8, device=planes[0].device)
        starts = [0, *accumulate(map(len, layers))]
        layers_per_group = max(1, -(-GROUP_BYTES * num_layers // self.slot_bytes))
        self._groups = [
            range(first, min(first + layers_per_group, num_layers)) for first in range(0, num_layers, layers_per_group)
        ]
        self._planes_of = [range(starts[g.start], starts[g.stop]) for g in self._groups]
        sizes = [plane.shape[1] for plane in self._planes]
        self._offsets = [sum(sizes[:number]) for number in range(len(sizes) + 1)]

    def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        with self._copying():
            for start in range(0, len(slots), STAGING_BLOCKS):
                part = slots[start : start + STAGING_BLOCKS]
                index_B = self._index(block_ids[start : start + STAGING_BLOCKS])
                for number, plane in enumerate(self._planes):
                    self._piece(len(part), number).copy_(plane.index_select(0, index_B))
                for place, slot in enumerate(part):
                    self._slab_SB[slot].copy_(self._staging_BB[place], non_blocking=True)

    def load(self, slots: Sequence[int], block_ids: Sequence[int], on_layer: OnLayer) -> None:
        with self._copying():
            for layers, planes in zip(self._groups, self._planes_of, strict=True):
                first, last = self._offsets[planes.start], self._offsets[planes.stop]
                for start in range(0, len(slots), STAGING_BLOCKS):
                    part = slots[start : start + STAGING_BLOCKS]
                    for place, slot in enumerate(part):
                        self._staging_BB[place, first:last].copy_(self._slab_SB[slot, first:last], non_blocking=True)
                    index_B = self._index(block_ids[start : start + STAGING_BLOCKS])
                    for number in planes:
                        self._planes[number].index_copy_(0, index_B, self._piece(len(part), number))
                for layer in layers:
                    on_layer(layer)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """On the copier's stream; at the end, also after an error, its copies have ended: blocks and slots are free."""
        with self._accelerator.use(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return self._accelerator.to_device(torch.tensor(block_ids))

    def _piece(self, count: int, number: int) -> torch.Tensor:
        """Returns a plane's part of the staging buffer, [count, piece bytes]."""
        return self._staging_BB[:count, self._offsets[number] : self._offsets[number + 1]]
