"""Products of a few rows on GPUs: for each shape of a weight, the kernel of kernels/triton/triton_few_rows.py where a
measurement on this device says that cuBLAS leaves bandwidth unused and the kernel is faster; else cuBLAS.

Chosen once, when a rank has its weights (Platform.settle), and kept in memory. One plan serves all numbers of rows that
the kernel takes, so a row's bits do not depend on how many there are up to MOST_ROWS; above, cuBLAS sums in an order of
its own.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import DenseMethod, LinearMethod, MakeMethod, Place, as_given
from tandem.parallel.params import Param
from tandem.workers.kernels.triton.triton_few_rows import (
    MOST_ROWS,
    VECTOR,
    FewRowsPlan,
    few_rows_plans,
    multiply_few_rows,
)

log = logging.getLogger(__name__)

ENOUGH: Final = 0.85
"""The share of the bandwidth from which on cuBLAS keeps a shape."""
FASTER: Final = 0.95
"""The share of cuBLAS's time that the kernel must not take more of."""
LEAST_BYTES: Final = 2**28
"""Weights of a shape, fewer of which could be read from a device's cache: nothing is measured then."""
MOST_WEIGHTS: Final = 64
"""Weights of a shape that are multiplied in a measurement."""
MOST_APART: Final = 2**-5
"""The most by which results may differ, beside the largest number: some roundings of bf16."""

Seconds = Callable[[Callable[[], Sequence[torch.Tensor]]], float]
"""Measures how long a call takes on the device."""


class FewRowsMethod(DenseMethod):
    """The weight as it is. plan: by which up to MOST_ROWS rows are multiplied; None: by F.linear, as more are."""

    def __init__(self, register: Callable[["FewRowsMethod"], object], place: Place = as_given) -> None:
        super().__init__(place)
        self.plan: FewRowsPlan | None = None
        self._register = register

    def take(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        super().take(weight_OI, bias_O)
        weight_OI = self.weight()
        suits = weight_OI.element_size() == 2 and weight_OI.is_contiguous() and weight_OI.shape[1] % VECTOR.value == 0
        if self._arrive is None and suits:
            self._register(self)

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self.plan is None or not 0 < len(x_TI) <= MOST_ROWS:
            return super().apply(x_TI)
        return multiply_few_rows(x_TI, self.weight(), self._bias_O, self.plan)


def few_rows_methods(choice: "FewRowsChoice") -> MakeMethod:
    """Returns the MakeMethod of FewRowsMethods that are measured together."""

    def make(weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given) -> LinearMethod:
        return FewRowsMethod(choice.add, place)

    return make


class Measured(NamedTuple):
    """The result for a shape. plan: None for cuBLAS; seconds: of a product by it, and of cuBLAS's."""

    plan: FewRowsPlan | None
    seconds: float
    seconds_of_cublas: float

    def line(self, weight_OI: torch.Tensor, bandwidth: float) -> str:
        """Returns words on it. bandwidth: bytes a second."""
        outputs, inputs = weight_OI.shape
        us, us_of_cublas, us_to_read = (
            1e6 * s for s in (self.seconds, self.seconds_of_cublas, weight_OI.nbytes / bandwidth)
        )
        ours = (
            ""
            if self.plan is None
            else f"{us:.1f} us in tiles of {self.plan.tile.outputs} and {self.plan.spans} spans, "
        )
        return (
            f"products of a row with {outputs} x {inputs}: {ours}cuBLAS {us_of_cublas:.1f} us, {us_to_read:.1f} to read"
        )


class FewRowsChoice:
    """The methods of a rank's weights, and what is measured for each of their shapes."""

    def __init__(self, multiprocessors: int) -> None:
        self._multiprocessors = multiprocessors
        self._methods: dict[tuple[torch.Size, torch.dtype], list[FewRowsMethod]] = {}

    def add(self, method: FewRowsMethod) -> None:
        weight_OI = method.weight()
        self._methods.setdefault((weight_OI.shape, weight_OI.dtype), []).append(method)

    @torch.inference_mode()
    def settle(self, seconds_of: Seconds) -> tuple[str, ...]:
        """Measures the shapes that were added and gives their methods plans; returns a line on each."""
        shapes = [methods for methods in self._methods.values() if sum(one.nbytes for one in methods) >= LEAST_BYTES]
        self._methods = {}
        if not shapes:
            return ()
        largest = max((method.weight() for methods in shapes for method in methods), key=lambda weight: weight.nbytes)
        bandwidth, lines = largest.nbytes / seconds_of(lambda: [largest.view(torch.int32).max()]), []
        for methods in shapes:
            weights = [method.weight() for method in methods[:MOST_WEIGHTS]]
            found = measure(weights, self._multiprocessors, bandwidth, seconds_of)
            for method in methods:
                method.plan = found.plan
            lines.append(found.line(weights[0], bandwidth))
        return tuple(lines)


def measure(weights: Sequence[torch.Tensor], multiprocessors: int, bandwidth: float, seconds_of: Seconds) -> Measured:
    """Returns what multiplies one row fastest by weights of one shape, each read from memory in turn. A plan that
    fails, or whose result is another one than cuBLAS's, is none."""
    (outputs, inputs), like = weights[0].shape, weights[0]
    x_TI = torch.randn((MOST_ROWS, inputs), generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    x_1I, cublas = x_TI[:1], torch.nn.functional.linear
    of_cublas = seconds_of(lambda: [cublas(x_1I, weight) for weight in weights]) / len(weights)
    best = Measured(None, of_cublas, of_cublas)
    if like.nbytes / bandwidth >= ENOUGH * of_cublas:
        return best
    expected = cublas(x_TI, like).float()
    for plan in few_rows_plans(outputs, inputs, multiprocessors):
        try:
            apart = (multiply_few_rows(x_TI, like, None, plan).float() - expected).abs().max() / expected.abs().max()
            if not float(apart) <= MOST_APART:
                raise RuntimeError(f"results differ by {float(apart):.3g}")
            seconds = seconds_of(lambda plan=plan: [multiply_few_rows(x_1I, one, None, plan) for one in weights])  # type: ignore[misc]
        except Exception as error:  # whatever it is, cuBLAS multiplies
            log.warning("%s for %d x %d: %s: %s", plan, outputs, inputs, type(error).__name__, error)
            continue
        seconds /= len(weights)
        if seconds < min(FASTER * of_cublas, best.seconds):
            best = Measured(plan, seconds, of_cublas)
    return best
