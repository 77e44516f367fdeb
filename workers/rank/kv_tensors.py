"""The bytes of the paged KV cache on one rank: allocation, and block copies for copy-on-write.

Called by loading.py and model_runner.py. Which block belongs to whom is the coordinator's business. Layout per layer:
[num_blocks, block_size, num_local_kv_heads, head_dim], keys and values apart.
"""

import mmap

import torch

from workers.attention.backend import KVTensors


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block on this rank: keys and values of all its layers."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def allocate(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVTensors:
    """Zeroed KV tensors. On CPU pages are taken from the system only when a block is first written."""
    shape = (2 * num_layers, num_blocks, block_size, num_kv_heads, head_dim)
    if device.type == "cpu" and num_layers:
        count = 2 * num_layers * num_blocks * block_size * num_kv_heads * head_dim
        slab = torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype).view(shape)
    else:
        slab = torch.zeros(shape, dtype=dtype, device=device)
    return KVTensors(keys=list(slab[:num_layers]), values=list(slab[num_layers:]), block_size=block_size)


def copy_blocks(kv: KVTensors, pairs: list[tuple[int, int]]) -> None:
    """Copies whole blocks, (source, destination); every source is read before any destination is written."""
    if not pairs:
        return
    for tensor in (*kv.keys, *kv.values):
        indices = torch.tensor(pairs, dtype=torch.int64, device=tensor.device)
        tensor[indices[:, 1]] = tensor[indices[:, 0]]
