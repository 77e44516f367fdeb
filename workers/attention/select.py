"""Which attention implementation a device gets. Called once by whoever builds the decoder."""

import torch

from workers.attention.backend import AttentionBackend
from workers.attention.cpu import TorchAttention


def select_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """The best backend for the device: torch's SDPA over gathered blocks, on CPU and on CUDA alike."""
    return TorchAttention()
