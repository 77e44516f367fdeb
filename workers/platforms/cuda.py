"""The platform of ranks on a CUDA device: streams, events, pinned memory, and the kernels that run there."""

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch

from tandem.configs.errors import SettingsError
from tandem.configs.schema import EngineSettings
from tandem.offload.copies.accelerator import Accelerator, Event, Stream
from tandem.offload.copies.kv_copies import StreamCopier
from tandem.offload.weights.weight_copiers import StreamWeightCopier
from tandem.parallel.groups import Backend
from tandem.parallel.linear_methods import MakeMethod, plain
from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.attention.latents.latent_backend import LatentBackend
from tandem.workers.attention.latents.torch_latents import TorchLatents
from tandem.workers.attention.torch_sdpa import TorchAttention
from tandem.workers.graphs.cuda_graphs import CaptureGraph, CudaGraphs, Replay
from tandem.workers.graphs.graph_runner import Outputs
from tandem.workers.kernels.expert_ops import MakeExpertOps, TorchExperts
from tandem.workers.kernels.fused_ops import FusedOps, TorchFusedOps
from tandem.workers.kernels.lora_ops import LoraOps, TorchLora
from tandem.workers.kernels.sampling_ops import TorchSampling
from tandem.workers.platforms.base import DeviceMemory, MakeAttention, Platform
from tandem.workers.platforms.cpu import open_cpu
from tandem.workers.platforms.cpu_invariant import batch_invariant
from tandem.workers.platforms.tensor_rows import TensorRows

log = logging.getLogger(__name__)


def _has_triton() -> bool:
    """Whether Triton's kernels can be had here: it compiles its launchers with a C compiler, and bf16 products for GPUs
    from Ampere on."""
    has_compiler = "CC" in os.environ or any(map(shutil.which, ("gcc", "clang", "cc")))
    is_old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return importlib.util.find_spec("triton") is not None and has_compiler and not is_old


def _gathered(dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> AttentionBackend:
    """Attention in torch operations."""
    return TorchAttention(is_bounded=True, replays=True)


def _latent_attention(dtype: torch.dtype, width: int, kv_dtype: torch.dtype | None = None) -> LatentBackend:
    """The same over latents, for which there is no kernel."""
    return TorchLatents(is_bounded=True, replays=True)


def _attention(dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> AttentionBackend:
    """The kernel's where it computes such heads."""
    if not _has_triton():
        return _gathered(dtype, head_dim, kv_dtype)
    from tandem.workers.attention.triton_paged import TritonAttention, takes

    return TritonAttention() if takes(dtype, head_dim, kv_dtype) else _gathered(dtype, head_dim, kv_dtype)


class CudaEvent:
    """An Event on a CUDA stream."""

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

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        return float(earlier.native.elapsed_time(self._event)) / 1000


class CudaStream:
    """A stream of a CUDA device."""

    __slots__ = ("native",)

    def __init__(self, native: torch.cuda.Stream) -> None:
        self.native = native

    def wait_event(self, event: Event) -> None:
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

    def event(self, *, timed: bool = False) -> Event:
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


def open_platform(settings: EngineSettings, rank: int, ranks_on_node: int) -> Platform:
    """Returns the platform of a rank, as asked; else CUDA when torch sees a device. The calling thread is activated and
    this process's torch threads are set.

    Ranks of one node spread over its devices by their number. SettingsError (--device) without the device asked for.
    """
    available = torch.cuda.is_available()
    asked = settings.device.device
    if asked == "cuda" and not available:
        raise SettingsError("--device cuda, but torch sees no CUDA device here", "--device")
    if asked == "cpu" or not available:
        platform = open_cpu(settings.device.cpu_threads, ranks_on_node)
        return batch_invariant(platform) if settings.model.batch_invariant else platform
    torch.set_num_threads(1)
    return cuda_platform(torch.device("cuda", rank % torch.cuda.device_count()))


def cuda_platform(device: torch.device) -> Platform:
    """Returns the platform of one device; the calling thread is activated.

    cuDNN's attention is off: it plans anew, 55 to 70 ms, for every shape that it has not seen.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    accelerator = CudaAccelerator(device)
    accelerator.activate()
    backend = Backend("nccl", device, shares_memory=False)
    return platform_on(accelerator, device, backend, partial(_memory, device), attention=_attention)


def platform_on(
    accelerator: Accelerator,
    device: torch.device,
    backend: Backend,
    memory: Callable[[], DeviceMemory],
    capture: CaptureGraph | None = None,
    attention: MakeAttention = _gathered,
) -> Platform:
    """Returns the platform of a device with streams and memory of its own. capture: in place of CUDA's graphs."""
    return Platform(
        name="cuda",
        device=device,
        accelerator=accelerator,
        backend=backend,
        memory=memory,
        copies_beside=True,
        packs=lambda dtype: False,
        linear_methods=_linear_methods,
        attention=attention,
        latent_attention=_latent_attention,
        expert_ops=partial(_expert_ops, device),
        fused_ops=_fused_ops,
        lora_ops=_lora_ops,
        graphs=partial(CudaGraphs, capture=CudaCapture() if capture is None else capture),
        scratch_blocks=1,
        kv_copier=partial(StreamCopier, accelerator),
        weight_copier=partial(StreamWeightCopier, accelerator),
        rows=lambda columns, guess, keeps_tokens=False: TensorRows(
            columns, accelerator, device, guess, keeps_tokens=keeps_tokens
        ),
        zeros=partial(_zeros, device),
        clear_blocks=partial(_clear_blocks, accelerator),
        copy_pages=_copy_pages,
        sampling_ops=TorchSampling,
        kernel_notes=lambda dtype, quantization: (),
    )


def _memory(device: torch.device) -> DeviceMemory:
    """What torch's allocator has reserved counts as in use."""
    torch.cuda.synchronize(device)
    return DeviceMemory(*torch.cuda.mem_get_info(device))


def _linear_methods(dtype: torch.dtype, quantization: str | None = None) -> MakeMethod:
    if quantization is not None:
        raise SettingsError(f"{quantization} is for ranks on CPU; on CUDA weights stay in --dtype", "--quantization")
    return plain


def _expert_ops(device: torch.device, dtype: torch.dtype, quantization: str | None = None) -> MakeExpertOps:
    make = _linear_methods(dtype, quantization)
    if not _has_triton():
        return partial(TorchExperts, make, device=device)
    from tandem.workers.kernels.triton.triton_experts import TritonExperts

    return partial(TritonExperts, make, device=device)


def _fused_ops(dtype: torch.dtype) -> FusedOps:
    return TorchFusedOps()


def _lora_ops(dtype: torch.dtype) -> LoraOps:
    if not _has_triton():
        return TorchLora()
    from tandem.workers.kernels.triton.triton_lora import TritonLora

    return TritonLora()


def _zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _clear_blocks(accelerator: Accelerator, memory: torch.Tensor, block_ids: Sequence[int]) -> None:
    memory.index_fill_(1, accelerator.to_device(torch.tensor(block_ids)), 0)


def _copy_pages(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
