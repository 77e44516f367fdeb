"""Linear methods of int8 weights, in torch: the twins of compiled kernels, and what computes where there are none.

Weights are rounded at load, symmetrically and by output: scale = largest |weight| of its inputs / 127. They are made of
what the checkpoint stores, whatever the model's dtype, and where ranks share a row's inputs they agree on its largest:
every dtype and TP degree has the same integers. A checkpoint that stores integers and scales is held as it is. T
tokens, I inputs, O outputs.

Int8Method leaves its inputs as they are. W8A8Method rounds them too, token by token, and sums integers exactly: a
token's result never depends on the others of its step. Both sum in at least float32 and round to the dtype once.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import Arrive, Bias, LinearMethod, Place, as_given
from tandem.parallel.params import Param
from tandem.parallel.quantization.coded_weight import CodedWeight, joined
from tandem.parallel.quantization.stored_weights import StoredWeights, is_stored

LEVELS = 127
PIECE_ELEMENTS = 2**22
"""Elements that are converted at a time, so that a matrix is never there twice."""
EXACT_INPUTS = 1024
"""Products of two int8 numbers that float32 sums without rounding: 1024 * 127 * 128 < 2**24."""
MIDDLE = 128
"""The code of 0, where integers are stored from 0 on."""


class Int8Method(LinearMethod):
    """Int8 weights and one float32 scale per output, in one piece of memory: scales, then rows."""

    is_copy = True
    reads_stored = True

    def __init__(self, weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given) -> None:
        columns = [weight.span(1, context.mesh) for weight in weights]
        self._shares_rows = any(0 < span.length < span.total for span in columns)
        self._context = context
        self._place = place
        self._arrive: Arrive | None = None
        self._held = torch.empty(0, dtype=torch.uint8)
        self._bias_O: torch.Tensor | None = None
        self._shape = (0, 0)
        self.nbytes = 0

    def slots(self, weights: Sequence[Param], bias: Bias) -> Iterator[ParameterSlot]:
        if not is_stored(weights):
            yield from super().slots(weights, bias)
            return
        found = StoredWeights(weights, self._context.mesh, lambda coded: self._take_coded(coded, bias()))
        yield from found.slots(self)

    def take(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self._begin(*weight_OI.shape)
        scale_O = self._scales(weight_OI)
        held = self._room(weight_OI.device)
        for piece in pieces_of(*self._shape):
            self._fill(held, piece.start, self._rounded(weight_OI[piece], scale_O[piece]))
        self._keep(held, scale_O, bias_O)

    def _take_coded(self, weights: Sequence[CodedWeight], bias_O: torch.Tensor | None) -> None:
        """Takes integers that are stored from 0 on, with one scale per output."""
        weight = joined(weights)
        assert weight.scale_OG.shape[1] == 1 and weight.zero_OG is None and weight.bits == 8
        self._begin(*weight.codes_OI.shape)
        held = self._room(weight.codes_OI.device)
        for piece in pieces_of(*self._shape):
            self._fill(held, piece.start, weight.codes_OI[piece].bitwise_xor(MIDDLE).view(torch.int8))
        self._keep(held, weight.scale_OG[:, 0], bias_O)

    def _begin(self, outputs: int, inputs: int) -> None:
        self._shape = outputs, inputs
        self.nbytes = outputs * (inputs + 4)

    def _keep(self, held: torch.Tensor, scale_O: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        """Completes what has been filled, and places it."""
        self._scales_in(held)[: len(scale_O)] = scale_O
        self._held, self._arrive = self._place(held)
        self._bias_O = bias_O

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        y_TO = x_TI.new_empty(len(x_TI), self._shape[0])
        wide_TI, weight_OI, scale_O = x_TI.float(), self.weight_OI, self.scale_O
        for piece in pieces_of(*self._shape):
            y_TO[:, piece] = self._biased(F.linear(wide_TI, weight_OI[piece].float()) * scale_O[piece], piece)
        return y_TO

    @property
    def weight_OI(self) -> torch.Tensor:
        """The integers, int8."""
        outputs, inputs = self._shape
        return self._held[4 * outputs :].view(torch.int8).view(outputs, inputs)

    @property
    def scale_O(self) -> torch.Tensor:
        """The scales, float32."""
        return self._scales_in(self._held)[: self._shape[0]]

    # ---- memory ----

    def _room(self, device: torch.device) -> torch.Tensor:
        """Returns memory for the weight and its scales."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def _fill(self, held: torch.Tensor, first: int, rows_OI: torch.Tensor) -> None:
        """Writes rows, int8, from the output `first` on."""
        outputs, inputs = self._shape
        held[4 * outputs :].view(torch.int8).view(outputs, inputs)[first : first + len(rows_OI)] = rows_OI

    def _scales_in(self, held: torch.Tensor) -> torch.Tensor:
        """Returns the part of the memory that holds scales."""
        return held[: 4 * self._shape[0]].view(torch.float32)

    # ---- rounding ----

    def _largest(self, rows_OI: torch.Tensor) -> torch.Tensor:
        """Returns the largest absolute weight of each output, float32."""
        return rows_OI.abs().amax(1).float()

    def _rounded(self, rows_OI: torch.Tensor, scale_O: torch.Tensor) -> torch.Tensor:
        """Returns the integers of outputs, int8."""
        return quantize(rows_OI, scale_O)

    # ---- inside ----

    def _biased(self, y_TO: torch.Tensor, piece: slice) -> torch.Tensor:
        return y_TO if self._bias_O is None else y_TO + self._bias_O[piece].float()

    def _scales(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Returns the scale of each output: of its whole row, also where ranks share it."""
        largest_O = torch.cat([self._largest(weight_OI[piece]) for piece in pieces_of(*self._shape)])
        if self._shares_rows:
            parts_RO = largest_O.new_empty(self._context.tp_size, len(largest_O))
            largest_O = self._context.tp.all_gather(parts_RO, largest_O).amax(0)
        return largest_O / LEVELS


class W8A8Method(Int8Method):
    """Int8 weights, multiplied by inputs that are rounded to int8 with a scale for each token."""

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        y_TO = x_TI.new_empty(len(x_TI), self._shape[0])
        code_TI, scale_T1 = quantize_inputs(x_TI)
        weight_OI, scale_O = self.weight_OI, self.scale_O
        for piece in pieces_of(*self._shape):
            sums_TO = exact_product(code_TI, weight_OI[piece]).float()
            y_TO[:, piece] = self._biased(sums_TO * scale_T1 * scale_O[piece], piece)
        return y_TO


def quantize(weight_OI: torch.Tensor, scale_O: torch.Tensor) -> torch.Tensor:
    """Returns the integers, int8, whose products with the scales are nearest to the weights."""
    scale_O1 = scale_O[:, None]
    rounded_OI = (weight_OI.float() / scale_O1).round_().clamp_(-LEVELS, LEVELS)
    return rounded_OI.masked_fill_(scale_O1 == 0, 0).to(torch.int8)  # of rows that are zero


def quantize_inputs(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs rounded to integers, float32 [T, I], and the scales [T, 1]. A token that has a NaN gets NaN."""
    wide_TI = x_TI.float()
    largest_T1 = wide_TI.abs().amax(1, keepdim=True) if x_TI.shape[1] else wide_TI.new_zeros(len(x_TI), 1)
    inverse_T1 = torch.where(largest_T1 > 0, torch.full_like(largest_T1, LEVELS).div_(largest_T1), 0)
    return (wide_TI * inverse_T1).round_(), largest_T1 / LEVELS


def exact_product(code_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Returns the product of two matrices of integers up to 127 without rounding, int64."""
    sums_TO = torch.zeros(len(code_TI), len(weight_OI), dtype=torch.int64, device=code_TI.device)
    for first in range(0, code_TI.shape[1], EXACT_INPUTS):
        columns = slice(first, first + EXACT_INPUTS)
        sums_TO += F.linear(code_TI[:, columns].nan_to_num(), weight_OI[:, columns].float()).long()
    return sums_TO


def pieces_of(outputs: int, inputs: int) -> list[slice]:
    """Returns ranges of outputs with about PIECE_ELEMENTS elements each; all but the last are multiples of 64 long."""
    step = max(1, PIECE_ELEMENTS // max(1, inputs) // 64) * 64
    return [slice(first, min(first + step, outputs)) for first in range(0, outputs, step)] or [slice(0, 0)]
