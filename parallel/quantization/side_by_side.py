"""by_scheme(): one product for weights of one scheme; for merged ones whose schemes differ, or that are multiplied each
by itself, products whose outputs stand side by side."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import Bias, LinearMethod, MakeMethod, Place, as_given
from tandem.parallel.params import Param, Scheme


def by_scheme(makes: Callable[[Scheme | None], MakeMethod]) -> MakeMethod:
    """Returns what makes methods by the schemes of weights. makes: what makes those of one scheme."""

    def make(weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given) -> LinearMethod:
        schemes = dict.fromkeys(weight.scheme for weight in weights)
        scheme = next(iter(schemes), None)
        if len(weights) <= 1 or (len(schemes) == 1 and not (scheme is not None and scheme.apart)):
            return makes(scheme)(weights, context, place=place)
        return SideBySide([makes(weight.scheme)((weight,), context, place=place) for weight in weights])

    return make


class SideBySide(LinearMethod):
    """A method for each of the merged weights."""

    is_copy = True

    def __init__(self, methods: Sequence[LinearMethod]) -> None:
        self._methods = tuple(methods)
        self._bias_O: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(method.nbytes for method in self._methods)

    def slots(self, weights: Sequence[Param], bias: Bias) -> Iterator[ParameterSlot]:
        for place, (method, weight) in enumerate(zip(self._methods, weights, strict=True)):
            is_last = place == len(self._methods) - 1
            yield from method.slots((weight,), partial(self._accept_bias, bias) if is_last else lambda: None)

    def take(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        raise AssertionError("each of its weights has slots of its own")

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        y_TO = torch.cat([method.apply(x_TI) for method in self._methods], dim=1)
        return y_TO if self._bias_O is None else y_TO.add_(self._bias_O)

    def _accept_bias(self, bias: Bias) -> None:
        self._bias_O = bias()
