"""ExpertMethod: the products with one projection of all experts that a rank holds, each of its own tokens only.

A step's pairs (token, place among its experts) are sorted by expert (Groups), so that every expert has consecutive
rows; an expert without rows is not read. A platform chooses the method as it chooses linear methods
(linear_methods.py). StackedExperts keeps the weights of all experts in one tensor, for kernels that multiply them in
one call; EachExpert has a linear method per expert and serves every form of weights. T tokens, K experts of each, P =
T * K pairs, E experts of this rank, I inputs, O outputs.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import Arrive, Bias, MakeMethod, Place, as_given
from tandem.parallel.params import Param


class Groups(NamedTuple):
    """The pairs of a step by expert; pair t * K + k is the k-th expert of token t. All int32.

    order_P: the pairs, those of this rank's experts first. place_P: where each pair stands in it. ends_E: where each
    expert's pairs end there. top_k: K.
    """

    order_P: torch.Tensor
    place_P: torch.Tensor
    ends_E: torch.Tensor
    top_k: int


class ExpertParams(NamedTuple):
    """One expert's parameters of a projection: those that are merged, outputs behind outputs; biases of all or none."""

    weights: Sequence[Param]
    biases: Sequence[Param]


class ExpertMethod(Protocol):
    """Products of rows with the weights of their experts."""

    def slots(self) -> Iterator[ParameterSlot]:
        """Yields what is to be read, expert by expert."""
        ...

    def apply(self, x: torch.Tensor, groups: Groups, *, gathers: bool) -> torch.Tensor:
        """Returns y_PO in the order of the groups; rows of other ranks' experts are undefined. gathers: x is x_TI, a
        row per token; else x_PI, a row per pair in that order."""
        ...


class MakeExperts(Protocol):
    """Makes the method of one projection. experts: those of this rank."""

    def __call__(
        self, experts: Sequence[ExpertParams], context: ParallelContext, /, place: Place = as_given
    ) -> ExpertMethod: ...


class EachExpert:
    """A linear method for each expert, called for those that have tokens: it waits for the device."""

    def __init__(
        self, make: MakeMethod, experts: Sequence[ExpertParams], context: ParallelContext, place: Place = as_given
    ) -> None:
        self._experts = experts
        self._methods = [make(expert.weights, context, place=place) for expert in experts]
        self._outputs = sum(weight.span(0, context.mesh).length for weight in experts[0].weights)
        self._biases = ExpertBiases(experts, context)

    def slots(self) -> Iterator[ParameterSlot]:
        for index, (expert, method) in enumerate(zip(self._experts, self._methods, strict=True)):
            yield from self._biases.slots(index)
            yield from method.slots(expert.weights, partial(self._biases.of, index))

    def apply(self, x: torch.Tensor, groups: Groups, *, gathers: bool) -> torch.Tensor:
        y_PO, start = x.new_empty(len(groups.order_P), self._outputs), 0
        for method, end in zip(self._methods, groups.ends_E.tolist(), strict=True):
            if start < end:
                rows = groups.order_P[start:end] // groups.top_k if gathers else slice(start, end)
                y_PO[start:end] = method.apply(x[rows])
            start = end
        return y_PO


class ExpertForm(Protocol):
    """The form in which one expert's weight is held. nbytes: without padding, once it is loaded."""

    nbytes: int

    def slots(self, weights: Sequence[Param], bias: Bias) -> Iterator[ParameterSlot]:
        """Yield slots as LinearMethod.slots() does. What it holds has gone through the place that it was made with."""
        ...


class MakeForm(Protocol):
    """Makes the form of one expert's weight. All experts of a layer have forms of the same shape and dtype."""

    def __call__(
        self, weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given
    ) -> ExpertForm: ...


class StackedExperts:
    """The forms of all experts in one tensor [E, ...], which is placed as one, and their biases in another. A kernel's
    subclass multiplies."""

    def __init__(
        self, make: MakeForm, experts: Sequence[ExpertParams], context: ParallelContext, place: Place = as_given
    ) -> None:
        self._experts = experts
        self._forms = [make(expert.weights, context, place=self._place_of(i)) for i, expert in enumerate(experts)]
        self._place = place
        self._waiting = len(experts)
        self._arrive: Arrive | None = None
        self._stack = torch.empty(0)
        self._biases = ExpertBiases(experts, context)
        self._bias_EO: torch.Tensor | None = None
        mesh, first = context.mesh, experts[0].weights
        self.inputs = first[0].span(1, mesh).length
        self.outputs = sum(weight.span(0, mesh).length for weight in first)

    def slots(self) -> Iterator[ParameterSlot]:
        for index, (expert, form) in enumerate(zip(self._experts, self._forms, strict=True)):
            yield from self._biases.slots(index)
            yield from form.slots(expert.weights, lambda: None)

    def weights(self) -> torch.Tensor:
        """Returns the stack, which has arrived."""
        if self._arrive is not None:
            self._arrive()
        return self._stack

    def _place_of(self, index: int) -> Place:
        def take(held: torch.Tensor) -> tuple[torch.Tensor, None]:
            if self._waiting == len(self._experts):
                self._stack = self._room(held)
            mine = self._stack[index].copy_(held)
            self._waiting -= 1
            if not self._waiting:
                self._finish()
            return mine, None

        return take

    def _room(self, held: torch.Tensor) -> torch.Tensor:
        """Returns memory for as many forms as there are experts. held: the first one's."""
        return held.new_empty(len(self._experts), *held.shape)

    def _finish(self) -> None:
        """All experts are there."""
        self._stack, self._arrive = self._place(self._stack)
        self._bias_EO = self._biases.stacked()
        self._forms = []  # which hold the memory that has been placed


class ExpertBiases:
    """The biases of one projection of this rank's experts. Where ranks share an expert's inputs, the first adds its
    bias."""

    def __init__(self, experts: Sequence[ExpertParams], context: ParallelContext) -> None:
        inputs = experts[0].weights[0].span(1, context.mesh)
        self._adds = context.tp_rank == 0 or inputs.length == inputs.total
        self._params = [tuple(expert.biases) for expert in experts]
        self._read: dict[int, torch.Tensor] = {}

    def slots(self, index: int) -> Iterator[ParameterSlot]:
        if self._params[index]:
            yield ParameterSlot(self._params[index], partial(self._read.__setitem__, index))

    def of(self, index: int) -> torch.Tensor | None:
        """Returns what this rank adds to an expert's product."""
        return self._read.get(index) if self._adds else None

    def stacked(self) -> torch.Tensor | None:
        """Returns them as bias_EO, contiguous."""
        if not self._adds or not self._read:
            return None
        return torch.stack([self._read[index] for index in range(len(self._params))])
