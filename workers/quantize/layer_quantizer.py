"""LayerQuantizer: one open layer becomes codes: scales of inputs are chosen and folded, then its matrices are rounded.

The layer computes with what the codes stand for afterwards, so that later layers are calibrated with inputs as they
will be (as GPTQ does). O outputs, I inputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tandem.parallel.params import Param
from tandem.workers.models.spec.arch import LayerSpec
from tandem.workers.quantize.layer_walk import OpenLayer
from tandem.workers.quantize.quantize_settings import QuantizeSettings
from tandem.workers.quantize.rounding.folds import Fold, folds_of
from tandem.workers.quantize.rounding.integer_grid import IntegerGrid, RoundedMatrix, pieces_of
from tandem.workers.quantize.rounding.recorded_linear import RecordedLinear
from tandem.workers.quantize.rounding.rounders import GptqRounder, NoInverseError, Rounder, to_nearest
from tandem.workers.quantize.rounding.scale_search import apply_fold, awq_scale, smooth_scale

ENOUGH_TOKENS: Final = 64
"""An expert that fewer tokens of the calibration text have passed is rounded to nearest, and not scaled."""
SUMS_BYTES: Final = 2**30
"""Size of sums over inputs at a time, unless the layer itself is larger: experts are calibrated some after others."""
BitsOf = Callable[[RecordedLinear], int]
DtypeOf = Callable[[Param], torch.dtype]


@dataclass(slots=True)
class LayerOutcome:
    """matrices: by the name of the weight. changed: names of other parameters that a fold has changed. rows: of the
    report, one for each linear layer; folds: one for each scale that was searched."""

    matrices: dict[str, RoundedMatrix] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    rows: list[dict[str, Any]] = field(default_factory=list)
    folds: list[dict[str, Any]] = field(default_factory=list)


class LayerQuantizer:
    """bits_of: of a linear layer's weights. dtype_of: in which a parameter is written. hidden: makes the calibration
    text's hidden states before the layer, which may be overwritten."""

    def __init__(self, settings: QuantizeSettings, bits_of: BitsOf, dtype_of: DtypeOf) -> None:
        self._settings = settings
        self._bits_of = bits_of
        self._dtype_of = dtype_of
        self._rounder: Rounder = GptqRounder(settings.act_order) if settings.method == "gptq" else to_nearest

    def __call__(self, spec: LayerSpec, layer: OpenLayer, hidden: Callable[[], Iterator[torch.Tensor]]) -> LayerOutcome:
        found = LayerOutcome()
        linears = [one for one in layer.linears if not all(map(self._settings.leaves, one.params))]
        scales = self._settings.method in ("awq", "smoothquant")
        batches = [layer.linears] if scales else _batches(linears)
        for batch in batches:
            layer.record(batch, hidden())
            if scales:
                self._fold(spec, layer, found)
            for linear in batch:
                if linear in linears:
                    self._round(linear, found)
                linear.stats = None
        for name, matrix in found.matrices.items():
            for rows in pieces_of(*matrix.codes_OI.shape):
                layer.values[name][rows] = matrix.rows(rows).dense_OI()
        for param in layer.params:
            if param.name in found.changed and param.name not in found.matrices:
                as_written(param, layer.values[param.name], self._dtype_of(param))
        for linear in linears:
            linear.rounds_inputs = self._settings.rounds_inputs
        return found

    def grid_of(self, linear: RecordedLinear) -> IntegerGrid:
        settings, first = self._settings, linear.params[0]
        is_expert = first.expert is not None
        group = settings.group_of_experts(first.shape) if is_expert else settings.group_of(linear.inputs)
        return IntegerGrid(self._bits_of(linear), group, settings.symmetric, self._dtype_of(first))

    def _fold(self, spec: LayerSpec, layer: OpenLayer, found: LayerOutcome) -> None:
        """Chooses and applies the scales of the layer's inputs."""
        folded: set[int] = set()
        for fold in folds_of(spec, layer.params, layer.linears):
            row = self._fold_one(fold, layer, found)
            if row is not None:
                found.folds.append(row)
                folded |= {id(linear) for linear in fold.linears}
        for linear in layer.linears:
            if id(linear) not in folded and not all(map(self._settings.leaves, linear.params)):
                found.folds.append({"before": None, "layers": _modules(linear), "scaled": False})

    def _fold_one(self, fold: Fold, layer: OpenLayer, found: LayerOutcome) -> dict[str, Any] | None:
        """Returns a row of the report; None where nothing is scaled."""
        settings = self._settings
        stays = any(settings.leaves(param) for linear in fold.linears for param in linear.params)
        tokens = min((one.stats.tokens for one in fold.linears if one.stats is not None), default=0)
        is_few = not fold.norm and tokens < ENOUGH_TOKENS
        if not fold.linears or not fold.before or is_few or (stays and settings.method == "awq" and not fold.norm):
            return None
        row: dict[str, Any] = {"before": fold.name, "layers": [m for one in fold.linears for m in _modules(one)]}
        row["scaled"] = True
        if settings.method == "smoothquant":
            if not fold.norm:
                return None
            scale_I = smooth_scale(fold, settings.alpha)
        else:
            best = awq_scale(fold, self.grid_of)
            scale_I = best.scale_I
            row |= {"power": best.power, "protected": best.protected, "gain": _ratio(best.error, best.before)}
        apply_fold(fold, scale_I, layer.values, self._dtype_of(fold.before[0]))
        found.changed |= {param.name for param in (*fold.before, *fold.further)}
        found.changed |= {param.name for one in fold.linears for param in one.params if settings.leaves(param)}
        return row

    def _round(self, linear: RecordedLinear, found: LayerOutcome) -> None:
        stats, grid = linear.stats, self.grid_of(linear)
        assert stats is not None
        is_few = linear.params[0].expert is not None and stats.tokens < ENOUGH_TOKENS
        matrix, has_inverse = None, True
        if not is_few:
            try:
                matrix = self._rounder(linear.weight(), stats, grid)
            except NoInverseError:
                has_inverse = False
        by_gptq = matrix is not None and self._settings.method == "gptq"
        matrix = matrix or to_nearest(linear.weight(), stats, grid)
        for param in linear.params:
            if not self._settings.leaves(param):
                found.matrices[param.name] = matrix.rows(linear.rows_of(param))
        row = {"layers": _modules(linear), "bits": grid.bits, "group": grid.group, "tokens": stats.tokens}
        row |= {"rounded": "gptq" if by_gptq else "nearest", "error": linear.error(matrix)}
        found.rows.append({**row, "few_tokens": is_few, "no_inverse": not has_inverse})


def as_written(param: Param, value: torch.Tensor, dtype: torch.dtype) -> None:
    """Rounds a parameter, in place, to what a checkpoint stores of it, so that what is measured is what is served."""
    add = param.source.add
    value.copy_((value - add).to(dtype).float() + add)


def _batches(linears: Sequence[RecordedLinear]) -> Iterator[list[RecordedLinear]]:
    """Yields linears whose sums over inputs are taken together."""
    room = max(SUMS_BYTES, sum(linear.weight().nbytes for linear in linears))
    batch: list[RecordedLinear] = []
    used = 0
    for linear in linears:
        size = 4 * linear.inputs**2
        if batch and used + size > room:
            yield batch
            batch, used = [], 0
        batch.append(linear)
        used += size
    yield batch


def _modules(linear: RecordedLinear) -> list[str]:
    return list(dict.fromkeys(param.module for param in linear.params))


def _ratio(part: float, whole: float) -> float:
    """The ratio of two sums of squares, as a ratio of lengths."""
    return math.sqrt(part / whole) if whole > 0 else 0.0
