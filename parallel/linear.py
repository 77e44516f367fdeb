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

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import LinearMethod, MakeMethod
from tandem.parallel.params import Param, Source, Span

Slots = Iterator[ParameterSlot]


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One projection's shard on this rank. `column`: its first output in the merged layer's. module: the checkpoint's
    layer by which adapters name it. source: where its outputs are in that layer's; None: they are all of them."""

    name: str
    inputs: Span
    outputs: Span
    column: int = 0
    module: str = ""
    source: Source | None = None

    def module_rows(self) -> list[tuple[int, int]]:
        """Returns (first, count) of the module's outputs that this rank has of the projection, in order."""
        if self.source is None:
            return [(self.outputs.start, self.outputs.length)]
        return list(self.source.stored(self.outputs.start, self.outputs.length))


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


class Linear:
    """A linear layer on one rank: one or several projections of the checkpoint in one matmul, whose outputs stand side
    by side. weights: their matrices; biases: of all of them, or none."""

    def __init__(
        self, weights: Sequence[Param], biases: Sequence[Param], context: ParallelContext, make: MakeMethod
    ) -> None:
        assert len(biases) in (0, len(weights)), "a bias of some projections only"
        self._weights = tuple(weights)
        self._biases = tuple(biases)
        self._context = context
        self._method: LinearMethod = make(self._weights, context)
        self._bias_O: torch.Tensor | None = None
        self.lora_hook: LoraHook | None = None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        y_TO = self._method.apply(x_TI)
        if self.lora_hook is not None:
            self.lora_hook(y_TO, x_TI)
        return y_TO

    @property
    def parts(self) -> tuple[LinearPart, ...]:
        mesh = self._context.mesh
        spans = [(param.span(1, mesh), param.span(0, mesh)) for param in self._weights]
        columns = accumulate((outputs.length for _, outputs in spans), initial=0)
        return tuple(
            LinearPart(param.stem, inputs, outputs, column, param.module, param.family or param.source)
            for param, (inputs, outputs), column in zip(self._weights, spans, columns, strict=False)
        )

    def slots(self) -> Slots:
        """Yields the bias first, so that the method has it when its weight arrives."""
        if self._biases:
            yield ParameterSlot(self._biases, self._accept_bias)
        yield from self._method.slots(self._weights, self._bias_of_product)

    def _accept_bias(self, bias_O: torch.Tensor) -> None:
        self._bias_O = bias_O

    def _bias_of_product(self) -> torch.Tensor | None:
        return self._bias_O


class ColumnParallelLinear(Linear):
    """y_TO = x_TI @ W.T + b: this rank's columns. The input is whole on every rank."""


class RowParallelLinear(Linear):
    """y_TO = sum over ranks of x_TI @ W_OI.T, + b: this rank's rows (inputs).

    The input is this rank's share; the output is whole and equal on every rank. The bias is added once, after the sum.
    """

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        y_TO = super().__call__(x_TI)
        if self._context.tp_size == 1:
            return y_TO
        y_TO = self._context.tp.all_reduce(y_TO)
        return y_TO if self._bias_O is None else y_TO + self._bias_O

    def _bias_of_product(self) -> torch.Tensor | None:
        return self._bias_O if self._context.tp_size == 1 else None
