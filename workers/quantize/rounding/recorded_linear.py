"""RecordedLinear: a dense linear layer that takes sums over its inputs, of which rounders and scale searches are made.

T tokens, I inputs, O outputs. Everything in float32.
"""

from collections.abc import Sequence

import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import Place, as_given
from tandem.parallel.params import Param
from tandem.parallel.quantization.coded import UndoneMethod
from tandem.parallel.quantization.int8 import quantize_inputs


class InputStats:
    """Sums over the inputs x_TI of a linear layer: x.T @ x, of which any rounding's error in its outputs follows; |x|;
    and the largest |x| of each input."""

    def __init__(self, inputs: int) -> None:
        self.tokens = 0
        self.products_II = torch.zeros(inputs, inputs)
        self.magnitude_I = torch.zeros(inputs)
        self.largest_I = torch.zeros(inputs)

    def add(self, x_TI: torch.Tensor) -> None:
        """Adds the inputs of some tokens."""
        self.tokens += len(x_TI)
        self.products_II.addmm_(x_TI.T, x_TI)
        self.magnitude_I += x_TI.abs().sum(0)
        if len(x_TI):
            torch.maximum(self.largest_I, x_TI.abs().amax(0), out=self.largest_I)

    def divide(self, scale_I: torch.Tensor) -> None:
        """Makes them the sums of inputs that are divided by a scale."""
        self.products_II.div_(scale_I[:, None]).div_(scale_I)
        self.magnitude_I.div_(scale_I)
        self.largest_I.div_(scale_I)

    def error(self, change_OI: torch.Tensor) -> float:
        """Returns the sum, over tokens and outputs, of the squares that a change of the weights adds to outputs."""
        return max(0.0, float((change_OI @ self.products_II).mul_(change_OI).sum(dtype=torch.float64)))


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

    def rows_of(self, param: Param) -> slice:
        """Returns the outputs of one of its projections."""
        start = 0
        for one in self.params:
            if one is param:
                return slice(start, start + param.shape[0])
            start += one.shape[0]
        raise KeyError(param.name)
