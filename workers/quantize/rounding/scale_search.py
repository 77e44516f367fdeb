"""Scales of inputs: those that AWQ searches (Lin et al. 2023), and SmoothQuant's (Xiao et al. 2022); how a fold takes
one.

AWQ: inputs with large values are scaled down and their weights up, so that rounding harms these less: scale = mean |x|
to a power, of which 20 are tried, by the error of all outputs that read the inputs; as AutoAWQ has it divided by the
mean |w| of the input, as a share of the largest of its group, to the rest of the power. SmoothQuant: largest |x| to a
power divided by largest |w| to the rest, so that inputs too can be rounded. I inputs, O outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tandem.workers.quantize.rounding.folds import Fold
from tandem.workers.quantize.rounding.integer_grid import IntegerGrid, pieces_of
from tandem.workers.quantize.rounding.recorded_linear import InputStats, RecordedLinear
from tandem.workers.quantize.rounding.threads import one_thread

STEPS = 20
LEAST = 1e-4
SALIENT = 0.01
"""The share of inputs, those with the largest values, whose protection is reported."""
GridOf = Callable[[RecordedLinear], IntegerGrid]


@dataclass(frozen=True, slots=True)
class Searched:
    """A scale. error: with it, before: without it, both squares of outputs; protected: the share of salient inputs
    whose part of the error has fallen."""

    scale_I: torch.Tensor
    power: float
    error: float
    before: float
    protected: float


def awq_scale(fold: Fold, grid_of: GridOf) -> Searched:
    """Returns the best of the scales that are tried; 1 where none is better."""
    tokens = max(1, sum(_stats(linear).tokens for linear in fold.linears))
    magnitude_I = fold.shared(sum_of(fold, lambda one: one.magnitude_I) / tokens).clamp(min=LEAST)
    share_I = fold.shared(_mean_shares(fold, grid_of))

    def error_of(scale_I: torch.Tensor) -> float:
        return sum(_error(linear, scale_I, grid_of(linear)) for linear in fold.linears)

    best_I = torch.ones_like(magnitude_I)
    before = error = error_of(best_I)
    power = 0.0
    for step in range(STEPS):
        tried = step / STEPS
        scale_I = _centred(magnitude_I**tried / (share_I ** (1 - tried) + LEAST))
        if (found := error_of(scale_I)) < error:
            best_I, error, power = scale_I, found, tried
    return Searched(best_I, power, error, before, _protected(fold, magnitude_I, best_I, grid_of))


def smooth_scale(fold: Fold, alpha: float) -> torch.Tensor:
    """Returns SmoothQuant's scale."""
    largest_I = torch.stack([_stats(linear).largest_I for linear in fold.linears]).amax(0).clamp(min=LEAST)
    weights_I = torch.stack([linear.weight().abs().amax(0) for linear in fold.linears]).amax(0).clamp(min=LEAST)
    return (largest_I**alpha / weights_I ** (1 - alpha)).clamp(min=LEAST)


def apply_fold(
    fold: Fold, scale_I: torch.Tensor, values: Mapping[str, torch.Tensor], written: torch.dtype
) -> torch.Tensor:
    """Multiplies the inputs' weights by a scale and divides what is before them by it, in place; returns the scale that
    was applied. written: the dtype in which a norm's weight is stored: it is one that this dtype has, and the scale
    follows it, so that nothing is lost. Where a router reads the inputs, a scale is a power of two for the same."""
    if fold.further:
        scale_I = scale_I.log2().round().exp2()
    rows_I = fold.rows(scale_I)
    first, *others = (values[param.name] for param in fold.before)
    if fold.norm:
        add = fold.before[0].source.add
        divided = ((first / rows_I) - add).to(written).float() + add
        is_exact = (divided != 0) & divided.isfinite()
        scale_I = rows_I = torch.where(is_exact & (first != 0), first / divided, 1.0)
        first.copy_(torch.where(is_exact & (first != 0), divided, first))
    else:
        first.div_(rows_I[:, None])
    for bias in others:
        bias.div_(rows_I)
    for linear in fold.linears:
        linear.weight().mul_(scale_I)
        if linear.stats is not None:
            linear.stats.divide(scale_I)
    for param in fold.further:
        values[param.name].mul_(scale_I)
    return scale_I


def sum_of(fold: Fold, part: Callable[[InputStats], torch.Tensor]) -> torch.Tensor:
    """Returns a sum over the tokens of all linears of a fold."""
    return torch.stack([part(_stats(linear)) for linear in fold.linears]).sum(0)


def _stats(linear: RecordedLinear) -> InputStats:
    assert linear.stats is not None, "no inputs were recorded"
    return linear.stats


def _mean_shares(fold: Fold, grid_of: GridOf) -> torch.Tensor:
    """Returns each input's mean |w|, as a share of the largest |w| of the weight's group."""
    sums, outputs = torch.zeros(fold.linears[0].inputs), 0
    for linear in fold.linears:
        weight_OI, size = linear.weight(), grid_of(linear).size_of(linear.inputs)
        for rows in pieces_of(*weight_OI.shape):
            groups = weight_OI[rows].abs().unflatten(1, (-1, size))
            sums += (groups / groups.amax(-1, keepdim=True).clamp(min=LEAST)).flatten(1).sum(0)
        outputs += len(weight_OI)
    return sums / outputs


def _centred(scale_I: torch.Tensor) -> torch.Tensor:
    return (scale_I / (scale_I.max() * scale_I.min()).sqrt()).clamp_(min=LEAST)


def _change(weight_OI: torch.Tensor, scale_I: torch.Tensor, grid: IntegerGrid) -> torch.Tensor:
    """Returns what rounding changes of weights whose inputs have a scale."""
    return grid.round(weight_OI * scale_I).dense_OI().div_(scale_I).sub_(weight_OI)


def _error(linear: RecordedLinear, scale_I: torch.Tensor, grid: IntegerGrid) -> float:
    weight_OI = linear.weight()
    return _stats(linear).error(len(weight_OI), lambda rows: _change(weight_OI[rows], scale_I, grid))


def _protected(fold: Fold, magnitude_I: torch.Tensor, scale_I: torch.Tensor, grid_of: GridOf) -> float:
    """Returns the share of the inputs with the largest values whose weights' rounding adds less to the error."""
    salient = magnitude_I.topk(max(1, round(SALIENT * len(magnitude_I)))).indices

    def own(scale_I: torch.Tensor) -> torch.Tensor:
        total_I = torch.zeros_like(scale_I)
        for linear in fold.linears:
            weight_OI, squares_I = linear.weight(), _stats(linear).products_II.diagonal()
            for rows in pieces_of(*weight_OI.shape):
                total_I += _change(weight_OI[rows], scale_I, grid_of(linear)).square_().sum(0) * squares_I
        return total_I[salient]

    with one_thread():
        return float((own(scale_I) < own(torch.ones_like(scale_I))).float().mean())
