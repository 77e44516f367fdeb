"""RecordedLinear: a dense linear layer that takes sums over its inputs, of which rounders and scale searches are made.

T tokens, I inputs, O outputs. Everything in float32.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import Place, as_given
from tandem.parallel.params import Param
from tandem.parallel.quantization.coded import UndoneMethod
from tandem.parallel.quantization.int8 import quantize_inputs
from tandem.workers.quantize.rounding.integer_grid import IntegerGrid, RoundedMatrix, pieces_of
from tandem.workers.quantize.rounding.threads import one_thread

STRIPS = 4
"""Parts of the products of inputs, of which what is left of the diagonal is not computed: it mirrors the rest."""


class InputStats:
    """Sums over the inputs x_TI of a linear layer: x.T @ x, of which any rounding's error in its outputs follows; |x|;
    and the largest |x| of each input. They are whole behind finish()."""

    def __init__(self, inputs: int) -> None:
        self.tokens = 0
        self.products_II = torch.zeros(inputs, inputs)
        self.magnitude_I = torch.zeros(inputs)
        self.largest_I = torch.zeros(inputs)

    def add(self, x_TI: torch.Tensor) -> None:
        """Adds the inputs of some tokens."""
        self.tokens += len(x_TI)
        for strip in self._strips():
            self.products_II[strip, strip.start :].addmm_(x_TI[:, strip].T, x_TI[:, strip.start :])
        self.magnitude_I += x_TI.abs().sum(0)
        if len(x_TI):
            torch.maximum(self.largest_I, x_TI.abs().amax(0), out=self.largest_I)

    def finish(self) -> None:
        """Completes the sums: no tokens come any more."""
        for strip in self._strips():
            self.products_II[strip.stop :, strip] = self.products_II[strip, strip.stop :].T

    def _strips(self) -> Iterator[slice]:
        inputs = len(self.products_II)
        step = -(-inputs // STRIPS)
        yield from (slice(first, min(first + step, inputs)) for first in range(0, inputs, step))

    def divide(self, scale_I: torch.Tensor) -> None:
        """Makes them the sums of inputs that are divided by a scale."""
        self.products_II.div_(scale_I[:, None]).div_(scale_I)
        self.magnitude_I.div_(scale_I)
        self.largest_I.div_(scale_I)

    def error(self, outputs: int, change_of: Callable[[slice], torch.Tensor]) -> float:
        """Returns the sum, over tokens and outputs, of the squares that a change of the weights adds to outputs.
        change_of: makes the change [.., I] of some outputs, which are asked for piece by piece."""
        total = 0.0
        for rows in pieces_of(outputs, len(self.products_II)):
            with one_thread():  # small operations
                change_OI = change_of(rows)
            for strip in self._strips():
                product_OJ = change_OI[:, strip] @ self.products_II[strip, strip.start :]
                with one_thread():
                    product_OJ.mul_(change_OI[:, strip.start :])
                    product_OJ[:, strip.stop - strip.start :].mul_(2)  # what mirrors it counts too
                    total += float(product_OJ.sum(dtype=torch.float64))
        return max(0.0, total)


class RecordedLinear(UndoneMethod):
    """Projections that share their inputs, as the decoder merges them, with dense weights, whatever the checkpoint
    has. stats: takes sums while it is given. rounds_inputs: each token's inputs are rounded to int8 first."""

    def __init__(self, weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given) -> None:
        super().__init__(torch.float32, weights, context, place=place)
        self.params = tuple(weights)
        self.stats: InputStats | None = None
        self.rounds_inputs = False

    @property
    def inputs(self) -> int:
        return self.params[0].shape[1]

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self.stats is not None:
            self.stats.add(x_TI)
        if self.rounds_inputs:
            codes_TI, scale_T1 = quantize_inputs(x_TI)
            x_TI = codes_TI * scale_T1
        return super().apply(x_TI)

    def error(self, matrix: RoundedMatrix) -> float:
        """Returns what a rounding of the weights adds to outputs, as a share of these, by lengths."""
        assert self.stats is not None, "no inputs were recorded"
        weight_OI = self.weight()
        change = self.stats.error(len(weight_OI), lambda rows: matrix.rows(rows).dense_OI().sub_(weight_OI[rows]))
        whole = self.stats.error(len(weight_OI), lambda rows: weight_OI[rows])
        return math.sqrt(change / whole) if whole > 0 else 0.0

    def error_by_nearest(self, grid: IntegerGrid) -> float:
        """Returns error() of rounding to nearest."""
        return self.error(grid.round(self.weight()))

    def rows_of(self, param: Param) -> slice:
        """Returns the outputs of one of its projections."""
        start = 0
        for one in self.params:
            if one is param:
                return slice(start, start + param.shape[0])
            start += one.shape[0]
        raise KeyError(param.name)
