"""Calls the compiled CPU kernels, and captures and replays sequences of calls: the CPU twin of a CUDA graph.

A small decode step spends much of its time between its kernels, where Python makes views, allocates memory and looks up
addresses. While capturing() is open on a thread, each Kernel call runs and is added to the capture with its arguments.
Intermediate results get memory from an Arena that the capture keeps, so their addresses stay valid; replay() runs the
calls again. Inputs that change reach them through memory that the caller keeps in place, or through cells: arguments
that are ctypes objects, whose values are read at each call. Used by workers/graphs/cpu_graphs.py.

A capture is whole only if it contains nothing but kernels, views, copies and sums in place. Any other torch operation
clears `is_whole`, and then it must not be replayed. Work outside torch is invisible to it: numpy's results and Python's
decisions stay those of the captured step.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

POINTER, NUMBER, COUNT, REAL = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
LEAST_CHUNK_BYTES = 4096
CACHE_LINE = 64
_aten = torch.ops.aten
EMPTY = {_aten.empty.memory_format, _aten.empty_like.default}
IN_PLACE = {_aten.copy_.default, _aten.add_.Tensor, _aten.mul_.Tensor, _aten.zero_.default}
"""Operations that are captured with the kernels: they give the memory of their first argument new values."""
GIVEN = {_aten.lift_fresh.default, _aten.detach_.default}
"""Operations that make tensors of numpy's or Python's values. These are constants of a capture, unless their owner
changes them in place: ReplayableStep."""


class _Here(threading.local):
    """The capture that is open on this thread."""

    capture: "Capture | None" = None


_here = _Here()


class Kernel:
    """A compiled function without a result. Pointers are passed as addresses or as ctypes arrays."""

    def __init__(self, library: ctypes.CDLL, name: str, *argtypes: Any) -> None:
        self._function = library[name]  # an object of our own: attributes of the library would be shared
        self._function.restype = None
        self._function.argtypes = argtypes

    def __call__(self, *args: Any) -> None:
        if (capture := _here.capture) is not None:
            capture.add_call(self._function, args)
        self._function(*args)


def keep(*things: object) -> None:
    """Keeps objects alive as long as the open capture, for a captured call that reads them by address."""
    if _here.capture is not None:
        _here.capture.kept += things


class Scratch:
    """Floats that one call writes and reads, undefined afterwards.

    Captured calls follow it when it grows, since `address` is a cell. It is no torch memory: it outlives a layer, and
    an arena must not reuse it.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)
        self._count = -1
        self.address = ctypes.c_void_p()

    def reserve(self, count: int) -> None:
        """Makes room for `count` floats, from the start of a cache line."""
        if self._count < count:
            self._count = count
            self._memory = np.empty(count + CACHE_LINE // 4, np.float32)
            self.address.value = -(-self._memory.ctypes.data // CACHE_LINE) * CACHE_LINE


class OfHeads:
    """Numbers of heads as C arrays, one for equal numbers; captured calls keep theirs."""

    def __init__(self) -> None:
        self._held: dict[Sequence[float], Any] = {}

    def array(self, numbers: tuple[float, ...] | None) -> Any:
        """Returns the array; None for None."""
        if numbers is None:
            return None
        if numbers not in self._held:
            self._held[numbers] = (ctypes.c_float * len(numbers))(*numbers)
        return self._held[numbers]


class Arena:
    """Memory for the results between the calls of captures, which share it since one is replayed at a time.

    Two halves take turns, layer by layer: a result lives until the end of the layer after its own.
    """

    def __init__(self) -> None:
        self._halves: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._turn = self._next = 0

    def turn(self) -> None:
        """Starts a layer."""
        self._turn, self._next = 1 - self._turn, 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Returns a buffer of at least that many bytes. A capture must keep it, since a larger one may replace it
        here."""
        half = self._halves[self._turn]
        if self._next == len(half):
            half.append(torch.empty(0, dtype=torch.uint8))
        if half[self._next].shape[0] < num_bytes:
            half[self._next] = torch.empty(max(LEAST_CHUNK_BYTES, 1 << num_bytes.bit_length()), dtype=torch.uint8)
        self._next += 1
        return half[self._next - 1]


class Capture(TorchDispatchMode):  # type: ignore[misc]
    """The calls of one step's layers, in order."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.is_whole = True
        self.kept: list[object] = []
        self._arena = arena
        self._constants: dict[tuple[Any, Any], Any] = {}
        self._calls: list[tuple[Callable[..., object], Sequence[Any]]] = []

    def add_call(self, function: Any, args: Sequence[Any]) -> None:
        self._calls.append((function, [*map(self._as_c, args, function.argtypes)]))

    def _as_c(self, arg: Any, kind: Any) -> Any:
        """Returns the argument as a ctypes object, as ctypes would convert it at each call; one object for equal
        ones."""
        if isinstance(arg, (kind, ctypes.Array)):
            return arg
        return self._constants.setdefault((kind, arg), kind(arg))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False. torch calls it on a mode's class."""
        # True would import its compiler at the first call: a second, 900 modules and a temporary folder, for nothing.
        return False

    def replay(self) -> None:
        """Runs all calls again, in order. Requires torch.inference_mode, as the capture did."""
        assert self.is_whole
        for function, args in self._calls:
            function(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in EMPTY:
            return self._empty(func(*args, **kwargs))
        out = func(*args, **kwargs)
        if func in IN_PLACE and not kwargs:
            self._calls.append((func, args))
        elif func in GIVEN:
            self.kept.append(out)
        elif func._schema.is_mutable or not _are_views(out, args):
            self.is_whole = False
        return out

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        assert like.is_contiguous()
        chunk = self._arena.take(like.nbytes)
        self.kept.append(chunk)
        return chunk[: like.nbytes].view(like.dtype).view(like.shape)


def _are_views(out: object, args: object) -> bool:
    """Returns whether an operation returned tensors, all in memory of its arguments."""
    return bool(_tensors(out)) and {*map(_begin, _tensors(out))} <= {*map(_begin, _tensors(args))}


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _begin(tensor: torch.Tensor) -> int:
    """Returns the start of the tensor's memory; an identity for oneDNN's tensors, which do not expose it."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


@contextmanager
def capturing(arena: Arena) -> Iterator[Capture]:
    """Captures this thread's calls inside the block; they also run."""
    assert _here.capture is None, "one at a time"
    opened = Capture(arena)
    _here.capture = opened
    try:
        with opened:
            yield opened
    finally:
        _here.capture = None
