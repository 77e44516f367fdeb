"""Names what a rank on a platform computes with, and why, by asking the platform.

Used by `tandem doctor` through workers/self_checks/.
"""

import sys
from platform import machine
from typing import NamedTuple

import torch

from tandem.parallel.linear_methods import as_given
from tandem.workers.attention.cpu_paged import CpuAttention
from tandem.workers.attention.torch_sdpa import TorchAttention
from tandem.workers.kernels.cpu.cpu_build import obstacle
from tandem.workers.kernels.cpu.cpu_experts import CpuExperts
from tandem.workers.kernels.cpu.cpu_fused_ops import CpuFusedOps
from tandem.workers.kernels.cpu.cpu_sampling import CpuSampling
from tandem.workers.kernels.cpu.cpu_skinny_gemm import skinny_gemm
from tandem.workers.kernels.expert_ops import TorchExperts
from tandem.workers.kernels.lora_ops import TorchLora
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import multiplies_by_row

NO_TRITON = "Triton, a C compiler for it or a GPU that it compiles for is missing"
HEAD_DIM = 128
"""Of most models. Others may differ in attention: the kernel takes heads of up to 256 elements."""


class PlatformChoice(NamedTuple):
    """An implementation. subject: the thing that was chosen; why: the reason, in words."""

    subject: str
    chosen: str
    why: str


def choices(platform: Platform, dtype: torch.dtype = torch.bfloat16) -> list[PlatformChoice]:
    """Returns the choices for ranks on this platform, in `dtype`."""
    return _on_cpu(platform, dtype) if platform.name == "cpu" else _on_gpu(platform, dtype)


def _on_cpu(platform: Platform, dtype: torch.dtype) -> list[PlatformChoice]:
    attention, fused = platform.attention(dtype, HEAD_DIM), platform.fused_ops(dtype)
    lora = type(platform.lora_ops(dtype))
    compiled = "kernels compiled for this CPU"
    missing = obstacle(dtype)
    instead = missing or "there is no such kernel for this machine"
    has_attention, has_fused = isinstance(attention, CpuAttention), isinstance(fused, CpuFusedOps)
    has_gemm, has_sampling = skinny_gemm(dtype) is not None, isinstance(platform.sampling_ops(), CpuSampling)
    replays = has_attention and has_fused and (has_gemm or multiplies_by_row(dtype))
    experts = platform.expert_ops(dtype)(as_given)
    has_experts = isinstance(experts, CpuExperts) and experts.has_products
    shares = platform.backend.shares_memory and sys.platform == "linux" and machine() in ("x86_64", "AMD64")
    return [
        PlatformChoice("attention", attention.name, compiled if has_attention else instead),
        PlatformChoice("fused ops", "compiled" if has_fused else "torch", compiled if has_fused else instead),
        _linear(platform, dtype, has_gemm, missing),
        PlatformChoice(
            "experts",
            "grouped products" if has_experts else "torch, expert by expert",
            compiled if has_experts else missing or "the kernel needs a CPU and a compiler with AVX512",
        ),
        PlatformChoice(
            "LoRA ops", "torch" if lora is TorchLora else "compiled", instead if lora is TorchLora else compiled
        ),
        PlatformChoice("sampling", "compiled" if has_sampling else "torch", compiled if has_sampling else instead),
        PlatformChoice(
            "collectives",
            "shared memory" if shares else platform.backend.name,
            "ranks of a stage share this node" if shares else "shared memory relies on x86's order of stores",
        ),
        PlatformChoice(
            "graphs",
            "replayed steps" if replays else "none",
            "decode steps of at most 64 rows with TP 1 consist of kernels, views and copies"
            if replays
            else f"a decode step contains operations that are no kernels{'' if missing is None else f': {missing}'}",
        ),
    ]


def _linear(platform: Platform, dtype: torch.dtype, has_gemm: bool, missing: str | None) -> PlatformChoice:
    """missing: why there are no kernels at all."""
    if has_gemm:
        return PlatformChoice("linear", "skinny GEMM, oneDNN above 64 rows", "this CPU multiplies pairs of bf16")
    if multiplies_by_row(dtype):
        reason = "this CPU multiplies no pairs of bf16, and oneDNN is slower without"
        return PlatformChoice("linear", "row GEMM", reason)
    if platform.packs(dtype):
        reason = missing or "the skinny GEMM needs a CPU and a compiler with AVX512-BF16"
        return PlatformChoice("linear", "oneDNN", reason)
    return PlatformChoice("linear", "torch", f"oneDNN packs no {str(dtype).removeprefix('torch.')} on this CPU")


def _on_gpu(platform: Platform, dtype: torch.dtype) -> list[PlatformChoice]:
    attention, lora = platform.attention(dtype, HEAD_DIM), type(platform.lora_ops(dtype))
    experts = type(platform.expert_ops(dtype)(as_given))
    return [
        PlatformChoice(
            "attention",
            attention.name,
            NO_TRITON if isinstance(attention, TorchAttention) else "Triton is installed",
        ),
        PlatformChoice("fused ops", "torch", "there are no kernels for GPUs yet"),
        PlatformChoice("linear", "cuBLAS", "weights stay as they are"),
        PlatformChoice(
            "experts",
            "torch, expert by expert" if experts is TorchExperts else "Triton",
            NO_TRITON if experts is TorchExperts else "Triton is installed",
        ),
        PlatformChoice(
            "LoRA ops",
            "torch" if lora is TorchLora else "Triton",
            NO_TRITON if lora is TorchLora else "Triton is installed",
        ),
        PlatformChoice("sampling", "torch", "there are no kernels for GPUs yet"),
        PlatformChoice("collectives", platform.backend.name, "between GPUs"),
        PlatformChoice("graphs", "CUDA graphs", "of decode steps with TP 1, padded; other steps run eagerly"),
    ]
