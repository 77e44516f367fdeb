"""How weights get from host memory to the device: a thread on CPU, or the threads that compute where it would only take
from them; a stream from pinned memory on CUDA.

Made by workers/models/decoder.py's builder for weight_stream.py. On CPU the two are one memory: bytes are moved all the
same, as packed matrices, so that what runs on a laptop is what runs on a GPU, with a thread in the place of the copy
engine.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from configs.errors import SettingsError
from offload.weight_stream import Copier, Copy, Wait

PIECE_BYTES = 2**20


class ThreadCopier:
    """Memory to memory, in one thread of its own; ends with `close`, or with the last reference to it.

    It copies beside the threads that compute where there is a core to spare. What it has not moved when a matrix is
    due, the thread that waits moves with it.
    oneDNN's packed matrices have no storage that torch would show, but an address and a size: copies between two of
    the same descriptor are copies of bytes.
    """

    is_inline = False

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tandem-weights")

    def hold(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def buffer_like(self, held: torch.Tensor) -> torch.Tensor:
        return held.clone()

    def copies(self, target: torch.Tensor, held: torch.Tensor) -> list[Copy]:
        (to, size), (source, _) = _memory(target), _memory(held)
        return [
            partial(_move, target, held, to + start, source + start, min(PIECE_BYTES, size - start))
            for start in range(0, size, PIECE_BYTES)
        ]

    def start(self, copies: Sequence[Copy]) -> Wait:
        pieces = deque(copies)
        moving = self._thread.submit(_run_all, pieces.popleft)

        def wait() -> None:
            _run_all(pieces.pop)
            if not moving.cancel():
                moving.result()

        return wait

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class InlineCopier:
    """Memory to memory, by the threads that compute, when a matrix is due: where each core has one of them, a thread
    beside them would take from them what it copies, and more. Has no thread of its own."""

    is_inline = True

    def hold(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def buffer_like(self, held: torch.Tensor) -> torch.Tensor:
        return held.clone()

    def copies(self, target: torch.Tensor, held: torch.Tensor) -> list[Copy]:
        return [partial(_copy_together, target, held, _bytes(target), _bytes(held))]

    def start(self, copies: Sequence[Copy]) -> Wait:
        due = deque(copies)

        def wait() -> None:
            while due:
                due[0]()
                due.popleft()

        return wait

    def close(self) -> None:
        """There is nothing to end."""


class CudaCopier:
    """Pinned memory to the device on a stream of its own; steps and copies wait for each other on the device only."""

    is_inline = False

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

    def copies(self, target: torch.Tensor, held: torch.Tensor) -> list[Copy]:
        return [partial(target.copy_, held, non_blocking=True)]

    def start(self, copies: Sequence[Copy]) -> Wait:
        """The event before keeps the copies behind the layer that still reads the buffer, the one after holds up the
        layer that will."""
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_event(computing.record_event())
        with torch.cuda.stream(self._stream):
            for copy in copies:
                copy()
        arrived = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(arrived)

    def close(self) -> None:
        self._stream.synchronize()


def make_copier(device: torch.device, beside: bool = True) -> Copier:
    """beside: on CPU there is a core to copy with while layers compute."""
    if device.type == "cuda":
        return CudaCopier(device)
    return ThreadCopier() if beside else InlineCopier()


def _run_all(take: Callable[[], Copy]) -> None:
    """Runs pieces until there are none left; several threads may do so at once."""
    while True:
        try:
            copy = take()
        except IndexError:
            return
        copy()


def _move(_target: torch.Tensor, _held: torch.Tensor, to: int, source: int, size: int) -> None:
    """Copies bytes between two tensors, which are alive for as long as this runs in whatever thread."""
    ctypes.memmove(to, source, size)


def _copy_together(_target: torch.Tensor, _held: torch.Tensor, to: torch.Tensor, source: torch.Tensor) -> None:
    """Copies bytes with all of torch's threads."""
    to.copy_(source)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a CPU tensor as bytes; does not keep it alive."""
    address, size = _memory(tensor)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """(address, bytes) of a CPU tensor."""
    if tensor.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.nbytes
