"""The twin of a CUDA graph on the CPU: records the aten calls of a body with their tensors, and runs them again.

As in a graph, every result keeps its memory: replay() writes new results into the recorded ones, so inputs change only
by copies into the tensors that the body was captured with, and what Python decided or read stays as it was. A capture
refuses what a graph cannot hold: values read on the host, sizes that depend on data, tensors made from Python's or
numpy's values, blocking copies between devices, and compiled kernels, which no dispatch mode sees. Collectives that are
given to it are not carried out in a capture, but in each replay. Ranks may be threads.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from zlib import crc32

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.parallel.exchange.collectives import Collectives, Pending
from tandem.workers.graphs.cuda_graphs import Replay
from tandem.workers.graphs.graph_runner import Outputs
from tandem.workers.kernels.cpu.cpu_calls import Kernel

_aten = torch.ops.aten
FRESH = {_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default}
INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
COPIES = {_aten.copy_.default, _aten._to_copy.default}
UNSEEN = ((Kernel, "__call__"), (torch, "frombuffer"), (torch.Tensor, "tolist"), (torch.Tensor, "numpy"))


class _Here(threading.local):
    """The graphs that this thread captures, and replays."""

    capture: "RecordedGraph | None" = None
    replay: "RecordedGraph | None" = None


here = _Here()


class RefusedError(RuntimeError):
    """A body did what a graph cannot hold."""


class RecordedGraph(TorchDispatchMode):  # type: ignore[misc]
    """A captured body. outputs: what it returned. refused: how often it called each refused operator. number: tells it
    from captures that exchange tensors of other shapes, and is the same on all ranks, though one of them draws."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: Any = None
        self.refused: Counter[str] = Counter()
        self.number = 0
        self._calls: list[tuple[Any, Sequence[Any], dict[str, Any], list[torch.Tensor]]] = []
        self._exchanged: list[tuple[int, ...]] = []

    def hold(self, call: Callable[[], object], shape: tuple[int, ...]) -> None:
        """Carries out an exchange in each replay, in its turn. shape: of what is exchanged."""
        self._calls.append((call, (), {}, []))
        self._exchanged.append(shape)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and the guard against that costs more than most operations

    @classmethod
    def capture(cls, body: Callable[[], Any], tolerated: frozenset[str] = frozenset()) -> "RecordedGraph":
        """Runs the body and records it. RefusedError names all refused operators that are not tolerated; a tolerated
        one's result is a constant of the graph."""
        graph = cls()
        with torch.no_grad(), _watched(), graph:
            here.capture = graph
            try:
                graph.outputs = body()
            finally:
                here.capture = None
        if unknown := {name: count for name, count in graph.refused.items() if name not in tolerated}:
            raise RefusedError(f"a graph cannot hold {unknown}")
        graph.number = 1 + crc32(repr(graph._exchanged).encode())
        return graph

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @torch.no_grad()
    def replay(self) -> Any:
        """Runs the calls again, in order, and returns `outputs`, whose tensors have the new values."""
        here.replay = self
        try:
            for func, args, kwargs, recorded in self._calls:
                results = func(*args, **kwargs)
                if len(recorded) == 1 and isinstance(results, torch.Tensor):
                    recorded[0].copy_(results)
                elif recorded:
                    for old, new in zip(recorded, _tensors(results), strict=True):
                        old.copy_(new)
        finally:
            here.replay = None
        return self.outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if _is_refused(func, args, kwargs):
            self.refused[str(func)] += 1
        elif _is_mutable(func):
            self._calls.append((func, args, kwargs, []))
        elif not (func in FRESH or _are_views(results, (args, kwargs))):
            self._calls.append((func, args, kwargs, _tensors(results)))
        return results


class RecordedCollectives:
    """Collectives that a capture holds, as it holds NCCL's. Where they are carried out, all ranks of the group have a
    replay under way or none has: NCCL demands it, and here it is checked."""

    def __init__(self, group: Collectives, size: int) -> None:
        self._group = group
        self._size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        def carry_out() -> None:
            self._check()
            total = self._group.all_reduce(tensor)
            if total is not tensor:
                tensor.copy_(total)

        self._do(carry_out, tensor)
        return tensor

    def all_gather(self, parts_R: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        def carry_out() -> None:
            self._check()
            self._group.all_gather(parts_R, tensor)

        self._do(carry_out, tensor)
        return parts_R

    def gather(self, parts_R: torch.Tensor | None, tensor: torch.Tensor) -> None:
        def carry_out() -> None:
            self._check()
            self._group.gather(parts_R, tensor)

        self._do(carry_out, tensor)

    def isend(self, tensor: torch.Tensor, peer: int) -> Pending:
        return self._group.isend(tensor, peer)

    def recv(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        return self._group.recv(tensor, peer)

    def close(self) -> None:
        self._group.close()

    def _do(self, call: Callable[[], None], exchanged: torch.Tensor) -> None:
        if here.capture is None:
            call()
        else:
            here.capture.hold(call, tuple(exchanged.shape))

    def _check(self) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            mine = 0 if here.replay is None else here.replay.number
            total = int(self._group.all_reduce(torch.tensor([mine])))
        assert total == self._size * mine, "an operation of a replay has met an eager one, or another replay's"


def recorded(body: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
    """The CaptureGraph of a CudaPlatform."""
    graph = RecordedGraph.capture(body)
    return graph.replay, graph.outputs


def recorded_with_launches(body: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
    """The same, of a body that launches Triton's kernels, in its interpreter: each replay launches them in their turn,
    on the same memory and with the same numbers."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        graph, here.capture = here.capture, None
        with torch.utils._python_dispatch._disable_current_modes():
            launch(executor, *args, **kwargs)
        here.capture = graph
        if graph is not None:
            graph.hold(lambda: launch(executor, *args, **kwargs), (0,))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launched)
        return recorded(body)


_watching, _watchers = threading.Lock(), [0]
_patch = pytest.MonkeyPatch()


@contextmanager
def _watched() -> Iterator[None]:
    """Counts calls that a dispatch mode does not see: compiled kernels, views of the host's memory, and on a CPU the
    tensors' methods that give their values to Python. Those of threads that capture nothing do not count."""

    def counting(owner: Any, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if here.capture is not None:
                here.capture.refused[f"{owner.__name__}.{name}"] += 1
            return original(*args, **kwargs)

        return counted

    with _watching:
        _watchers[0] += 1
        if _watchers[0] == 1:
            for owner, name in UNSEEN:
                _patch.setattr(owner, name, counting(owner, name))
    try:
        yield
    finally:
        with _watching:
            _watchers[0] -= 1
            if not _watchers[0]:
                _patch.undo()


@cache
def _is_mutable(func: Any) -> bool:
    return bool(func._schema.is_mutable)


@cache
def _is_never_held(func: Any) -> bool:
    """Returns whether a graph cannot hold any call of this operator."""
    if func is _aten.lift_fresh.default or torch.Tag.data_dependent_output in func.tags:
        return True
    # a number for the host
    return any(not isinstance(returned.type, torch.TensorType | torch.ListType) for returned in func._schema.returns)


def _is_refused(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns whether a graph cannot hold this call."""
    if _is_never_held(func):
        return True
    if func in INDEXED:
        return any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in args[1])
    if func in COPIES:
        devices = {tensor.device for tensor in _tensors(args)} | {kwargs.get("device") or args[0].device}
        return len(devices) > 1 and not (kwargs.get("non_blocking") or True in args[2:])
    return torch.Tag.dynamic_output_shape in func.tags


def _are_views(results: Any, arguments: Any) -> bool:
    """Returns whether all results lie in the arguments' memory."""
    ours = {tensor.untyped_storage().data_ptr() for tensor in _tensors(results)}
    return bool(ours) and ours <= {tensor.untyped_storage().data_ptr() for tensor in _tensors(arguments)}


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
