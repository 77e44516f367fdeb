"""The platform of ranks on CPU with --batch-invariant: its implementations compute rows independently.

Every product, attention and activation of a token then depends on that token's own numbers and position alone, so the
logits of a sequence have the same bits whatever its batch mates, chunks, prefix hits and preemptions are. Norms,
rotations, the KV store and sampling work row by row as it is (decision 038). Where a kernel is missing the start fails:
torch computes some rows otherwise than others.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from tandem.configs.errors import SettingsError
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import LinearMethod, MakeMethod, Place, as_given
from tandem.parallel.params import Param, Scheme
from tandem.parallel.quantization.coded import CodedMethod
from tandem.parallel.quantization.int8 import Int8Method
from tandem.parallel.quantization.side_by_side import by_scheme
from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.attention.cpu_paged import CpuAttention
from tandem.workers.attention.latents.cpu_latents import CpuLatents
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
from tandem.workers.kernels.cpu.cpu_fused_ops import CpuFusedOps
from tandem.workers.kernels.cpu.cpu_kv_quant import CpuKVStore
from tandem.workers.kernels.cpu.cpu_lora import CpuLora
from tandem.workers.kernels.cpu.cpu_skinny_gemm import skinny_gemm
from tandem.workers.kernels.expert_ops import ExpertOps
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.kernels.invariant.each_token import EachToken
from tandem.workers.kernels.invariant.row_gemm import row_methods
from tandem.workers.kernels.lora_ops import LoraOps
from tandem.workers.models.spec.arch import Mla
from tandem.workers.platforms.cpu import METHODS, CpuPlatform

FLAG = "--batch-invariant"


class InvariantCpuPlatform(CpuPlatform):
    """Ranks on CPU that compute each row alone. SettingsError where this machine or a dtype lacks a kernel."""

    def attention(self, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> AttentionBackend:
        kernel = CpuDecodeAttention.make(dtype, head_dim, kv_dtype or dtype)
        store = CpuKVStore.make(dtype, kv_dtype or dtype)
        if kernel is None or store is None:
            _required(cpu_library, dtype)
            raise SettingsError(f"there is no attention kernel for heads of {head_dim} elements", FLAG)
        return CpuAttention(kernel, store, chunk_kernel=None)

    def latent_attention(self, dtype: torch.dtype, spec: Mla, kv_dtype: torch.dtype | None = None) -> LatentBackend:
        kernel = CpuLatentAttention.make(dtype, spec.head_dim, kv_dtype or dtype)
        store = CpuKVStore.make(dtype, kv_dtype or dtype)
        if kernel is None or store is None:
            _required(cpu_library, dtype)
            raise SettingsError(f"there is no attention kernel for latents and keys of {spec.head_dim} elements", FLAG)
        return CpuLatents(kernel, store, chunk_kernel=None)

    def linear(
        self,
        weights: Sequence[Param],
        context: ParallelContext,
        /,
        place: Place = as_given,
        *,
        dtype: torch.dtype,
    ) -> LinearMethod:
        library = _required(cpu_invariant_library, dtype)

        def method_of(scheme: Scheme | None) -> MakeMethod:
            if scheme is None:
                return row_methods(library, skinny_gemm(dtype, max_rows=sys.maxsize))
            products = METHODS[type(scheme)]
            if not products.has_kernel(dtype, scheme):
                raise SettingsError(f"there is no kernel for {scheme.words} weights on this CPU", FLAG)
            return partial(_no_twin, products.make(dtype, scheme))

        return by_scheme(method_of)(weights, context, place=place)

    def packs(self, dtype: torch.dtype) -> bool:
        return True

    def experts(self, dtype: torch.dtype, place: Place = as_given) -> ExpertOps:
        """Return operations that take each row alone; forms of weights that they do not multiply go through linear()
        of this class."""
        _required(cpu_experts_library, dtype)
        return super().experts(dtype, place)

    def fused_ops(self, dtype: torch.dtype) -> FusedOps:
        return CpuFusedOps(_required(cpu_library, dtype))

    def lora_ops(self, dtype: torch.dtype) -> LoraOps:
        """Return operations that give long runs of an adapter's tokens to no matmul either."""
        return CpuLora(_required(cpu_lora_library, dtype), gemm_tokens=sys.maxsize, twin=EachToken())


def _no_twin(
    make: MakeMethod, weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given
) -> LinearMethod:
    """Return a method that is no twin that sums in float32; those of the others sum integers."""
    method = make(weights, context, place=place)
    if type(method) in (Int8Method, CodedMethod):
        inputs, words = weights[0].span(1, context.mesh).length, weights[0].scheme and weights[0].scheme.words
        raise SettingsError(
            f"there is no kernel for {words} weights of {inputs} inputs, as {weights[0].name} has", FLAG
        )
    return method


def _required(library: Callable[[torch.dtype], ctypes.CDLL | None], dtype: torch.dtype) -> ctypes.CDLL:
    """Return compiled kernels. SettingsError where there are none."""
    found = library(dtype)
    if found is None:
        because = ": ".join(filter(None, (obstacle(dtype), compiler_words())))
        raise SettingsError(f"it needs kernels compiled for this CPU, and {because or 'there are none'}", FLAG)
    return found
