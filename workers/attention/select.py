"""Which attention implementation a device gets. Called once by whoever builds the decoder."""

import torch

from workers.attention.backend import AttentionBackend
from workers.attention.cpu import CpuAttention
from workers.attention.torch_sdpa import TorchAttention
from workers.kernels.cpu_decode_attention import CpuDecodeAttention


def select_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """On CPU the compiled kernel where it can be built for dtype and head dim; SDPA over gathered blocks elsewhere."""
    if device.type == "cpu":
        kernel = CpuDecodeAttention.make(dtype, head_dim)
        if kernel is not None:
            return CpuAttention(kernel)
    return TorchAttention()
