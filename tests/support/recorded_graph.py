"""The twin of a CUDA graph on the CPU: records the aten calls of a body with their tensors, and runs them again.

As in a graph, every result keeps its memory: replay() writes new results into the recorded ones, so inputs change only
by copies into the tensors that the body was captured with, and what Python decided or read stays as it was. A capture
refuses what a graph cannot hold: values read on the host, sizes that depend on data, tensors made from Python's or
numpy's values, blocking copies between devices, and compiled kernels, which no dispatch mode sees.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.workers.kernels.cpu.cpu_calls import Kernel

_aten = torch.ops.aten
FRESH = {_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default}
INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
COPIES = {_aten.copy_.default, _aten._to_copy.default}
UNSEEN = ((Kernel, "__call__"), (torch, "frombuffer"), (torch.Tensor, "tolist"), (torch.Tensor, "numpy"))


class RefusedError(RuntimeError):
    """A body did what a graph cannot hold."""


class RecordedGraph(TorchDispatchMode):  # type: ignore[misc]
    """A captured body. outputs: what it returned. refused: how often it called each refused operator."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: Any = None
        self.refused: Counter[str] = Counter()
        self._calls: list[tuple[Any, Sequence[Any], dict[str, Any], Any]] = []

    @classmethod
    def capture(cls, body: Callable[[], Any], tolerated: frozenset[str] = frozenset()) -> "RecordedGraph":
        """Runs the body and records it. RefusedError names all refused operators that are not tolerated; a tolerated
        one's result is a constant of the graph."""
        graph = cls()
        with torch.no_grad(), _watched(graph.refused), graph:
            graph.outputs = body()
        if unknown := {name: count for name, count in graph.refused.items() if name not in tolerated}:
            raise RefusedError(f"a graph cannot hold {unknown}")
        return graph

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @torch.no_grad()
    def replay(self) -> Any:
        """Runs the calls again, in order, and returns `outputs`, whose tensors have the new values."""
        for func, args, kwargs, recorded in self._calls:
            results = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for old, new in zip(_tensors(recorded), _tensors(results), strict=True):
                    old.copy_(new)
        return self.outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if _is_refused(func, args, kwargs):
            self.refused[str(func)] += 1
        elif func._schema.is_mutable or not (func in FRESH or _are_views(results, (args, kwargs))):
            self._calls.append((func, args, kwargs, results))
        return results


@contextmanager
def _watched(refused: Counter[str]) -> Iterator[None]:
    """Counts calls that a dispatch mode does not see: compiled kernels, views of the host's memory, and on a CPU the
    tensors' methods that give their values to Python."""

    def counting(owner: Any, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            refused[f"{owner.__name__}.{name}"] += 1
            return original(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in UNSEEN:
            patch.setattr(owner, name, counting(owner, name))
        yield


def _is_refused(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns whether a graph cannot hold this call."""
    if func is _aten.lift_fresh.default or torch.Tag.data_dependent_output in func.tags:
        return True
    if any(not isinstance(returned.type, torch.TensorType | torch.ListType) for returned in func._schema.returns):
        return True  # a number for the host
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
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
