"""Reads matrices from the tensors of a checkpoint's layout: the slots of their parts, and what is done when all are
there."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from tandem.parallel.checkpoint import Holder, ParameterSlot
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Layout, Param
from tandem.parallel.quantization.coded_weight import CodedWeight, undone


class StoredWeights:
    """The matrices that one product merges. done: is called with all of them, in order."""

    def __init__(self, weights: Sequence[Param], mesh: Mesh, done: Callable[[list[CodedWeight]], None]) -> None:
        self._weights = weights
        self._mesh = mesh
        self._done = done
        self._tensors: list[torch.Tensor] = []
        self._coded: list[CodedWeight] = []

    def slots(self, holder: Holder) -> Iterator[ParameterSlot]:
        """Yields the slots of all parts, matrix by matrix. holder: has them in the end."""
        for weight in self._weights:
            layout = layout_of(weight)
            parts = layout.stored(weight)
            for place, part in enumerate(parts):
                is_last = place == len(parts) - 1
                accept = partial(self._take, weight, layout, is_last)
                yield ParameterSlot((part,), accept, holder, as_stored=True, keeps=not is_last)

    def _take(self, weight: Param, layout: Layout, is_last: bool, tensor: torch.Tensor) -> None:
        self._tensors.append(tensor)
        if not is_last:
            return
        self._coded.append(layout.coded(weight, self._tensors, self._mesh))
        self._tensors = []
        if len(self._coded) == len(self._weights):
            coded, self._coded = self._coded, []
            self._done(coded)


class UndoneTable:
    """The table that ids are looked up in, which a checkpoint has as codes: undone in `dtype`, as rows are read.
    accept: takes it. nbytes: that it has."""

    def __init__(self, table: Param, mesh: Mesh, dtype: torch.dtype, accept: Callable[[torch.Tensor], None]) -> None:
        self._table, self._mesh, self._dtype, self._accept = table, mesh, dtype, accept
        self.nbytes = 0

    def slots(self) -> Iterator[ParameterSlot]:
        """Yields the slots of its parts."""
        yield from StoredWeights((self._table,), self._mesh, self._take).slots(self)

    def _take(self, coded: Sequence[CodedWeight]) -> None:
        table_VH = undone(coded[0], self._dtype)
        self.nbytes = table_VH.nbytes
        self._accept(table_VH)


def layout_of(weight: Param) -> Layout:
    """Returns the layout of a matrix that a checkpoint stores in one."""
    assert weight.scheme is not None and weight.scheme.layout is not None, weight.name
    return weight.scheme.layout


def is_stored(weights: Sequence[Param]) -> bool:
    """True if a checkpoint has these matrices in a layout."""
    return weights[0].scheme is not None and weights[0].scheme.layout is not None
