"""The bytes of the paged KV cache on one rank: allocation, clean blocks, and copies for copy-on-write.

Called by loading.py and model_runner.py. Which block belongs to whom is the coordinator's business. Layout per layer:
[num_blocks, block_size, num_local_kv_heads, head_dim], keys and values apart; a quantized cache (int8, fp8 e4m3) also
has one float32 scale per token and head, [num_blocks, block_size, num_local_kv_heads].
"""

import mmap
from dataclasses import dataclass

import torch

from workers.attention.backend import KVTensors
from workers.kernels.kv_quant import LARGEST, SCALE_DTYPE, LayerKV, movable


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block on this rank: keys and values of all its layers, with their scales where dtype needs some."""
    scale_bytes = SCALE_DTYPE.itemsize if dtype in LARGEST else 0
    return 2 * num_layers * block_size * num_kv_heads * (head_dim * dtype.itemsize + scale_bytes)


@dataclass(frozen=True, slots=True)
class KVCache:
    """One slab [2 * layers, num_blocks, block_size, K, D] in the storage dtype, keys of all layers first; its scales
    [2 * layers, num_blocks, block_size, K] where it is quantized; and `tensors`, the same memory cut by layer."""

    slab: torch.Tensor
    scales: torch.Tensor | None
    tensors: KVTensors

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVCache":
        """Zeroed. On CPU pages are taken from the system only when a block is first written."""
        heads = (2 * num_layers, num_blocks, block_size, num_kv_heads)
        slab = zeros((*heads, head_dim), dtype, device)
        scales = zeros(heads, SCALE_DTYPE, device) if dtype in LARGEST else None
        layers = [
            LayerKV(slab[key], slab[value], *(None if scales is None else scales[side] for side in (key, value)))
            for key, value in zip(range(num_layers), range(num_layers, 2 * num_layers), strict=True)
        ]
        return cls(slab, scales, KVTensors(layers, block_size))

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
        """Zeroes blocks that a row gets to write.

        Attention may read a block's unused slots and weigh them with 0, and 0 x NaN is NaN: what a failed row left must
        not reach the next owner. Costs as much as the write of the KV itself; on CPU a loop beats one indexed fill.
        """
        for memory in self._memories():
            if memory.device.type == "cpu":
                for block_id in block_ids:
                    memory[:, block_id].zero_()
            elif block_ids:
                memory.index_fill_(1, torch.tensor(block_ids, device=memory.device), 0)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination); every source is read before any destination is written."""
        if pairs:
            indices = torch.tensor(pairs, dtype=torch.int64, device=self.slab.device)
            for memory in self._memories():
                memory[:, indices[:, 1]] = memory[:, indices[:, 0]]

    def _memories(self) -> list[torch.Tensor]:
        """What blocks are cut from, dim 1, in dtypes that can be indexed."""
        slab = movable(self.slab)
        return [slab] if self.scales is None else [slab, self.scales]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On CPU pages of memory are taken from the system only when they are first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).view(dtype).view(shape)
