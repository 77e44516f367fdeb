"""Which attention implementation a device gets. Called once by whoever builds the decoder."""

import torch

from workers.attention.backend import AttentionBackend
from workers.attention.cpu import CpuAttention
from workers.attention.torch_sdpa import TorchAttention
from workers.kernels.cpu_chunk_attention import CpuChunkAttention
from workers.kernels.cpu_decode_attention import CpuDecodeAttention


def select_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """On CPU the compiled kernels where dtype and head dim allow and a compiler is there; SDPA elsewhere."""
    if device.type == "cpu":
        kernel = CpuDecodeAttention.make(dtype, head_dim)
        if kernel is not None:
            return CpuAttention(kernel, CpuChunkAttention.make(dtype))
    return TorchAttention()
