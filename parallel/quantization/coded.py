"""CodedMethod: products with weights of a few bits in torch, the twin of compiled kernels and what computes where there
are none.

One piece of memory holds what Coded.parts() counts: outer scales, scales, zeros, orders and ends, then codes, two to a
byte up to four bits. Products are of float32 and rounded to the dtype once. T tokens, I inputs, O outputs, G groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import Arrive, Bias, DenseMethod, LinearMethod, Place, as_given
from tandem.parallel.params import Param
from tandem.parallel.quantization.coded_weight import CodedWeight, joined, undone
from tandem.parallel.quantization.int8 import pieces_of, quantize_inputs
from tandem.parallel.quantization.rounding import TORCH_ROUNDING, Rounding, round_to_codes, shared_groups
from tandem.parallel.quantization.schemes import Coded, Inputs
from tandem.parallel.quantization.stored_weights import StoredWeights, is_stored


@dataclass(frozen=True, slots=True)
class _HeldPart:
    """A range of the held bytes, as a tensor of its own."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, held: torch.Tensor) -> torch.Tensor:
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return held[self.start : self.start + size].view(self.dtype).view(self.shape)


class CodedMethod(LinearMethod):
    """Weights of a Coded scheme; several that are merged have the same groups and no order. rounding: of dense weights
    to codes."""

    is_copy = True
    reads_stored = True

    def __init__(
        self,
        weights: Sequence[Param],
        context: ParallelContext,
        /,
        place: Place = as_given,
        *,
        rounding: Rounding = TORCH_ROUNDING,
    ) -> None:
        scheme = weights[0].scheme
        assert isinstance(scheme, Coded), scheme
        self.scheme = scheme
        self._mesh, self._rounding = context.mesh, rounding
        self._share = shared_groups(weights[0], scheme, context)
        self._columns = weights[0].span(1, context.mesh)
        self._place = place
        self._arrive: Arrive | None = None
        self._parts: dict[str, _HeldPart] = {}
        self._held = torch.empty(0, dtype=torch.uint8)
        self._shape = (0, 0)
        self._group, self._bits = 0, scheme.bits
        self._table: torch.Tensor | None = None
        self._ends_G: torch.Tensor | None = None
        self._bias_O: torch.Tensor | None = None
        self.nbytes = 0

    def slots(self, weights: Sequence[Param], bias: Bias) -> Iterator[ParameterSlot]:
        if not is_stored(weights):
            yield from super().slots(weights, bias)
            return
        found = StoredWeights(weights, self._mesh, lambda coded: self.take_coded(joined(coded), bias()))
        yield from found.slots(self)

    def take(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        coded = round_to_codes(weight_OI, self.scheme, self._columns, rounding=self._rounding, share=self._share)
        self.take_coded(coded, bias_O)

    def take_coded(self, weight: CodedWeight, bias_O: torch.Tensor | None) -> None:
        """Makes the product's form of a weight."""
        parts = {} if weight.outer_O is None else {"outer": weight.outer_O}
        parts["scale"] = weight.scale_OG
        if weight.zero_OG is not None:
            parts["zero"] = weight.zero_OG
        if weight.order_I is not None and weight.ends_G is not None:
            parts["order"], parts["ends"] = weight.order_I.int(), weight.ends_G
        parts["codes"] = _packed(weight.codes_OI) if weight.bits <= 4 else weight.codes_OI
        self.nbytes = sum(part.nbytes for part in parts.values())
        held, start = torch.empty(self.nbytes, dtype=torch.uint8, device=weight.codes_OI.device), 0
        for name, part in parts.items():
            self._parts[name] = _HeldPart(start, part.dtype, tuple(part.shape))
            self._parts[name].of(held).copy_(part)
            start += part.nbytes
        self._shape = len(weight.codes_OI), weight.codes_OI.shape[1]
        self._group, self._bits, self._table = weight.group, weight.bits, weight.table
        self._ends_G = None if "ends" in parts else weight.ends_G
        self._held, self._arrive = self._place(held)
        self._bias_O = bias_O

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        y_TO, order_I = x_TI.new_empty(len(x_TI), self._shape[0]), self._part("order")
        wide_TI = x_TI.float()
        if self.scheme.inputs is Inputs.INT8:
            codes_TI, scale_T1 = quantize_inputs(x_TI)
            wide_TI = codes_TI * scale_T1
        if order_I is not None:
            wide_TI = wide_TI[:, order_I.long()]
        for piece in pieces_of(*self._shape):
            bias_O = None if self._bias_O is None else self._bias_O[piece].float()
            y_TO[:, piece] = F.linear(wide_TI, self.rows(piece).values_OI(), bias_O)
        return y_TO

    def rows(self, rows: slice) -> CodedWeight:
        """Returns some outputs of the weight."""
        scale_OG, zero_OG, order_I, ends_G, outer_O = map(self._part, ("scale", "zero", "order", "ends", "outer"))
        assert scale_OG is not None, "not loaded"
        return CodedWeight(
            self._codes(rows),
            scale_OG[rows],
            self._bits,
            self._group,
            None if zero_OG is None else zero_OG[rows],
            self._table,
            self._ends_G if ends_G is None else ends_G,
            None if order_I is None else order_I.long(),
            None if outer_O is None else outer_O[rows],
        )

    def _part(self, name: str) -> torch.Tensor | None:
        part = self._parts.get(name)
        return None if part is None else part.of(self._held)

    def _codes(self, rows: slice) -> torch.Tensor:
        codes, inputs = self._part("codes"), self._shape[1]
        assert codes is not None
        if self._bits > 4:
            return codes[rows]
        first, last = rows.start * inputs, min(rows.stop, self._shape[0]) * inputs
        pairs = codes[first // 2 : -(-last // 2)]
        flat = torch.stack([pairs & 15, pairs >> 4], dim=1).view(-1)
        return flat[first % 2 :][: last - first].view(-1, inputs)


class UndoneMethod(DenseMethod):
    """A stored form that is undone at load, in the model's dtype."""

    def __init__(
        self, dtype: torch.dtype, weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given
    ) -> None:
        super().__init__(place)
        self._dtype, self._mesh = dtype, context.mesh

    def slots(self, weights: Sequence[Param], bias: Bias) -> Iterator[ParameterSlot]:
        if not is_stored(weights):
            yield from super().slots(weights, bias)
            return

        def done(coded: Sequence[CodedWeight]) -> None:
            self.take(torch.cat([undone(weight, self._dtype) for weight in coded]), bias())

        yield from StoredWeights(weights, self._mesh, done).slots(self)


def _packed(codes_OI: torch.Tensor) -> torch.Tensor:
    """Returns codes of up to four bits, row behind row, two to a byte, the first in its low half."""
    flat = codes_OI.reshape(-1)
    if len(flat) % 2:
        flat = F.pad(flat, (0, 1))
    return flat[0::2] | flat[1::2] << 4
