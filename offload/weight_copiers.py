"""How weights get from host memory to the device: a thread on CPU, a stream from pinned memory on CUDA.

Made by workers/models/decoder.py's builder for weight_stream.py. On CPU the two are one memory: bytes are moved all the
same, as packed matrices, so that what runs on a laptop is what runs on a GPU, with a thread in the place of the copy
engine.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from configs.errors import SettingsError
from offload.weight_stream import Copier, Copy, Wait


class ThreadCopier:
    """Memory to memory, in one thread of its own; ends with `close`, or with the last reference to it.

    oneDNN's packed matrices have no storage that torch would show, but an address and a size: copies between two of
    the same descriptor are copies of bytes.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-weights")

    def hold(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def buffer_like(self, held: torch.Tensor) -> torch.Tensor:
        return held.clone()

    def copy(self, target: torch.Tensor, held: torch.Tensor) -> Copy:
        (to, size), (source, _) = _memory(target), _memory(held)
        return partial(ctypes.memmove, to, source, size)

    def start(self, copies: Sequence[Copy]) -> Wait:
        return self._thread.submit(_run, copies).result

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class CudaCopier:
    """Pinned memory to the device on a stream of its own; steps and copies wait for each other on the device only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def hold(self, weight: torch.Tensor) -> torch.Tensor:
        try:
            held = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True)
        except RuntimeError as error:
            raise SettingsError(
                f"{weight.nbytes / 2**20:.0f} MiB more of pinned host memory cannot be had: {error}", "--cpu-offload-gb"
            ) from error
        return held.copy_(weight)

    def buffer_like(self, held: torch.Tensor) -> torch.Tensor:
        return torch.empty(held.shape, dtype=held.dtype, device=self._device)

    def copy(self, target: torch.Tensor, held: torch.Tensor) -> Copy:
        return partial(target.copy_, held, non_blocking=True)

    def start(self, copies: Sequence[Copy]) -> Wait:
        """The event before keeps the copies behind the layer that still reads the buffer, the one after holds up the
        layer that will."""
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_event(computing.record_event())
        with torch.cuda.stream(self._stream):
            _run(copies)
        arrived = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(arrived)

    def close(self) -> None:
        self._stream.synchronize()


def make_copier(device: torch.device) -> Copier:
    return CudaCopier(device) if device.type == "cuda" else ThreadCopier()


def _run(copies: Sequence[Copy]) -> None:
    for copy in copies:
        copy()


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """(address, bytes) of a CPU tensor."""
    if tensor.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.nbytes
