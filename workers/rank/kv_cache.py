"""The bytes of the paged KV cache on one rank: allocation, clean blocks, and copies for copy-on-write.

Called by loading.py and model_runner.py. The coordinator assigns blocks to sequences. A layer has the planes of its
KVLayout, each [num_blocks, block_size, heads, dim]; a quantized cache (int8, fp8 e4m3) also has one float32 scale per
token and head of a plane, [num_blocks, block_size, heads].
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.backend import KVTensors
from tandem.workers.kernels.kv_store import LARGEST, SCALE_DTYPE, LayerKV, as_indexable
from tandem.workers.models.spec.kv_layout import KVLayout, block_layouts, planes_of
from tandem.workers.platforms.base import Platform


def block_bytes(layouts: Sequence[KVLayout], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block on this rank: the planes of all its layers, or of a group's, with their scales where dtype
    needs some."""
    scale_bytes = SCALE_DTYPE.itemsize if dtype in LARGEST else 0
    planes = [plane for layout in block_layouts(layouts) for plane in layout.planes]
    return block_size * sum(plane.heads * (plane.dim * dtype.itemsize + scale_bytes) for plane in planes)


@dataclass(frozen=True, slots=True)
class KVCache:
    """One slab [planes, num_blocks, block_size, heads, dim] in the storage dtype for all planes of one shape; scales
    [planes, num_blocks, block_size, heads] beside each where it is quantized; and `tensors`, the same memory by
    layer. Where layers have several groups, the i-th layers of all groups share their planes. pages: the memory without
    such repetitions; page_of: the page of each layer. draft: the layers of a draft model, in the same blocks behind the
    model's; draft_pages: their pages. drafted: int32 [num_blocks], how many tokens of a block, from its first on, have
    KV of the draft model, as far as this rank knows, or NOT_KNOWN."""

    slabs: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...]
    tensors: KVTensors
    pages: tuple[LayerKV, ...]
    page_of: tuple[int, ...]
    platform: Platform
    draft: KVTensors
    draft_pages: tuple[int, ...]
    drafted: npt.NDArray[np.int32]

    @classmethod
    def allocate(
        cls,
        layouts: Sequence[KVLayout],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        platform: Platform,
        of_draft: Sequence[KVLayout] = (),
    ) -> "KVCache":
        """Zeroed, with the platform's scratch blocks behind the others. layouts: of this rank's layers; of_draft: of
        those of its draft model. On CPU pages are taken from the system only when a block is first written."""
        own, layouts = len(layouts), (*layouts, *of_draft)
        in_blocks, page_of = block_layouts(layouts), planes_of(layouts)
        counts = Counter(plane for layout in in_blocks for plane in layout.planes)
        room = (num_blocks + platform.scratch_blocks, block_size)
        slabs = {
            plane: platform.zeros((count, *room, plane.heads, plane.dim), dtype) for plane, count in counts.items()
        }
        scales = (
            {plane: platform.zeros((count, *room, plane.heads), SCALE_DTYPE) for plane, count in counts.items()}
            if dtype in LARGEST
            else {}
        )
        left = {plane: iter(range(count)) for plane, count in counts.items()}
        pages = []
        for layout in in_blocks:
            places = [(plane, next(left[plane])) for plane in layout.planes]
            own_scales = [scales[plane][place] for plane, place in places] if scales else []
            pages.append(LayerKV.of([slabs[plane][place] for plane, place in places], own_scales))
        layers = [
            LayerKV.of(pages[page].planes, pages[page].scales, layout.group)
            for layout, page in zip(layouts, page_of, strict=True)
        ]
        scratch_block = num_blocks if platform.scratch_blocks else -1
        tensors, draft = (KVTensors(part, block_size, scratch_block) for part in (layers[:own], layers[own:]))
        memory = tuple(slabs.values()), tuple(scales.values()), tensors, tuple(pages), page_of[:own], platform
        return cls(*memory, draft, page_of[own:], np.zeros(room[0], np.int32))

    @property
    def slab(self) -> torch.Tensor:
        """The slab of a cache whose planes all have one shape."""
        (slab,) = self.slabs
        return slab

    @property
    def dtype(self) -> torch.dtype:
        return self.slabs[0].dtype

    @property
    def layers(self) -> list[list[torch.Tensor]]:
        """All memory of the cache by layer (of several groups: by page), as tensors [num_blocks, ...], contiguous per
        block: the layer's planes, then their scales where it is quantized."""
        return [[*kv.planes, *kv.scales] for kv in self.pages]

    @property
    def planes(self) -> list[torch.Tensor]:
        """The same in one list."""
        return [plane for layer in self.layers for plane in layer]

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memories())

    def clear(self, block_ids: list[int]) -> None:
        """Zeroes blocks that a row will write.

        Attention may read a block's unused slots and weigh them with 0, and 0 x NaN is NaN: what a failed row left must
        not reach the next owner. Costs as much as the write of the KV itself.
        """
        if block_ids:
            self.drafted[block_ids] = 0
            for memory in self._memories():
                self.platform.clear_blocks(memory, block_ids)

    def clear_slots(self, slots: npt.NDArray[np.int64]) -> None:
        """Zeroes slots (block id * block size + offset), for the same reason: a failed step may have left NaN there. A
        draft has read a block up to the first of them at most: it may have read on behind a step that failed."""
        if len(slots):
            block_N, offset_N = np.divmod(slots, self.tensors.block_size)
            np.minimum.at(self.drafted, block_N, offset_N.astype(np.int32))
            self.clear_on_device(self.platform.accelerator.to_device(torch.from_numpy(slots)))

    def clear_on_device(self, slots: torch.Tensor) -> None:
        """Clear slots that are on the device."""
        for memory in self._memories():
            memory.flatten(1, 2).index_fill_(1, slots, 0)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination); every source is read before any destination is written."""
        if pairs:
            self.drafted[[target for _, target in pairs]] = self.drafted[[source for source, _ in pairs]]
            sources, targets = self.platform.accelerator.to_device(
                torch.tensor(pairs, dtype=torch.int64).T.contiguous()
            )
            found = [memory.index_select(1, sources) for memory in self._memories()]
            for memory, blocks in zip(self._memories(), found, strict=True):
                memory.index_copy_(1, targets, blocks)

    def _memories(self) -> list[torch.Tensor]:
        """Tensors with blocks in dim 1, in dtypes that can be indexed."""
        return [*map(as_indexable, self.slabs), *self.scales]
