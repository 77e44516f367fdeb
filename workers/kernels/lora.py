"""Grouped LoRA by its public names, and which implementation a device gets. Used by workers/lora and workers/rank.

What it computes is in lora_ops.py.
"""

import importlib.util

import torch

from workers.kernels.cpu_build import cpu_lora_library
from workers.kernels.cpu_lora import CpuLora
from workers.kernels.lora_ops import AdapterRows, LoraOps, SectionTables, TorchLora

__all__ = ["AdapterRows", "LoraOps", "SectionTables", "TorchLora", "select_lora_ops"]


def select_lora_ops(device: torch.device, dtype: torch.dtype) -> LoraOps:
    """Compiled on a CPU that can have it, Triton's on a GPU, torch's elsewhere."""
    if device.type == "cpu":
        library = cpu_lora_library(dtype)
        return TorchLora() if library is None else CpuLora(library)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from workers.kernels.triton_lora import TritonLora

        return TritonLora()
    return TorchLora()
