"""The platform of ranks on CPU: compiled kernels where the CPU supports them, torch's own operations elsewhere.

Work is done when its call returns, so events and streams hold up nobody, and device memory is host memory.
"""

import ctypes
import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial

import numpy as np
import torch

from tandem.configs.environment import imitate_cpu
from tandem.offload.copies.accelerator import Event, Stream
from tandem.offload.copies.kv_copies import CpuCopier
from tandem.offload.weights.weight_copiers import InlineCopier, ThreadCopier
from tandem.offload.weights.weight_stream import Copier
from tandem.parallel.groups import GLOO
from tandem.parallel.linear_methods import MakeMethod, by_weight, can_pack, packed, plain
from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.attention.cpu_paged import CpuAttention
from tandem.workers.attention.latents.cpu_latents import CpuLatents
from tandem.workers.attention.latents.latent_backend import LatentBackend
from tandem.workers.attention.latents.torch_latents import TorchLatents
from tandem.workers.attention.torch_sdpa import TorchAttention
from tandem.workers.graphs.cpu_graphs import CpuGraphs
from tandem.workers.kernels.cpu.attention.cpu_chunk_attention import CpuChunkAttention
from tandem.workers.kernels.cpu.attention.cpu_decode_attention import CpuDecodeAttention
from tandem.workers.kernels.cpu.attention.cpu_latent_attention import CpuLatentAttention
from tandem.workers.kernels.cpu.cpu_build import (
    compiler_words,
    cpu_invariant_library,
    cpu_library,
    cpu_lora_library,
    cpu_sampling_library,
    obstacle,
)
from tandem.workers.kernels.cpu.cpu_experts import cpu_experts
from tandem.workers.kernels.cpu.cpu_fused_ops import CpuFusedOps
from tandem.workers.kernels.cpu.cpu_int8_gemm import int8_kernel, int8_methods, w8a8_methods
from tandem.workers.kernels.cpu.cpu_kv_quant import CpuKVStore
from tandem.workers.kernels.cpu.cpu_lora import CpuLora
from tandem.workers.kernels.cpu.cpu_sampling import CpuSampling
from tandem.workers.kernels.cpu.cpu_skinny_gemm import skinny_gemm
from tandem.workers.kernels.expert_ops import MakeExpertOps
from tandem.workers.kernels.fused_ops import FusedOps, TorchFusedOps
from tandem.workers.kernels.invariant.row_gemm import row_methods
from tandem.workers.kernels.lora_ops import LoraOps, TorchLora
from tandem.workers.kernels.sampling_ops import SamplingOps, TorchSampling
from tandem.workers.planning.budget import available_cores
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import HostRows

CPU = torch.device("cpu")


class Moment:
    """An Event on CPU: a time, already past."""

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Returns at once."""

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, Moment)
        return self.at_s - earlier.at_s


class HostStream:
    """The only stream on CPU."""

    def wait_event(self, event: Event) -> None:
        """Does nothing: the event is done."""

    def synchronize(self) -> None:
        """Returns at once."""


class HostAccelerator:
    """Accelerator on CPU, where the thread that calls computes."""

    def __init__(self) -> None:
        self._stream = HostStream()

    def activate(self) -> None:
        """Does nothing: every thread may compute."""

    def stream(self) -> Stream:
        return self._stream

    def current_stream(self) -> Stream:
        return self._stream

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self, *, timed: bool = False) -> Event:
        return Moment()

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def pinned_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(host)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def pin(self, memory: torch.Tensor) -> None:
        """Does nothing: copies run on threads."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Returns at once."""


def open_cpu(cpu_threads: int | None, ranks_on_node: int) -> Platform:
    """Returns the platform of a rank and sets this process's torch threads.

    Never from OMP_NUM_THREADS: Ray sets it to 1, shells to anything. ranks_on_node counts the ranks of all groups that
    the node may ever hold: a rank with threads to spare costs little, ranks with more threads than cores are slower by
    an order of magnitude.
    """
    imitate_cpu()
    torch.set_num_threads(cpu_threads or max(1, available_cores() // ranks_on_node))
    return cpu_platform(copies_beside=torch.get_num_threads() * ranks_on_node < available_cores())


def cpu_platform(*, copies_beside: bool = True) -> Platform:
    """Returns the platform with the threads as they are. copies_beside: a core is free to copy while layers compute."""
    return Platform(
        name="cpu",
        device=CPU,
        accelerator=HostAccelerator(),
        backend=GLOO,
        memory=None,
        copies_beside=copies_beside,
        packs=lambda dtype: can_pack(dtype) or multiplies_by_row(dtype),
        linear_methods=_linear_methods,
        attention=_attention,
        latent_attention=_latent_attention,
        expert_ops=_expert_ops,
        fused_ops=_fused_ops,
        lora_ops=_lora_ops,
        graphs=CpuGraphs,
        scratch_blocks=0,
        kv_copier=CpuCopier,
        weight_copier=partial(_weight_copier, copies_beside),
        rows=lambda columns, guess, keeps_tokens=False: HostRows(columns),
        zeros=_zeros,
        clear_blocks=_clear_blocks,
        copy_pages=_copy_pages,
        sampling_ops=_sampling_ops,
        kernel_notes=_kernel_notes,
    )


def _dense(dtype: torch.dtype) -> MakeMethod:
    """oneDNN packs fp32 always, bf16 and fp16 where the CPU multiplies them."""
    library = _row_library(dtype)
    if library is not None:
        return row_methods(library, None)
    return packed(skinny_gemm(dtype)) if can_pack(dtype) else plain


def multiplies_by_row(dtype: torch.dtype) -> bool:
    """Returns whether the row GEMM multiplies dense weights: bf16 on CPUs with AVX512 and without products of bf16
    pairs."""
    return _row_library(dtype) is not None


def _row_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    if dtype is not torch.bfloat16 or skinny_gemm(dtype) is not None:
        return None
    library = cpu_invariant_library(dtype)
    return library if library is not None and hasattr(library, "row_gemm_fills_registers") else None


METHODS: dict[str | None, Callable[[torch.dtype], MakeMethod]] = {
    None: _dense,
    "int8": int8_methods,
    "w8a8": w8a8_methods,
}
"""Linear methods by --quantization."""


def _linear_methods(dtype: torch.dtype, quantization: str | None = None) -> MakeMethod:
    return by_weight(METHODS[quantization](dtype), _dense(dtype))


def _attention(dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> AttentionBackend:
    storage = dtype if kv_dtype is None else kv_dtype
    kernel = CpuDecodeAttention.make(dtype, head_dim, storage)
    store, chunk_kernel = CpuKVStore.make(dtype, storage), CpuChunkAttention.make(dtype)
    if kernel is None or store is None or chunk_kernel is None:
        return TorchAttention()
    return CpuAttention(kernel, store, chunk_kernel)


def _latent_attention(dtype: torch.dtype, width: int, kv_dtype: torch.dtype | None = None) -> LatentBackend:
    storage = dtype if kv_dtype is None else kv_dtype
    kernel = CpuLatentAttention.make(dtype, width, storage)
    store, chunk_kernel = CpuKVStore.make(dtype, storage), CpuChunkAttention.make(dtype)
    if kernel is None or store is None or chunk_kernel is None:
        return TorchLatents()
    return CpuLatents(kernel, store, chunk_kernel)


def _expert_ops(dtype: torch.dtype, quantization: str | None = None) -> MakeExpertOps:
    return cpu_experts(dtype, quantization, _linear_methods(dtype, quantization))


def _fused_ops(dtype: torch.dtype) -> FusedOps:
    library = cpu_library(dtype)
    return TorchFusedOps() if library is None else CpuFusedOps(library)


def _lora_ops(dtype: torch.dtype) -> LoraOps:
    library = cpu_lora_library(dtype)
    return TorchLora() if library is None else CpuLora(library)


def _weight_copier(copies_beside: bool, host_bytes: int) -> Copier:
    return ThreadCopier() if copies_beside else InlineCopier()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory whose pages the system provides when they are first written."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).view(dtype).view(shape)


def _clear_blocks(memory: torch.Tensor, block_ids: Sequence[int]) -> None:
    """A loop, which beats one indexed fill."""
    for block_id in block_ids:
        memory[:, block_id].zero_()


def _copy_pages(target: torch.Tensor, source: torch.Tensor) -> None:
    """As bytes, on the calling thread alone: torch would take the cores of a step."""
    np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


@cache
def _sampling_ops() -> SamplingOps:
    library = cpu_sampling_library()
    return TorchSampling() if library is None else CpuSampling(library)


def _kernel_notes(dtype: torch.dtype, quantization: str | None) -> tuple[str, ...]:
    reason, words = obstacle(dtype), compiler_words()
    if reason is None and quantization is not None and int8_kernel(dtype) is None:
        name = str(dtype).removeprefix("torch.")
        return (f"torch multiplies {quantization} weights, slower: there is no kernel for {name} on this CPU",)
    if reason is None:
        return ()
    because = f"{reason}: {words}" if words else reason
    return (f"torch computes instead of kernels compiled for this CPU, slower: {because}",)
