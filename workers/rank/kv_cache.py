"""The bytes of the paged KV cache on one rank: allocation, clean blocks, and copies for copy-on-write.

Called by loading.py and model_runner.py. The coordinator assigns blocks to sequences. Layout per layer:
[num_blocks, block_size, num_local_kv_heads, head_dim], keys and values apart; a quantized cache (int8, fp8 e4m3) also
has one float32 scale per token and head, [num_blocks, block_size, num_local_kv_heads].
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.backend import KVTensors
from tandem.workers.kernels.kv_store import LARGEST, SCALE_DTYPE, LayerKV, as_indexable
from tandem.workers.platforms.base import Platform


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block on this rank: keys and values of all its layers, with their scales where dtype needs some."""
    scale_bytes = SCALE_DTYPE.itemsize if dtype in LARGEST else 0
    return 2 * num_layers * block_size * num_kv_heads * (head_dim * dtype.itemsize + scale_bytes)


@dataclass(frozen=True, slots=True)
class KVCache:
    """One slab [2 * layers, num_blocks, block_size, K, D] in the storage dtype, keys of all layers first; its scales
    [2 * layers, num_blocks, block_size, K] where it is quantized; and `tensors`, the same memory by layer."""

    slab: torch.Tensor
    scales: torch.Tensor | None
    tensors: KVTensors
    platform: Platform

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        platform: Platform,
    ) -> "KVCache":
        """Zeroed, with the platform's scratch blocks behind the others. On CPU pages are taken from the system only
        when a block is first written."""
        heads = (2 * num_layers, num_blocks + platform.scratch_blocks, block_size, num_kv_heads)
        slab = platform.zeros((*heads, head_dim), dtype)
        scales = platform.zeros(heads, SCALE_DTYPE) if dtype in LARGEST else None
        layers = [
            LayerKV(slab[key], slab[value], *(None if scales is None else scales[side] for side in (key, value)))
            for key, value in zip(range(num_layers), range(num_layers, 2 * num_layers), strict=True)
        ]
        scratch_block = num_blocks if platform.scratch_blocks else -1
        return cls(slab, scales, KVTensors(layers, block_size, scratch_block), platform)

    @property
    def planes(self) -> list[torch.Tensor]:
        """All memory of the cache as tensors [num_blocks, ...], contiguous per block, in layer order: of layer 0 keys,
        values, then key scales and value scales where it is quantized; of layer 1 the same; ..."""
        return [
            plane
            for kv in self.tensors.layers
            for plane in (kv.keys, kv.values, kv.key_scales, kv.value_scales)
            if plane is not None
        ]

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memories())

    def clear(self, block_ids: list[int]) -> None:
        """Zeroes blocks that a row will write.

        Attention may read a block's unused slots and weigh them with 0, and 0 x NaN is NaN: what a failed row left must
        not reach the next owner. Costs as much as the write of the KV itself.
        """
        if block_ids:
            for memory in self._memories():
                self.platform.clear_blocks(memory, block_ids)

    def clear_slots(self, slots: npt.NDArray[np.int64]) -> None:
        """Zeroes slots (block id * block size + offset), for the same reason: a failed step may have left NaN there."""
        if len(slots):
            at = self.platform.accelerator.to_device(torch.from_numpy(slots))
            for memory in self._memories():
                memory.flatten(1, 2).index_fill_(1, at, 0)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination); every source is read before any destination is written."""
        if pairs:
            sources, targets = self.platform.accelerator.to_device(
                torch.tensor(pairs, dtype=torch.int64).T.contiguous()
            )
            found = [memory.index_select(1, sources) for memory in self._memories()]
            for memory, blocks in zip(self._memories(), found, strict=True):
                memory.index_copy_(1, targets, blocks)

    def _memories(self) -> list[torch.Tensor]:
        """Tensors with blocks in dim 1, in dtypes that can be indexed."""
        slab = as_indexable(self.slab)
        return [slab] if self.scales is None else [slab, self.scales]
