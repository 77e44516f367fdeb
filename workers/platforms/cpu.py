"""The platform of ranks on CPU: compiled kernels where the CPU supports them, torch's own operations elsewhere.

Work is done when its call returns, so events and streams hold up nobody, and device memory is host memory.
"""

import ctypes
import logging
import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

from tandem.configs.environment import imitate_cpu
from tandem.configs.limits import available_cores
from tandem.configs.platform_facts import CPU as CPU_FACTS
from tandem.configs.platform_facts import W8A8_HELPS
from tandem.offload.copies.accelerator import DeviceEvent, Stream
from tandem.offload.weights.weight_stream import Copier
from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.shared_memory import can_share_memory
from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.parallel.groups import GLOO
from tandem.parallel.linear_methods import LinearMethod, MakeMethod, Place, as_given, can_pack, packed, plain
from tandem.parallel.params import Param, Scheme
from tandem.parallel.quantization.schemes import Coded, Inputs, Int8Rows, Undone
from tandem.parallel.quantization.side_by_side import by_scheme
from tandem.parallel.quantization.weight_plan import WeightPlan
from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.attention.cpu_paged import CpuAttention
from tandem.workers.attention.latents.latent_backend import LatentBackend
from tandem.workers.graphs.cpu_graphs import CpuGraphs
from tandem.workers.graphs.graph_runner import GraphRunner
from tandem.workers.kernels.cpu.attention.cpu_chunk_attention import CpuChunkAttention
from tandem.workers.kernels.cpu.attention.cpu_decode_attention import CpuDecodeAttention
from tandem.workers.kernels.cpu.cpu_build import (
    compiler_words,
    cpu_invariant_library,
    cpu_library,
    cpu_lora_library,
    cpu_sampling_library,
    obstacle,
)
from tandem.workers.kernels.cpu.cpu_fused_ops import CpuFusedOps
from tandem.workers.kernels.cpu.cpu_kv_quant import CpuKVStore
from tandem.workers.kernels.cpu.cpu_sampling import CpuSampling
from tandem.workers.kernels.cpu.cpu_skinny_gemm import skinny_gemm
from tandem.workers.kernels.fused_ops import FusedOps, TorchFusedOps
from tandem.workers.kernels.invariant.row_gemm import row_methods
from tandem.workers.kernels.lora_ops import LoraOps, TorchLora
from tandem.workers.kernels.sampling_ops import SamplingOps, TorchSampling
from tandem.workers.models.spec.arch import Mla
from tandem.workers.platforms.base import HEAD_DIM, DeviceMemory, Platform
from tandem.workers.platforms.core_share import CoreShare
from tandem.workers.platforms.device_rows import Columns, DeviceRows, Guess, HostRows

if TYPE_CHECKING:
    from tandem.offload.copies.kv_copies import BlockCopier
    from tandem.workers.kernels.expert_ops import ExpertOps

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


class Moment:
    """A DeviceEvent on CPU: a time, already past."""

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Returns at once."""

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, Moment)
        return self.at_s - earlier.at_s


class HostStream:
    """The only stream on CPU."""

    def wait_event(self, event: DeviceEvent) -> None:
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

    def event(self, *, timed: bool = False) -> DeviceEvent:
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


class CpuPlatform(Platform):
    """Ranks on CPU. copies_beside: a core is free to copy while layers compute. cores: that it divides with others,
    looked at between steps; None: with `ranks`, always. cpu_threads: a fixed number, None for its share."""

    name = CPU_FACTS.name
    device = CPU

    def __init__(
        self,
        *,
        copies_beside: bool = True,
        cores: CoreShare | None = None,
        ranks: int = 1,
        cpu_threads: int | None = None,
    ) -> None:
        self.accelerator = HostAccelerator()
        self.backend = GLOO
        self.copies_beside = copies_beside
        self._cores, self._cpu_threads = cores, cpu_threads
        self._divide(ranks)

    @classmethod
    def open(cls, cpu_threads: int | None, ranks_on_node: int, cores: CoreShare | None = None) -> Self:
        """Return the platform of a rank and set this process's torch threads.

        Never from OMP_NUM_THREADS: Ray sets it to 1, shells to anything. ranks_on_node: all that the node may ever
        hold, which counts where the system does not tell those that are there: a rank with threads to spare costs
        little, ranks with more threads than cores are slower by an order of magnitude.
        """
        imitate_cpu()
        ranks = (None if cores is None else cores.ranks()) or ranks_on_node
        torch.set_num_threads(cpu_threads or _threads(ranks))
        beside = torch.get_num_threads() * ranks < available_cores()
        return cls(copies_beside=beside, cores=cores, ranks=ranks, cpu_threads=cpu_threads)

    def begin_step(self) -> None:
        if self._cores is None or not self._cores.is_due():
            return
        self._divide(self._cores.ranks() or self._ranks)
        threads = self._cpu_threads or _threads(self._ranks)  # a container's limit may have changed, too
        if threads != torch.get_num_threads():
            log.info("%d rank(s) divide the cores: %d thread(s) from now on", self._ranks, threads)
            torch.set_num_threads(threads)

    def _divide(self, ranks: int) -> None:
        self._ranks, self.has_core = ranks, ranks <= available_cores()

    # ---- what layers compute with ----

    def attention(self, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> AttentionBackend:
        kernel = CpuDecodeAttention.make(dtype, head_dim, kv_dtype or dtype)
        store, chunk_kernel = CpuKVStore.make(dtype, kv_dtype or dtype), CpuChunkAttention.make(dtype)
        if kernel and store and chunk_kernel:
            return CpuAttention(kernel, store, chunk_kernel)
        from tandem.workers.attention.torch_sdpa import TorchAttention

        return TorchAttention()

    def latent_attention(self, dtype: torch.dtype, spec: Mla, kv_dtype: torch.dtype | None = None) -> LatentBackend:
        from tandem.workers.attention.latents.cpu_latents import CpuLatents
        from tandem.workers.attention.latents.torch_latents import TorchLatents
        from tandem.workers.kernels.cpu.attention.cpu_latent_attention import CpuLatentAttention

        kernel = CpuLatentAttention.make(dtype, spec.head_dim, kv_dtype or dtype)
        store, chunk_kernel = CpuKVStore.make(dtype, kv_dtype or dtype), CpuChunkAttention.make(dtype)
        return CpuLatents(kernel, store, chunk_kernel) if kernel and store and chunk_kernel else TorchLatents()

    def linear(
        self,
        weights: Sequence[Param],
        context: ParallelContext,
        /,
        place: Place = as_given,
        *,
        dtype: torch.dtype,
    ) -> LinearMethod:
        return by_scheme(partial(method_of, dtype))(weights, context, place=place)

    def packs(self, dtype: torch.dtype) -> bool:
        return can_pack(dtype) or multiplies_by_row(dtype)

    def experts(self, dtype: torch.dtype, place: Place = as_given) -> "ExpertOps":
        from tandem.workers.kernels.cpu.cpu_experts import cpu_experts

        return cpu_experts(dtype, partial(self.linear, dtype=dtype), place)

    def fused_ops(self, dtype: torch.dtype) -> FusedOps:
        library = cpu_library(dtype)
        return TorchFusedOps() if library is None else CpuFusedOps(library)

    def lora_ops(self, dtype: torch.dtype) -> LoraOps:
        library = cpu_lora_library(dtype)
        if library is None:
            return TorchLora()
        from tandem.workers.kernels.cpu.cpu_lora import CpuLora

        return CpuLora(library)

    def sampling_ops(self) -> SamplingOps:
        return _sampling_ops()

    def graphs(self, before_run: Callable[[], None], can_replay: bool, tp: StepCollectives) -> GraphRunner:
        return CpuGraphs(before_run, can_replay and tp.size == 1)

    # ---- memory and copies ----

    def memory(self) -> DeviceMemory | None:
        return None

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory whose pages the system provides when they are first written."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).view(dtype).view(shape)

    def clear_blocks(self, memory: torch.Tensor, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:  # faster than one indexed fill
            memory[:, block_id].zero_()

    def copy_pages(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # as bytes, on the calling thread alone: torch would take the cores of a step
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())

    def rows(self, columns: Columns, guess: Guess | None, *, keeps_tokens: bool = False) -> DeviceRows:
        return HostRows(columns)

    def kv_copier(self, layers: Sequence[Sequence[torch.Tensor]], slab_SB: torch.Tensor) -> "BlockCopier":
        from tandem.offload.copies.kv_copies import CpuCopier

        return CpuCopier(layers, slab_SB)

    def weight_copier(self, host_bytes: int) -> Copier:
        from tandem.offload.weights.weight_copiers import InlineCopier, ThreadCopier

        return ThreadCopier() if self.copies_beside else InlineCopier()

    # ---- words ----

    def implementations(self, dtype: torch.dtype) -> dict[str, str]:
        from tandem.workers.kernels.cpu.cpu_experts import CpuExperts

        attention, experts = self.attention(dtype, HEAD_DIM), self.experts(dtype)
        has_fused, linear = isinstance(self.fused_ops(dtype), CpuFusedOps), self._linear_words(dtype)
        has_experts = isinstance(experts, CpuExperts) and experts.has_products
        has_gemm = skinny_gemm(dtype) is not None or multiplies_by_row(dtype)
        replays = attention.name == "cpu-paged" and has_fused and has_gemm
        return {
            "attention": attention.name,
            "fused ops": "compiled" if has_fused else "torch",
            "linear": linear,
            "experts": "grouped products" if has_experts else "torch, expert by expert",
            "LoRA ops": "torch" if type(self.lora_ops(dtype)) is TorchLora else "compiled",
            "sampling": "compiled" if isinstance(self.sampling_ops(), CpuSampling) else "torch",
            "collectives": "shared memory" if self.backend.shares_memory and can_share_memory() else self.backend.name,
            "graphs": "replayed steps" if replays else "none",
        }

    def _linear_words(self, dtype: torch.dtype) -> str:
        if skinny_gemm(dtype) is not None:
            return "skinny GEMM, oneDNN above 64 rows"
        if multiplies_by_row(dtype):
            return "row GEMM"
        return "oneDNN" if self.packs(dtype) else "torch"

    def obstacle(self, dtype: torch.dtype) -> str | None:
        return obstacle(dtype)

    def kernel_notes(self, dtype: torch.dtype, plan: WeightPlan) -> tuple[str, ...]:
        reason, words = obstacle(dtype), compiler_words()
        if reason is None:
            return (*_slow_schemes(dtype, plan), *_w8a8_notes(dtype, plan))
        because = f"{reason}: {words}" if words else reason
        return (f"torch computes instead of kernels compiled for this CPU, slower: {because}",)


def _threads(ranks: int) -> int:
    return max(1, available_cores() // ranks)


def _dense(dtype: torch.dtype) -> MakeMethod:
    """oneDNN packs fp32 always, bf16 and fp16 where the CPU multiplies them."""
    library = _row_library(dtype)
    if library is not None:
        return row_methods(library, None)
    return packed(skinny_gemm(dtype)) if can_pack(dtype) else plain


def multiplies_by_row(dtype: torch.dtype) -> bool:
    """Returns whether the row GEMM multiplies dense weights: bf16 on CPUs with AVX2 and without products of bf16
    pairs."""
    return _row_library(dtype) is not None


def _row_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    if dtype is not torch.bfloat16 or skinny_gemm(dtype) is not None:
        return None
    library = cpu_invariant_library(dtype)
    return library if library is not None and hasattr(library, "row_gemm_fills_registers") else None


class SchemeProducts(NamedTuple):
    """The products with weights of a class of schemes. make, has_kernel: by dtype and scheme."""

    make: Callable[[torch.dtype, Any], MakeMethod]
    has_kernel: Callable[[torch.dtype, Any], bool]


def _int8(dtype: torch.dtype, scheme: Int8Rows) -> MakeMethod:
    from tandem.workers.kernels.cpu.cpu_int8_gemm import int8_methods, w8a8_methods

    return w8a8_methods(dtype) if scheme.inputs is Inputs.INT8 else int8_methods(dtype)


def _multiplies_int8(dtype: torch.dtype, scheme: Int8Rows) -> bool:
    from tandem.workers.kernels.cpu.cpu_int8_gemm import multiplies_int8

    return multiplies_int8(dtype)


def _coded(dtype: torch.dtype, scheme: Coded) -> MakeMethod:
    from tandem.workers.kernels.cpu.cpu_code_gemm import code_methods

    return code_methods(dtype, scheme)


def _multiplies_codes(dtype: torch.dtype, scheme: Coded) -> bool:
    from tandem.workers.kernels.cpu.cpu_code_gemm import code_gemm

    return scheme.has_product and code_gemm(dtype, planes=1) is not None


def _undone(dtype: torch.dtype, scheme: Undone) -> MakeMethod:
    from tandem.parallel.quantization.coded import UndoneMethod

    return partial(UndoneMethod, dtype)


METHODS: dict[type[Any], SchemeProducts] = {
    Int8Rows: SchemeProducts(_int8, _multiplies_int8),
    Coded: SchemeProducts(_coded, _multiplies_codes),
    Undone: SchemeProducts(_undone, lambda *_: True),
}
"""Linear methods by the class of the scheme."""


def method_of(dtype: torch.dtype, scheme: Scheme | None) -> MakeMethod:
    """Returns what makes the methods of weights of one scheme."""
    return _dense(dtype) if scheme is None else METHODS[type(scheme)].make(dtype, scheme)


def _slow_schemes(dtype: torch.dtype, plan: WeightPlan) -> tuple[str, ...]:
    """Returns a line on the schemes that torch multiplies."""
    slow = [scheme.words for scheme in plan.schemes if not METHODS[type(scheme)].has_kernel(dtype, scheme)]
    if not slow:
        return ()
    words, name = " and ".join(dict.fromkeys(slow)), str(dtype).removeprefix("torch.")
    return (f"torch multiplies {words} weights, slower: there is no kernel for {name} on this CPU",)


def _w8a8_notes(dtype: torch.dtype, plan: WeightPlan) -> tuple[str, ...]:
    """Returns a line on what helps where dense bf16 is slow, and bytes are multiplied at once."""
    from tandem.workers.kernels.cpu.cpu_int8_gemm import int8_kernel

    if plan.schemes or not multiplies_by_row(dtype) or int8_kernel(dtype) is None:
        return ()
    return (f"this CPU multiplies no pairs of bf16: {W8A8_HELPS}, if the model's answers stand it",)


@cache
def _sampling_ops() -> SamplingOps:
    library = cpu_sampling_library()
    return TorchSampling() if library is None else CpuSampling(library)
