"""The platform of ranks on CPU with --batch-invariant: another's, with implementations whose rows are independent.

Every product, attention and activation of a token then depends on that token's own numbers and position alone, so the
logits of a sequence have the same bits whatever its batch mates, chunks, prefix hits and preemptions are. Norms,
rotations, the KV store and sampling work row by row as it is (decision 038). Where a kernel is missing the start fails:
torch computes some rows otherwise than others.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tandem.configs.errors import SettingsError
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import LinearMethod, MakeMethod, Place, as_given, by_weight
from tandem.parallel.params import Param
from tandem.parallel.quantization.int8 import Int8Method
from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.attention.cpu_paged import OneQueryAttention
from tandem.workers.attention.latents.cpu_latents import OneQueryLatents
from tandem.workers.attention.latents.latent_backend import LatentBackend
from tandem.workers.kernels.cpu.attention.cpu_decode_attention import CpuDecodeAttention
from tandem.workers.kernels.cpu.attention.cpu_latent_attention import CpuLatentAttention
from tandem.workers.kernels.cpu.cpu_build import (
    compiler_words,
    cpu_experts_library,
    cpu_invariant_library,
    cpu_library,
    cpu_lora_library,
    obstacle,
)
from tandem.workers.kernels.cpu.cpu_experts import cpu_experts
from tandem.workers.kernels.cpu.cpu_fused_ops import CpuFusedOps
from tandem.workers.kernels.cpu.cpu_int8_gemm import int8_kernel
from tandem.workers.kernels.cpu.cpu_kv_quant import CpuKVStore
from tandem.workers.kernels.cpu.cpu_lora import CpuLora
from tandem.workers.kernels.cpu.cpu_skinny_gemm import skinny_gemm
from tandem.workers.kernels.expert_ops import MakeExpertOps
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.kernels.invariant.each_token import EachToken
from tandem.workers.kernels.invariant.row_gemm import row_methods
from tandem.workers.kernels.lora_ops import LoraOps
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import METHODS

FLAG = "--batch-invariant"


def batch_invariant(platform: Platform) -> Platform:
    """Returns a CPU platform's copy that computes each row alone. SettingsError comes from what is asked of it later,
    where this machine or a dtype lacks a kernel."""
    assert platform.name == "cpu", "refused at the start"
    return replace(
        platform,
        packs=lambda dtype: True,
        linear_methods=_linear_methods,
        attention=_attention,
        latent_attention=_latent_attention,
        fused_ops=_fused_ops,
        expert_ops=_expert_ops,
        lora_ops=_lora_ops,
    )


def _linear_methods(dtype: torch.dtype, quantization: str | None = None) -> MakeMethod:
    library = _required(cpu_invariant_library, dtype)
    dense = row_methods(library, skinny_gemm(dtype, max_rows=sys.maxsize))
    if quantization is None:
        return dense
    if int8_kernel(dtype) is None:
        raise SettingsError(f"there is no kernel for {quantization} weights on this CPU", FLAG)
    return by_weight(_exact(METHODS[quantization](dtype)), dense)


def _exact(make: MakeMethod) -> MakeMethod:
    """Refuses the twin that sums in float32. Those of the others sum integers."""

    def make_exact(weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given) -> LinearMethod:
        method = make(weights, context, place=place)
        if type(method) is Int8Method:
            inputs = weights[0].span(1, context.mesh).length
            raise SettingsError(f"the kernel for int8 weights takes no {inputs} inputs, as {weights[0].name} has", FLAG)
        return method

    return make_exact


def _attention(dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> AttentionBackend:
    storage = dtype if kv_dtype is None else kv_dtype
    kernel = CpuDecodeAttention.make(dtype, head_dim, storage)
    if kernel is None or CpuKVStore.make(dtype, storage) is None:
        raise _no_kernel(dtype, f"heads of {head_dim}")
    return OneQueryAttention(kernel)


def _latent_attention(dtype: torch.dtype, width: int, kv_dtype: torch.dtype | None = None) -> LatentBackend:
    storage = dtype if kv_dtype is None else kv_dtype
    kernel = CpuLatentAttention.make(dtype, width, storage)
    if kernel is None or CpuKVStore.make(dtype, storage) is None:
        raise _no_kernel(dtype, f"latents and keys of {width}")
    return OneQueryLatents(kernel)


def _no_kernel(dtype: torch.dtype, what: str) -> SettingsError:
    """Return the refusal of a cache; raises the one of a machine or a dtype without any kernel."""
    _required(cpu_library, dtype)
    return SettingsError(f"there is no attention kernel for {what} elements", FLAG)


def _fused_ops(dtype: torch.dtype) -> FusedOps:
    return CpuFusedOps(_required(cpu_library, dtype))


def _expert_ops(dtype: torch.dtype, quantization: str | None = None) -> MakeExpertOps:
    """Routing, grouped products and their sum take each row alone; forms of weights that they do not multiply go
    through the linear methods from here."""
    _required(cpu_experts_library, dtype)
    return cpu_experts(dtype, quantization, _linear_methods(dtype, quantization))


def _lora_ops(dtype: torch.dtype) -> LoraOps:
    """Long runs of an adapter's tokens pass no matmul either."""
    return CpuLora(_required(cpu_lora_library, dtype), gemm_tokens=sys.maxsize, twin=EachToken())


def _required(library: Callable[[torch.dtype], ctypes.CDLL | None], dtype: torch.dtype) -> ctypes.CDLL:
    """Returns compiled kernels. SettingsError where there are none."""
    found = library(dtype)
    if found is None:
        because = ": ".join(filter(None, (obstacle(dtype), compiler_words())))
        raise SettingsError(f"it needs kernels compiled for this CPU, and {because or 'there are none'}", FLAG)
    return found
