"""The head as codes, for --quantize-head: rounded a part of the vocabulary at a time, by the inputs that it has of the
quantized model. Codes are held whole, a byte each. V vocabulary, H hidden size, T tokens, P tokens of a part."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from tandem.configs.errors import SettingsError
from tandem.parallel.quantization.int8 import quantize_inputs
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.quantize.layer_walk import LayerWalk
from tandem.workers.quantize.quantize_settings import QuantizeSettings
from tandem.workers.quantize.rounding.integer_grid import IntegerGrid, RoundedMatrix
from tandem.workers.quantize.rounding.mixed_bits import MIXED
from tandem.workers.quantize.rounding.recorded_linear import InputStats
from tandem.workers.quantize.rounding.rounders import GptqRounder, NoInverseError

NAME: Final = "lm_head"
"""The name that transformers has for every head: of a quantized one it finds no other."""
FLAG: Final = "--quantize-head"


def check_head(spec: ArchSpec, module: str) -> None:
    """SettingsError for a head that cannot be written as codes. module: as it is stored."""
    if spec.tie_word_embeddings:
        words = "the head is the table of embeddings too (tie_word_embeddings), in which ids are looked up"
        raise SettingsError(f"{words}; it stays as it is", FLAG)
    if module != NAME:
        raise SettingsError(f"the head is stored as {module}; others read a quantized one as {NAME} only", FLAG)


def head_grid(settings: QuantizeSettings, hidden_size: int, dtype: torch.dtype) -> IntegerGrid:
    """Returns the grid of the head: that of layers, with 8 bits where bits are an average."""
    bits = MIXED[1] if settings.is_mixed else int(settings.bits)
    return IntegerGrid(bits, settings.group_of(hidden_size), settings.symmetric, dtype)


@dataclass(frozen=True, slots=True)
class QuantizedHead:
    """matrix: [V, H]. row: of the report."""

    matrix: RoundedMatrix
    rounds_inputs: bool
    row: dict[str, Any]

    def inputs(self, normed_TH: torch.Tensor) -> torch.Tensor:
        """Returns the inputs as it multiplies them."""
        if not self.rounds_inputs:
            return normed_TH
        codes_TH, scale_T1 = quantize_inputs(normed_TH)
        return codes_TH * scale_T1

    def rows(self, rows: slice) -> torch.Tensor:
        """Returns the weights of some tokens, float32."""
        return self.matrix.rows(rows).dense_OI()


def quantize_head(
    walk: LayerWalk, settings: QuantizeSettings, grid: IntegerGrid, hidden: Iterator[torch.Tensor]
) -> QuantizedHead:
    """hidden: the calibration text's hidden states behind the last layer, of the quantized model."""
    stats, parts = InputStats(walk.spec.hidden_size), list[RoundedMatrix]()
    for hidden_WH in hidden:
        stats.add(walk.normed(hidden_WH))
    stats.finish()
    rounded, is_gptq = _rounding(settings, stats, grid)
    change = whole = 0.0
    for _, weight_PH in walk.vocabulary(walk.table.head):
        matrix = rounded(weight_PH)
        parts.append(matrix)
        change += stats.error(len(weight_PH), _change_of(matrix, weight_PH))
        whole += stats.error(len(weight_PH), weight_PH.__getitem__)
    row = {"layers": [NAME], "bits": grid.bits, "group": grid.group, "tokens": stats.tokens}
    row |= {"rounded": "gptq" if is_gptq else "nearest", "error": math.sqrt(change / whole) if whole > 0 else 0.0}
    row |= {"few_tokens": False, "no_inverse": settings.method == "gptq" and not is_gptq}
    return QuantizedHead(_joined(parts), settings.rounds_inputs, row)


def _rounding(
    settings: QuantizeSettings, stats: InputStats, grid: IntegerGrid
) -> tuple[Callable[[torch.Tensor], RoundedMatrix], bool]:
    """Returns what rounds some rows, and whether that is GPTQ."""
    if settings.method == "gptq":
        try:
            prepared = GptqRounder(settings.act_order).prepared(stats)
            return lambda weight_PH: prepared(weight_PH, grid), True
        except NoInverseError:
            pass
    return grid.round, False


def _change_of(matrix: RoundedMatrix, weight_PH: torch.Tensor) -> Callable[[slice], torch.Tensor]:
    return lambda rows: matrix.rows(rows).dense_OI().sub_(weight_PH[rows])


def _joined(parts: list[RoundedMatrix]) -> RoundedMatrix:
    zeros = [one.zero_OG for one in parts if one.zero_OG is not None]
    codes_VH, scale_VG = torch.cat([one.codes_OI for one in parts]), torch.cat([one.scale_OG for one in parts])
    return RoundedMatrix(codes_VH, scale_VG, torch.cat(zeros) if zeros else None, parts[0].grid)
