"""Which attention implementation a device gets. Called once by whoever builds the decoder."""

import torch

from workers.attention.backend import AttentionBackend
from workers.attention.cpu import CpuAttention
from workers.attention.torch_sdpa import TorchAttention
from workers.kernels.cpu_chunk_attention import CpuChunkAttention
from workers.kernels.cpu_decode_attention import CpuDecodeAttention
from workers.kernels.cpu_kv_quant import CpuKVStore


def select_attention(
    device: torch.device, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None
) -> AttentionBackend:
    """On CPU the compiled kernels where dtypes and head dim allow and a compiler is there; SDPA elsewhere.

    kv_dtype: what the cache holds, None for `dtype`.
    """
    if device.type == "cpu":
        storage = dtype if kv_dtype is None else kv_dtype
        kernel = CpuDecodeAttention.make(dtype, head_dim, storage)
        store = CpuKVStore.make(dtype, head_dim, storage)
        if kernel is not None and store is not None:
            return CpuAttention(kernel, store, CpuChunkAttention.make(dtype))
    return TorchAttention()
