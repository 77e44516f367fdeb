"""The bytes of the paged KV cache on one rank: allocation, clean blocks, and copies for copy-on-write.

Called by loading.py and model_runner.py. Which block belongs to whom is the coordinator's business. Layout per layer:
[num_blocks, block_size, num_local_kv_heads, head_dim], keys and values apart.
"""

import mmap
from dataclasses import dataclass

import torch

from workers.attention.backend import KVTensors


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block on this rank: keys and values of all its layers."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """One slab [2 * layers, num_blocks, block_size, K, D], and `tensors`, the same memory cut by layer."""

    slab: torch.Tensor
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
        shape = (2 * num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        if device.type == "cpu":
            num_bytes = num_blocks * block_bytes(num_layers, block_size, num_kv_heads, head_dim, dtype)
            slab = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
        else:
            slab = torch.zeros(shape, dtype=dtype, device=device)
        return cls(slab, KVTensors(list(slab[:num_layers]), list(slab[num_layers:]), block_size))

    @property
    def planes(self) -> list[torch.Tensor]:
        """All memory of the cache, layer by layer, keys before values: dim 0 of each is the block."""
        return [plane for pair in zip(self.tensors.keys, self.tensors.values, strict=True) for plane in pair]

    def clear(self, block_ids: list[int]) -> None:
        """Zeroes blocks that a row gets to write.

        Attention may read a block's unused slots and weigh them with 0, and 0 x NaN is NaN: what a failed row left must
        not reach the next owner. Costs as much as the write of the KV itself; on CPU a loop beats one indexed fill.
        """
        if self.slab.device.type == "cpu":
            for block_id in block_ids:
                self.slab[:, block_id].zero_()
        elif block_ids:
            self.slab.index_fill_(1, torch.tensor(block_ids, device=self.slab.device), 0)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination); every source is read before any destination is written."""
        if pairs:
            indices = torch.tensor(pairs, dtype=torch.int64, device=self.slab.device)
            self.slab[:, indices[:, 1]] = self.slab[:, indices[:, 0]]
