"""Linear layers sharded over the TP axis: by columns (outputs) without communication, by rows (inputs) with one
all-reduce.

The pair needs one collective per attention or MLP block (Shoeybi et al. 2019, Megatron-LM). Built by workers/models;
filled by checkpoint.py through `slots`. T tokens, I inputs, O outputs, all of this rank unless stated otherwise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import MakeMatrix, Matrix
from tandem.parallel.params import Init, ParameterSlot, ShardSpec, Slice, even_range


@dataclass(frozen=True, slots=True)
class Projection:
    """One checkpoint layer inside a merged one: its `name` without suffix, its total outputs, and this rank's range of
    them."""

    name: str
    total: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The range [start, start + length) of `total` inputs or outputs. It may extend beyond them (a padded
    vocabulary)."""

    total: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One checkpoint layer's shard on this rank. `column`: its first output in the merged layer's."""

    name: str
    inputs: Shard
    outputs: Shard
    column: int = 0


class LoraHook(Protocol):
    """Adds the adapters' part to a linear layer's product, in place, before any sum over ranks (workers/lora)."""

    def __call__(self, y_TO: torch.Tensor, x_TI: torch.Tensor, /) -> None:
        """Adds to y_TO, this rank's outputs. x: this rank's inputs; for the embedding, token ids [T]."""
        ...


class AdaptableLinear(Protocol):
    """A linear layer that accepts a LoRA hook."""

    lora_hook: LoraHook | None

    @property
    def parts(self) -> tuple[LinearPart, ...]:
        """The checkpoint layers that it merges, in the order of their columns."""
        ...


class ColumnParallelLinear:
    """y_TO = x_TI @ W.T + b: this rank's columns of one or several checkpoint layers, merged into one matmul.

    The input is whole on every rank; the output is [projection 0's columns | projection 1's columns | ...].
    """

    def __init__(self, inputs: int, projections: Sequence[Projection], bias: bool, make: MakeMatrix) -> None:
        self._inputs = inputs
        self._projections = tuple(projections)
        self._has_bias = bias
        self._make = make
        self._bias_O: torch.Tensor | None = None
        self._matrix: Matrix | None = None
        self.lora_hook: LoraHook | None = None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        assert self._matrix is not None, "not loaded"
        y_TO = self._matrix(x_TI)
        if self.lora_hook is not None:
            self.lora_hook(y_TO, x_TI)
        return y_TO

    @property
    def parts(self) -> tuple[LinearPart, ...]:
        inputs = Shard(self._inputs, 0, self._inputs)
        columns = accumulate((p.length for p in self._projections), initial=0)
        return tuple(
            LinearPart(p.name, inputs, Shard(p.total, p.start, p.length), column)
            for p, column in zip(self._projections, columns, strict=False)
        )

    def slots(self) -> Iterator[ParameterSlot]:
        """Yields the bias first, so that the matrix is packed when its weight arrives."""
        if self._has_bias:
            biases = tuple(Slice(f"{p.name}.bias", (p.total,), 0, p.start, p.length) for p in self._projections)
            yield ParameterSlot(ShardSpec(biases, Init.ZEROS), self._accept_bias)
        weights = tuple(
            Slice(f"{p.name}.weight", (p.total, self._inputs), 0, p.start, p.length) for p in self._projections
        )
        yield ParameterSlot(ShardSpec(weights), self._accept_weight)

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
        make: MakeMatrix,
    ) -> None:
        self._name = name
        self._inputs = Shard(total_inputs, *even_range(total_inputs, context.tp_rank, context.tp_size))
        self._outputs = outputs
        self._has_bias = bias
        self._make = make
        self._context = context
        self._bias_O: torch.Tensor | None = None
        self._matrix: Matrix | None = None
        self.lora_hook: LoraHook | None = None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        assert self._matrix is not None, "not loaded"
        y_TO = self._matrix(x_TI)
        if self.lora_hook is not None:
            self.lora_hook(y_TO, x_TI)
        if self._context.tp_size == 1:
            return y_TO
        y_TO = self._context.tp.all_reduce(y_TO)
        return y_TO if self._bias_O is None else y_TO + self._bias_O

    @property
    def parts(self) -> tuple[LinearPart, ...]:
        return (LinearPart(self._name, self._inputs, Shard(self._outputs, 0, self._outputs)),)

    def slots(self) -> Iterator[ParameterSlot]:
        if self._has_bias:
            bias = Slice(f"{self._name}.bias", (self._outputs,))
            yield ParameterSlot(ShardSpec((bias,), Init.ZEROS), self._accept_bias)
        start, length = self._inputs.start, self._inputs.length
        weight = Slice(f"{self._name}.weight", (self._outputs, self._inputs.total), 1, start, length)
        yield ParameterSlot(ShardSpec((weight,)), self._accept_weight)

    def _accept_bias(self, bias_O: torch.Tensor) -> None:
        self._bias_O = bias_O

    def _accept_weight(self, weight_OI: torch.Tensor) -> None:
        self._matrix = self._make(weight_OI, self._bias_O if self._context.tp_size == 1 else None)
