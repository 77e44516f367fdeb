"""Calls of the compiled CPU kernels, and how a run of them is recorded to be repeated: a CUDA graph's twin.

A small decode step spends a good part of its time between its kernels, where Python makes views, takes memory and looks
up addresses. While recording() is open on a thread, each call of a Kernel is done and noted with its arguments; memory
that the code between takes comes from an Arena that the recording keeps, so that its addresses stay good. repeat() does
the noted calls again. What changes from step to step reaches them through memory that the caller keeps in its place,
or through cells, arguments that are ctypes objects, whose values are read at each call.

A recording is whole only if nothing but kernels, views and copies ran in it: whatever else torch is asked for spoils
it (`is_whole`), and it must not be repeated. What is not torch's is not seen: numpy's work and Python's decisions are
those of the recorded step for ever. Used by workers/models/layer_loop.py.
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
_aten = torch.ops.aten
EMPTY = {_aten.empty.memory_format, _aten.empty_like.default}
GIVEN = {_aten.lift_fresh.default, _aten.detach_.default}
"""How numbers of numpy's or Python's become tensors. They are constants of a recording, unless who gives them changes
them: RenewableStep."""


class _Here(threading.local):
    """The recording that is open on this thread."""

    recording: "Recording | None" = None


_here = _Here()


class Kernel:
    """A compiled function that answers nothing. Pointers are given as addresses, or as ctypes arrays."""

    def __init__(self, library: ctypes.CDLL, name: str, *argtypes: Any) -> None:
        self._function = library[name]  # an object of our own: attributes of the library would be shared
        self._function.restype = None
        self._function.argtypes = argtypes

    def __call__(self, *args: Any) -> None:
        if (recording := _here.recording) is not None:
            recording.note(self._function, args)
        self._function(*args)


def keep(*things: object) -> None:
    """What a call that is being recorded reads by address lives as long as the recording."""
    if _here.recording is not None:
        _here.recording.kept += things


class Scratch:
    """Floats that one call writes and reads; what they hold is nobody's afterwards. Recorded calls follow it when it
    grows: `address` is a cell, a ctypes object. Not torch's memory: it outlives a layer, and no arena may give it."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)
        self.address = ctypes.c_void_p()

    def reserve(self, count: int) -> None:
        if self._memory.shape[0] < count:
            self._memory = np.empty(count, np.float32)
            self.address.value = self._memory.ctypes.data


class Arena:
    """Memory for the results between the calls of recordings, of which one is repeated at a time: they share it.

    Two halves take turns, layer by layer: a result lives until the end of the layer after its own.
    """

    def __init__(self) -> None:
        self._halves: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._turn = self._next = 0

    def turn(self) -> None:
        """A layer begins."""
        self._turn, self._next = 1 - self._turn, 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """A chunk of at least that many bytes; who records keeps it, for a greater one may take its place here."""
        half = self._halves[self._turn]
        if self._next == len(half):
            half.append(torch.empty(0, dtype=torch.uint8))
        if half[self._next].shape[0] < num_bytes:
            half[self._next] = torch.empty(max(LEAST_CHUNK_BYTES, 1 << num_bytes.bit_length()), dtype=torch.uint8)
        self._next += 1
        return half[self._next - 1]


class Recording(TorchDispatchMode):  # type: ignore[misc]
    """The calls of one step's layers, in order."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.is_whole = True
        self.kept: list[object] = []
        self._arena = arena
        self._constants: dict[tuple[Any, Any], Any] = {}
        self._calls: list[tuple[Callable[..., object], Sequence[Any]]] = []

    def note(self, function: Any, args: Sequence[Any]) -> None:
        self._calls.append((function, [*map(self._as_c, args, function.argtypes)]))

    def _as_c(self, arg: Any, kind: Any) -> Any:
        """What ctypes would make of it at each call; one object for equal ones."""
        if isinstance(arg, (kind, ctypes.Array)):
            return arg
        return self._constants.setdefault((kind, arg), kind(arg))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks it of a mode's class. True imports its compiler at the first call: a second, 900 modules and a
        folder in the temporary one, to say that it has no part in this."""
        return False

    def repeat(self) -> None:
        """All of it again, in order. Under torch.inference_mode, as it was recorded."""
        assert self.is_whole
        for function, args in self._calls:
            function(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in EMPTY:
            return self._empty(func(*args, **kwargs))
        out = func(*args, **kwargs)
        if func is _aten.copy_.default and not kwargs:
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
    """Whether an operation has answered tensors, and no memory but that of its arguments."""
    return bool(_tensors(out)) and {*map(_begin, _tensors(out))} <= {*map(_begin, _tensors(args))}


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _begin(tensor: torch.Tensor) -> int:
    """Where its memory begins; oneDNN does not tell."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


@contextmanager
def recording(arena: Arena) -> Iterator[Recording]:
    """Records what this thread does meanwhile; it is done as well."""
    assert _here.recording is None, "one at a time"
    opened = Recording(arena)
    _here.recording = opened
    try:
        with opened:
            yield opened
    finally:
        _here.recording = None
