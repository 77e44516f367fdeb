"""Copies KV blocks between the device's planes and a host slab. The KV lane calls it on its own thread.

A plane is one of a layer's tensors, of keys, values or scales; layers may have other planes each. A slot holds one
block of every plane, one after the other in the planes' order (layer by layer), so a block that is scattered on the
device is contiguous in the slab. On CPU each piece is one memcpy, which releases the interpreter's lock. On other
devices pieces are gathered into a staging buffer on the device, on a separate stream, so that a block, and several
whose slots are consecutive, cross the link in one copy. B: blocks of a ticket.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Final, Protocol

import torch

from tandem.offload.copies.accelerator import Accelerator

STAGING_BLOCKS = 32
GROUP_BYTES = 256 * 1024
WORD: Final = torch.int64
"""Elements that a device copies at once, where memory consists of them: single bytes are slow."""
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
    """Gathers and scatters on the device, and crosses the link in copies of whole blocks or groups of layers, on a
    separate stream.

    Loads go by groups of layers of at least GROUP_BYTES a block, so that each copy is large enough for the link and the
    first layers arrive early. Its calls are few, as they take turns with those of the thread that launches steps:
    planes at equal distances are gathered as one, and many copies are one call. Arguments as of CpuCopier; the calling
    thread has activated the accelerator.
    """

    def __init__(
        self, accelerator: Accelerator, layers: Sequence[Sequence[torch.Tensor]], slab_SB: torch.Tensor
    ) -> None:
        planes, num_layers = [plane for layer in layers for plane in layer], len(layers)
        self.slot_bytes = bytes_per_slot(planes)
        self._accelerator = accelerator
        self._slab_SB = slab_SB
        self._stream = accelerator.stream()
        self._staging = torch.empty(STAGING_BLOCKS * self.slot_bytes, dtype=torch.uint8, device=planes[0].device)
        each = max(1, -(-GROUP_BYTES * num_layers // self.slot_bytes))
        self._groups = [range(first, min(first + each, num_layers)) for first in range(0, num_layers, each)]
        word = WORD if all(map(_is_of_words, planes)) else torch.uint8
        self._stacks = _stacks(planes, word)
        self._stacks_of = [_stacks([plane for at in group for plane in layers[at]], word) for group in self._groups]
        sizes = (sum(bytes_per_slot(layers[layer]) for layer in group) for group in self._groups)
        self._ends = [0, *accumulate(sizes)]

    def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        with self._copying():
            index_B = self._index(block_ids)
            for start in range(0, len(slots), STAGING_BLOCKS):
                part = slots[start : start + STAGING_BLOCKS]
                staged_BB = self._staged(len(part), self.slot_bytes)
                for own_PBX, stack_PBX in zip(_by_plane(staged_BB, self._stacks), self._stacks, strict=True):
                    index = index_B[start : start + len(part)]
                    torch.index_select(stack_PBX, 1, index, out=own_PBX)  # a result of its own could be large
                for place, run in _runs(part):
                    self._slab_SB[run].copy_(staged_BB[place : place + run.stop - run.start], non_blocking=True)

    def load(self, slots: Sequence[int], block_ids: Sequence[int], on_layer: OnLayer) -> None:
        with self._copying():
            index_B = self._index(block_ids)
            for layers, stacks, first, last in zip(
                self._groups, self._stacks_of, self._ends, self._ends[1:], strict=False
            ):
                column_SX, most = self._slab_SB[:, first:last], len(self._staging) // (last - first)
                for start in range(0, len(slots), most):
                    part = slots[start : start + most]
                    staged_BX = self._staged(len(part), last - first)
                    torch._foreach_copy_(staged_BX.unbind(), [column_SX[slot] for slot in part], non_blocking=True)
                    for own_PBX, stack_PBX in zip(_by_plane(staged_BX, stacks), stacks, strict=True):
                        stack_PBX.index_copy_(1, index_B[start : start + len(part)], own_PBX)
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
        return self._accelerator.to_device(torch.tensor(block_ids, dtype=torch.int64))

    def _staged(self, count: int, width: int) -> torch.Tensor:
        """Returns staging memory as [count, width]."""
        return self._staging[: count * width].view(count, width)


def _is_of_words(plane: torch.Tensor) -> bool:
    """Returns whether each block of a plane is made of whole WORDs."""
    sizes = (plane.data_ptr(), plane.stride(0) * plane.element_size(), _piece_bytes(plane))
    return all(size % WORD.itemsize == 0 for size in sizes)


def _stacks(planes: Sequence[torch.Tensor], word: torch.dtype) -> list[torch.Tensor]:
    """Returns the planes in order, those of one shape at equal distances in one memory as one: [planes, blocks,
    elements of a block], of dtype `word`."""
    found: list[list[torch.Tensor]] = []
    for plane in planes:
        if not found or not _go_on(found[-1], plane):
            found.append([])
        found[-1].append(plane)
    return [_stack(stack, word) for stack in found]


def _go_on(stack: Sequence[torch.Tensor], plane: torch.Tensor) -> bool:
    """Returns whether a plane is the next one of a stack."""
    last, step = stack[-1], plane.data_ptr() - stack[-1].data_ptr()
    is_like = (plane.dtype, plane.shape, plane.stride()) == (last.dtype, last.shape, last.stride())
    is_same = plane.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return is_like and is_same and step > 0 and (len(stack) == 1 or step == last.data_ptr() - stack[-2].data_ptr())


def _stack(planes: Sequence[torch.Tensor], word: torch.dtype) -> torch.Tensor:
    """Returns planes as one."""
    first, size = planes[0], planes[0].element_size()
    step = 0 if len(planes) == 1 else (planes[1].data_ptr() - first.data_ptr()) // size
    shape, strides = (len(planes), len(first), first[0].numel()), (step, first.stride(0), 1)
    return first.as_strided(shape, strides, first.storage_offset()).view(torch.uint8).view(word)


def _by_plane(staged_BB: torch.Tensor, stacks: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields staged blocks as [planes, blocks, elements] of each stack."""
    sizes = [stack_PBX[:, 0].numel() * stack_PBX.element_size() for stack_PBX in stacks]
    for stack_PBX, own_BB in zip(stacks, staged_BB.split(sizes, dim=1), strict=True):
        yield own_BB.view(stack_PBX.dtype).unflatten(1, (len(stack_PBX), -1)).transpose(0, 1)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yields runs of consecutive slots with their places among all of them."""
    start = 0
    for place in range(1, len(slots) + 1):
        if place == len(slots) or slots[place] != slots[place - 1] + 1:
            yield start, slice(slots[start], slots[place - 1] + 1)
            start = place
