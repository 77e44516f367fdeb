"""Copiers of weights from host memory to the device: a thread or the computing threads on CPU, else a stream.

Given by the platform, used by weight_stream.py. On CPU host and device memory are the same. The bytes
are copied all the same, as packed matrices, so that a laptop runs the code path of a GPU, with a thread in place of the
copy engine.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from tandem.configs.errors import SettingsError
from tandem.offload.copies.accelerator import Accelerator
from tandem.offload.copies.host_slab import HostSlab
from tandem.offload.weights.weight_stream import Copy, Wait

PIECE_BYTES = 2**20


class ThreadCopier:
    """Copies memory to memory in a thread of its own, which ends with `close` or with the last reference to the copier.

    It runs beside the computing threads where a core is free. Pieces that it has not moved when a matrix is due are
    moved by both it and the waiting thread. oneDNN's packed matrices expose no storage to torch, but an address and a
    size; two matrices of equal descriptors are copied as bytes.
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
    """Copies memory to memory in the computing threads when a matrix is due, and has no thread of its own.

    Used where every core has a computing thread: a thread beside them would cost more than the copies.
    """

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
        """Does nothing: there is no thread."""


class StreamWeightCopier:
    """Copies pinned memory to the device on a separate stream. Steps and copies wait for each other on the device
    only."""

    is_inline = False

    def __init__(self, accelerator: Accelerator, host_bytes: int) -> None:
        """host_bytes: of all weights that will be held, pinned now as one slab. SettingsError when that fails."""
        self._accelerator = accelerator
        self._stream = accelerator.stream()
        self._slab: HostSlab | None = None
        self._device: torch.device | None = None
        self._free = torch.empty(0, dtype=torch.uint8)
        if host_bytes:
            try:
                self._slab = HostSlab.allocate(1, host_bytes, accelerator)
            except OSError as error:
                raise SettingsError(
                    f"{host_bytes / 2**20:.0f} MiB of pinned host memory cannot be had: {error}", "--cpu-offload-gb"
                ) from error
            self._free = self._slab.bytes_SB[0]

    def hold(self, weight: torch.Tensor) -> torch.Tensor:
        assert weight.nbytes <= self._free.nbytes, "more weights than were announced"
        self._device = weight.device
        held, self._free = self._free[: weight.nbytes], self._free[weight.nbytes :]
        return held.view(weight.dtype).view(weight.shape).copy_(weight)

    def buffer_like(self, held: torch.Tensor) -> torch.Tensor:
        return torch.empty(held.shape, dtype=held.dtype, device=self._device)

    def copies(self, target: torch.Tensor, held: torch.Tensor) -> list[Copy]:
        return [partial(target.copy_, held, non_blocking=True)]

    def start(self, copies: Sequence[Copy]) -> Wait:
        """Starts the copies between two events: they wait for the layer that still reads the buffer, its next layer for
        them."""
        accelerator = self._accelerator
        self._stream.wait_event(accelerator.event())
        with accelerator.use(self._stream):
            for copy in copies:
                copy()
            arrived = accelerator.event()
        return lambda: accelerator.current_stream().wait_event(arrived)

    def close(self) -> None:
        self._stream.synchronize()
        if self._slab is not None:
            self._slab.close()
            self._slab = None


def _run_all(take: Callable[[], Copy]) -> None:
    """Runs pieces until none is left; several threads may do so at once."""
    while True:
        try:
            copy = take()
        except IndexError:
            return
        copy()


def _move(_target: torch.Tensor, _held: torch.Tensor, to: int, source: int, size: int) -> None:
    """Copies bytes between two tensors, which this call keeps alive in whatever thread it runs."""
    ctypes.memmove(to, source, size)


def _copy_together(_target: torch.Tensor, _held: torch.Tensor, to: torch.Tensor, source: torch.Tensor) -> None:
    """Copies bytes with all of torch's threads."""
    to.copy_(source)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a CPU tensor as bytes, without keeping it alive."""
    address, size = _memory(tensor)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns (address, bytes) of a CPU tensor."""
    if tensor.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.nbytes
