"""The platform of ranks on a CUDA device: streams, events, pinned memory, and the kernels that run there."""

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from tandem.configs.platform_facts import CUDA as CUDA_FACTS
from tandem.offload.copies.accelerator import Accelerator, DeviceEvent, Stream
from tandem.offload.copies.kv_copies import BlockCopier, StreamCopier
from tandem.offload.weights.weight_copiers import StreamWeightCopier
from tandem.offload.weights.weight_stream import Copier
from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.parallel.groups import Backend
from tandem.parallel.linear_methods import LinearMethod, MakeMethod, Place, as_given, plain
from tandem.parallel.params import Param, Scheme
from tandem.parallel.quantization.side_by_side import by_scheme
from tandem.parallel.quantization.weight_plan import WeightPlan
from tandem.parallel.stored.read_ahead import BESIDE_COPIES
from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.attention.latents.latent_backend import LatentBackend
from tandem.workers.attention.latents.torch_latents import TorchLatents
from tandem.workers.attention.prompts.varlen_attention import FlashVarlen
from tandem.workers.attention.torch_sdpa import TorchAttention
from tandem.workers.graphs.cuda_graphs import CaptureGraph, CudaGraphs, Replay
from tandem.workers.graphs.graph_runner import GraphRunner, Outputs
from tandem.workers.kernels.expert_ops import ExpertOps, TorchExperts
from tandem.workers.kernels.fused_ops import FusedOps, TorchFusedOps
from tandem.workers.kernels.lora_ops import LoraOps, TorchLora
from tandem.workers.kernels.sampling_ops import SamplingOps, TorchSampling
from tandem.workers.kernels.triton.codes.scheme_methods import SchemeMethods
from tandem.workers.kernels.triton.late_kernels import LATE
from tandem.workers.models.spec.arch import Mla
from tandem.workers.platforms.base import HEAD_DIM, DeviceMemory, Platform
from tandem.workers.platforms.device_rows import Columns, DeviceRows, Guess
from tandem.workers.platforms.tensor_rows import TensorRows
from tandem.workers.tuning.call_timer import queued_seconds

if TYPE_CHECKING:
    from tandem.workers.kernels.triton.triton_attention import Multiprocessors
    from tandem.workers.platforms.few_rows import FewRowsChoice
    from tandem.workers.tuning.tuned_start import Tuner

log = logging.getLogger(__name__)

MEASURED: Final = 5
"""Calls of which a measurement takes the least time."""


def _triton_obstacle() -> str | None:
    """Return why Triton's kernels cannot be had here, if they cannot: it compiles its launchers, which include
    Python.h, with a C compiler, and bf16 products for GPUs from Ampere on."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang", "cc"))):
        return "there is no C compiler (gcc, clang or cc)"
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        return f"{headers} has no Python.h (Debian: python3-dev)"
    if torch.cuda.is_available() and (found := torch.cuda.get_device_capability()) < (8, 0):
        return f"the device has compute capability {found[0]}.{found[1]}, and they are for 8.0 and newer"
    return None


class CudaEvent:
    """A DeviceEvent on a CUDA stream."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def native(self) -> torch.cuda.Event:
        return self._event

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, CudaEvent)
        return float(earlier.native.elapsed_time(self._event)) / 1000


class CudaStream:
    """A stream of a CUDA device."""

    __slots__ = ("native",)

    def __init__(self, native: torch.cuda.Stream) -> None:
        self.native = native

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent)
        self.native.wait_event(event.native)

    def synchronize(self) -> None:
        self.native.synchronize()


class CudaCapture:
    """Captures CUDA graphs, which share one pool of memory: a replay's results last until the next one."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, body: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        """Lanes copy meanwhile on their own threads, so only this thread's calls are held against the capture."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = body()
        return graph.replay, outputs


class CudaAccelerator:
    """Accelerator of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def activate(self) -> None:
        torch.cuda.set_device(self._device)

    def stream(self) -> Stream:
        return CudaStream(torch.cuda.Stream(self._device))

    def current_stream(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self._device))

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        assert isinstance(stream, CudaStream)
        return torch.cuda.stream(stream.native)

    def event(self, *, timed: bool = False) -> DeviceEvent:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(torch.cuda.current_stream(self._device))
        return CudaEvent(event)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        # torch's cache of pinned memory keeps the staged copy until the device has read it
        return host.pin_memory().to(self._device, non_blocking=True)

    def pinned_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(host, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def pin(self, memory: torch.Tensor) -> None:
        self.activate()
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if error:
            self._clear_error()
            raise OSError(f"{memory.nbytes} bytes of host memory could not be pinned: CUDA error {error}")

    def unpin(self, memory: torch.Tensor) -> None:
        error = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
        if error:
            self._clear_error()
            log.warning("%d bytes of host memory could not be unpinned: CUDA error %d", memory.nbytes, error)

    def _clear_error(self) -> None:
        """Clears the last error of this thread, which torch's cudart() leaves set: the next kernel would be blamed."""
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)  # torch asks for the last error after each launch, and so resets it

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class CudaPlatform(Platform):
    """Ranks on a device with streams and memory of its own. capture: in place of CUDA's graphs."""

    name = CUDA_FACTS.name
    copies_beside = True
    scratch_blocks = 1

    def __init__(
        self, device: torch.device, accelerator: Accelerator, backend: Backend, capture: CaptureGraph | None = None
    ) -> None:
        self.device = device
        self.tunes = device.type == "cuda"
        self.accelerator = accelerator
        self.read_ahead = BESIDE_COPIES._replace(memory=accelerator.pinned_memory)
        self.backend = backend
        self._capture = CudaCapture() if capture is None else capture
        self._flash_obstacles: dict[Hashable, str | None] = {}
        self._few_rows: FewRowsChoice | None = None
        self._schemes: SchemeMethods | None = None

    @classmethod
    def open(cls, device: torch.device) -> Self:
        """Return the platform of one CUDA device; the calling thread is activated.

        cuDNN's attention is off: it plans anew, 55 to 70 ms, for every shape that it has not seen. NCCL registers no
        buffers of captures, unless the environment says so: ranks would wait in it for one that cannot capture.
        """
        LATE.pause()
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        torch.backends.cuda.enable_cudnn_sdp(False)
        accelerator = CudaAccelerator(device)
        accelerator.activate()
        seconds_of = partial(queued_seconds, accelerator, device)
        return cls(device, accelerator, Backend("nccl", device, shares_memory=False, seconds_of=seconds_of))

    def ready(self) -> None:
        if self.has_triton():
            LATE.watch()

    def has_triton(self) -> bool:
        return _triton_obstacle() is None

    # ---- what layers compute with ----

    def attention(self, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> AttentionBackend:
        """Return the kernel's where it computes such heads, else torch's."""
        if self.has_triton():
            from tandem.workers.attention.prompts.flash_prompts import FlashPrompts
            from tandem.workers.attention.triton_paged import TritonAttention, takes

            if takes(dtype, head_dim, kv_dtype):
                flash = self._flash(dtype, head_dim, kv_dtype or dtype)
                prompts = None if flash is None else FlashPrompts(flash)
                return TritonAttention(self._multiprocessors(), prompts, self.tiles)
        return TorchAttention(is_bounded=True, replays=True)

    def _multiprocessors(self) -> "Multiprocessors | None":
        if self.device.type != "cuda":  # the host's memory in its place
            return None
        from tandem.workers.kernels.triton.triton_attention import Multiprocessors

        facts = torch.cuda.get_device_properties(self.device)
        return Multiprocessors(int(facts.multi_processor_count), int(facts.shared_memory_per_multiprocessor))

    def _flash(self, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype) -> FlashVarlen | None:
        """Return what takes chunks of large steps: torch's flash kernel, where it computes what Triton's does."""
        from tandem.workers.attention.prompts.flash_probe import flash_obstacle

        varlen, asked = FlashVarlen(), (dtype, head_dim, kv_dtype)
        if not varlen.takes(dtype, head_dim):
            return None
        if asked not in self._flash_obstacles:
            self._flash_obstacles[asked] = flash_obstacle(varlen, self.device, *asked)
        return varlen if self._flash_obstacles[asked] is None else None

    def latent_attention(self, dtype: torch.dtype, spec: Mla, kv_dtype: torch.dtype | None = None) -> LatentBackend:
        """Return the kernel's where it computes such latents, else torch's."""
        if self.has_triton():
            from tandem.workers.attention.latents.paged_latents import TritonLatents, takes_latents

            if takes_latents(dtype, spec.kv_rank, spec.rope_dim, kv_dtype):
                return TritonLatents(self._multiprocessors(), self._flash(dtype, spec.key_dim, dtype))
        return TorchLatents(is_bounded=True, replays=True)

    def linear(
        self,
        weights: Sequence[Param],
        context: ParallelContext,
        /,
        place: Place = as_given,
        *,
        dtype: torch.dtype,
    ) -> LinearMethod:
        return by_scheme(partial(self._methods, dtype))(weights, context, place=place)

    def _methods(self, dtype: torch.dtype, scheme: Scheme | None) -> MakeMethod:
        """Return what makes methods of weights of one scheme."""
        if scheme is not None:
            return self._of_schemes().methods(dtype, scheme)
        if not self.has_triton():
            return plain
        from tandem.workers.platforms.few_rows import FewRowsChoice, few_rows_methods

        if self._few_rows is None:
            self._few_rows = FewRowsChoice(self._number())
        return few_rows_methods(self._few_rows)

    def _of_schemes(self) -> SchemeMethods:
        if self._schemes is None:
            has_triton = self.has_triton()
            of_device = self._multiprocessors() if has_triton else None
            self._schemes = SchemeMethods(self.device, of_device, has_triton=has_triton)
        return self._schemes

    def _number(self) -> int:
        """Return the multiprocessors of the device, or of one that is assumed."""
        from tandem.workers.kernels.triton.triton_attention import H100

        return (self._multiprocessors() or H100).number

    def settle(self) -> tuple[str, ...]:
        if self._few_rows is None:
            return ()
        try:
            return self._few_rows.settle(self._seconds_of)
        except RuntimeError as error:  # no memory to measure in, or no captures
            return (f"products of few rows stay with cuBLAS: {error}",)

    def _seconds_of(self, work: Callable[[], Sequence[torch.Tensor]]) -> float:
        """Return the least time of some calls on the device, without the host's."""
        work()  # kernels are compiled
        replay, _ = self._capture(lambda: tuple(work()))
        times = []
        for _ in range(2 + MEASURED):
            begin = self.accelerator.event(timed=True)
            replay()
            end = self.accelerator.event(timed=True)
            end.wait()
            times.append(end.seconds_since(begin))
        return min(times[2:])

    def packs(self, dtype: torch.dtype) -> bool:
        return False

    def experts(self, dtype: torch.dtype, place: Place = as_given) -> ExpertOps:
        make = partial(self.linear, dtype=dtype)
        if not self.has_triton():
            return TorchExperts(make, place, self.device)
        from tandem.workers.kernels.triton.codes.triton_coded import code_experts
        from tandem.workers.kernels.triton.triton_experts import TritonExperts

        return TritonExperts(make, place, self.device, self.tiles, partial(code_experts, dtype, make))

    def fused_ops(self, dtype: torch.dtype) -> FusedOps:
        if not self.has_triton():
            return TorchFusedOps()
        from tandem.workers.kernels.triton.triton_fused_ops import TritonFusedOps

        return TritonFusedOps()

    def lora_ops(self, dtype: torch.dtype) -> LoraOps:
        if not self.has_triton():
            return TorchLora()
        from tandem.workers.kernels.triton.triton_lora import TritonLora

        return TritonLora()

    def sampling_ops(self) -> SamplingOps:
        if not self.has_triton():
            return TorchSampling()
        from tandem.workers.kernels.triton.sampling.triton_sampling import TritonSampling

        return TritonSampling()

    def graphs(self, before_run: Callable[[], None], can_replay: bool, tp: StepCollectives) -> GraphRunner:
        return CudaGraphs(before_run, can_replay, tp, self._capture)

    def tuner(self) -> "Tuner | None":
        if not self.tunes or not self.has_triton():
            return None
        from tandem.workers.platforms.cuda_tuner import CudaTuner

        return CudaTuner(self.device, self.accelerator, CudaCapture(), self._multiprocessors())

    # ---- memory and copies ----

    def memory(self) -> DeviceMemory | None:
        """Measure the device; what torch's allocator has reserved counts as in use."""
        torch.cuda.synchronize(self.device)
        return DeviceMemory(*torch.cuda.mem_get_info(self.device))

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def clear_blocks(self, memory: torch.Tensor, block_ids: Sequence[int]) -> None:
        memory.index_fill_(1, self.accelerator.to_device(torch.tensor(block_ids)), 0)

    def copy_pages(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def rows(self, columns: Columns, guess: Guess | None, *, keeps_tokens: bool = False) -> DeviceRows:
        return TensorRows(columns, self.accelerator, self.device, guess, keeps_tokens=keeps_tokens)

    def kv_copier(self, layers: Sequence[Sequence[torch.Tensor]], slab_SB: torch.Tensor) -> BlockCopier:
        return StreamCopier(self.accelerator, layers, slab_SB)

    def weight_copier(self, host_bytes: int) -> Copier:
        return StreamWeightCopier(self.accelerator, host_bytes)

    # ---- words ----

    def implementations(self, dtype: torch.dtype) -> dict[str, str]:
        return {
            "attention": self.attention(dtype, HEAD_DIM).name,
            "fused ops": "torch" if type(self.fused_ops(dtype)) is TorchFusedOps else "Triton",
            "linear": "cuBLAS",
            "experts": "torch, expert by expert" if type(self.experts(dtype)) is TorchExperts else "Triton",
            "LoRA ops": "torch" if type(self.lora_ops(dtype)) is TorchLora else "Triton",
            "sampling": "torch" if type(self.sampling_ops()) is TorchSampling else "Triton",
            "collectives": self.backend.name,
            "graphs": "CUDA graphs",
        }

    def obstacle(self, dtype: torch.dtype) -> str | None:
        return _triton_obstacle()

    def kernel_notes(self, dtype: torch.dtype, plan: WeightPlan) -> tuple[str, ...]:
        reason = _triton_obstacle()
        if reason is not None:
            return (f"torch computes instead of Triton's kernels, slower: {reason}",)
        words = "Triton's kernel attends prompts instead of torch's flash attention, slower"
        found = [f"{words}: {why}" for why in dict.fromkeys(self._flash_obstacles.values()) if why is not None]
        if self._schemes is not None and self._schemes.fp8_obstacle is not None:
            found.append(f"weights in fp8 are multiplied by inputs as they are: {self._schemes.fp8_obstacle}")
        return tuple(found)
