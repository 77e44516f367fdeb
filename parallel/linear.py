"""Linear layers cut over the TP axis: by columns (outputs) without talking, by rows (inputs) with one all-reduce.

The pair needs one collective per attention or MLP block (Shoeybi et al. 2019, Megatron-LM). Built by workers/models;
filled by checkpoint.py through `slots`. T tokens, I inputs, O outputs, of this rank unless said.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from parallel.context import ParallelContext
from parallel.matmul import MakeMatrix, Matrix, make_matrix
from parallel.shard import Fill, ShardSpec, Slice, WeightSlot, even_range


@dataclass(frozen=True, slots=True)
class Section:
    """One checkpoint layer inside a merged one: `name` without suffix, all its outputs, this rank's range of them."""

    name: str
    total: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Cut:
    """[start, start + length) of `total` inputs or outputs. It may reach beyond them (a padded vocabulary)."""

    total: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One checkpoint layer as this rank holds it; `column`: its first output in the merged layer's."""

    name: str
    inputs: Cut
    outputs: Cut
    column: int = 0


class Delta(Protocol):
    """What is added to a linear layer's product, in place, before any sum over ranks: adapters (workers/lora)."""

    def __call__(self, y_TO: torch.Tensor, x_TI: torch.Tensor, /) -> None:
        """y: this rank's outputs, x: its inputs; of the embedding token ids [T]."""
        ...


class AdaptableLinear(Protocol):
    """A linear layer that a Delta may be added to."""

    delta: Delta | None

    @property
    def parts(self) -> tuple[LinearPart, ...]:
        """Its checkpoint layers, in the order of their columns."""
        ...


class ColumnParallelLinear:
    """y_TO = x_TI @ W.T + b: this rank's columns of one or several checkpoint layers, merged into one matmul.

    The input is whole on every rank; the output is [section 0's columns | section 1's columns | ...].
    """

    def __init__(self, inputs: int, sections: Sequence[Section], bias: bool, make: MakeMatrix = make_matrix) -> None:
        self._inputs = inputs
        self._sections = tuple(sections)
        self._has_bias = bias
        self._make = make
        self._bias_O: torch.Tensor | None = None
        self._matrix: Matrix | None = None
        self.delta: Delta | None = None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        assert self._matrix is not None, "not loaded"
        y_TO = self._matrix(x_TI)
        if self.delta is not None:
            self.delta(y_TO, x_TI)
        return y_TO

    @property
    def parts(self) -> tuple[LinearPart, ...]:
        inputs = Cut(self._inputs, 0, self._inputs)
        columns = accumulate((s.length for s in self._sections), initial=0)
        return tuple(
            LinearPart(s.name, inputs, Cut(s.total, s.start, s.length), column)
            for s, column in zip(self._sections, columns, strict=False)
        )

    def slots(self) -> Iterator[WeightSlot]:
        """The bias comes first, so that the matrix is packed when its weight arrives."""
        if self._has_bias:
            biases = tuple(Slice(f"{s.name}.bias", (s.total,), 0, s.start, s.length) for s in self._sections)
            yield WeightSlot(ShardSpec(biases, Fill.ZEROS), self._accept_bias)
        weights = tuple(
            Slice(f"{s.name}.weight", (s.total, self._inputs), 0, s.start, s.length) for s in self._sections
        )
        yield WeightSlot(ShardSpec(weights), self._accept_weight)

    def _accept_bias(self, bias_O: torch.Tensor) -> None:
        self._bias_O = bias_O

    def _accept_weight(self, weight_OI: torch.Tensor) -> None:
        self._matrix = self._make(weight_OI, self._bias_O)


class RowParallelLinear:
    """y_TO = sum over ranks of x_TI @ W_OI.T, + b: this rank's rows (inputs) of one checkpoint layer.

    The input is this rank's share; the output is whole and equal on every rank. The bias is added once, after the sum.
    """

    def __init__(
        self,
        name: str,
        total_inputs: int,
        outputs: int,
        bias: bool,
        context: ParallelContext,
        make: MakeMatrix = make_matrix,
    ) -> None:
        self._name = name
        self._inputs = Cut(total_inputs, *even_range(total_inputs, context.tp_rank, context.tp_size))
        self._outputs = outputs
        self._has_bias = bias
        self._make = make
        self._context = context
        self._bias_O: torch.Tensor | None = None
        self._matrix: Matrix | None = None
        self.delta: Delta | None = None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        assert self._matrix is not None, "not loaded"
        y_TO = self._matrix(x_TI)
        if self.delta is not None:
            self.delta(y_TO, x_TI)
        if self._context.tp_size == 1:
            return y_TO
        y_TO = self._context.tp.all_reduce(y_TO)
        return y_TO if self._bias_O is None else y_TO + self._bias_O

    @property
    def parts(self) -> tuple[LinearPart, ...]:
        return (LinearPart(self._name, self._inputs, Cut(self._outputs, 0, self._outputs)),)

    def slots(self) -> Iterator[WeightSlot]:
        if self._has_bias:
            bias = Slice(f"{self._name}.bias", (self._outputs,))
            yield WeightSlot(ShardSpec((bias,), Fill.ZEROS), self._accept_bias)
        start, length = self._inputs.start, self._inputs.length
        weight = Slice(f"{self._name}.weight", (self._outputs, self._inputs.total), 1, start, length)
        yield WeightSlot(ShardSpec((weight,)), self._accept_weight)

    def _accept_bias(self, bias_O: torch.Tensor) -> None:
        self._bias_O = bias_O

    def _accept_weight(self, weight_OI: torch.Tensor) -> None:
        self._matrix = self._make(weight_OI, self._bias_O if self._context.tp_size == 1 else None)
