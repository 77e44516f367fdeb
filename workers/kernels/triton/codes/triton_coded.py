"""Linear methods and products of experts for GPUs with weights that are codes: of few bits, E4M3, and int8 rows.

TritonCodedMethod and TritonInt8Method hold a weight as code_words.py says and multiply it by triton_code_gemm.py; their
twins are CodedMethod, Int8Method and W8A8Method. Fp8Method multiplies more than a few rows by torch._scaled_mm, rounded
to E4M3 row by row. Where a weight has an order, or groups that are padded, its inputs are gathered first, in one
launch; where a scheme rounds inputs to int8, one more rounds them. Imported only where Triton is installed. T rows, I
inputs, O outputs, E experts, P pairs of a token and an expert.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import ExpertMethod, ExpertParams, Groups, StackedExperts
from tandem.parallel.linear_methods import MakeMethod, Place, as_given
from tandem.parallel.params import Param
from tandem.parallel.quantization.coded import CodedMethod
from tandem.parallel.quantization.coded_weight import CodedWeight
from tandem.parallel.quantization.int8 import MIDDLE, Int8Method
from tandem.parallel.quantization.schemes import Coded, Inputs, Int8Rows
from tandem.workers.kernels.triton.codes.code_words import CodeKind, Meaning, Scaled, WordLayout, layout_of, whole_step
from tandem.workers.kernels.triton.codes.triton_code_gemm import (
    FEW_ROWS,
    CodeShape,
    CodeTensors,
    multiply,
    multiply_groups,
)
from tandem.workers.kernels.triton.codes.triton_code_inputs import gathered, rounded_to_e4m3, rounded_to_int8
from tandem.workers.kernels.triton.triton_attention import H100, Multiprocessors

ALIGNED: Final = 16
"""Inputs and outputs that torch._scaled_mm takes a multiple of."""


@cache
def _table(meaning: Meaning, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(meaning.table or (0.0,), dtype=dtype, device=device)


def shape_of(layout: WordLayout) -> CodeShape:
    """Returns the sizes and constants of a weight's product."""
    bits, (kind, offset, _) = (4 if layout.is_packed else 8), layout.meaning
    sizes = layout.outputs, layout.inputs, layout.columns, layout.group
    is_narrow = layout.is_narrow
    return CodeShape(*sizes, bits, int(kind), offset, layout.has_zeros, int(layout.scaled), layout.step, is_narrow)


class HeldCodes(NamedTuple):
    """A weight, or those of experts, on their device. order: int32, [.., columns]; None: inputs are as they are."""

    shape: CodeShape
    tensors: CodeTensors
    order: torch.Tensor | None

    @classmethod
    def of(cls, layout: WordLayout, held: torch.Tensor, dtype: torch.dtype) -> "HeldCodes":
        """held: uint8 [room], or [E, room] of experts, as WordLayout.pack() returns it. dtype: of inputs."""
        scales, zeros, order, parts, _ = layout.starts
        words = held.view(torch.int32)
        codes = words if layout.is_packed else held
        floats = held.view(torch.float32)
        numbers = held[..., scales:] if layout.is_narrow else floats[..., scales // 4 :]
        tensors = CodeTensors(
            codes,
            numbers,
            floats[..., zeros // 4 :] if layout.has_zeros or layout.is_narrow else numbers,
            words[..., parts // 4 :] if layout.scaled is Scaled.LIST else words,
            _table(layout.meaning, dtype, held.device),
            codes.shape[-1],
            words.shape[-1],
        )
        return cls(shape_of(layout), tensors, words[..., order // 4 :] if layout.has_order else None)

    def multiply(
        self, x_TI: torch.Tensor, bias_O: torch.Tensor | None, multiprocessors: Multiprocessors, *, rounds: bool
    ) -> torch.Tensor:
        """Returns y_TO. rounds: inputs to int8."""
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        if self.order is not None:
            x_TI = gathered(x_TI, self.order, self.shape.columns)
        x_TI = self._padded(x_TI)
        x_TI, of_row_T = rounded_to_int8(x_TI) if rounds else (x_TI, None)
        return multiply(x_TI, self.shape, self.tensors, bias_O, of_row_T, multiprocessors)

    def multiply_groups(
        self,
        x: torch.Tensor,
        bias_EO: torch.Tensor | None,
        groups: Groups,
        multiprocessors: Multiprocessors,
        *,
        gathers: bool,
        rounds: bool,
    ) -> torch.Tensor:
        """Returns y_PO as ExpertMethod.apply() does."""
        if self.order is not None:
            room = self.tensors.room
            x = gathered(x, self.order, self.shape.columns, groups, room=room, gathers=gathers)
            gathers = False
        x = self._padded(x)
        x, of_row = rounded_to_int8(x) if rounds else (x, None)
        return multiply_groups(x, self.shape, self.tensors, bias_EO, groups, of_row, multiprocessors, gathers=gathers)

    def _padded(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Returns rows with as many numbers as columns; kernels load whole steps."""
        return x_TI if x_TI.shape[1] == self.shape.columns else F.pad(x_TI, (0, self.shape.columns - x_TI.shape[1]))


class TritonCodedMethod(CodedMethod):
    """Coded weights in the kernel's form. multiprocessors: of the device; None for an H100's."""

    def __init__(
        self,
        dtype: torch.dtype,
        weights: Sequence[Param],
        context: ParallelContext,
        /,
        place: Place = as_given,
        *,
        multiprocessors: Multiprocessors | None = None,
    ) -> None:
        super().__init__(weights, context, place)
        self._dtype, self.multiprocessors = dtype, multiprocessors or H100
        self._words: HeldCodes | None = None
        self.layout: WordLayout | None = None

    @property
    def rounds(self) -> bool:
        return self.scheme.inputs is Inputs.INT8

    def take_coded(self, weight: CodedWeight, bias_O: torch.Tensor | None) -> None:
        layout = self.layout = layout_of(weight)
        numbers = layout.groups * layout.outputs * (8 if layout.has_zeros else 4)
        if layout.is_narrow:
            numbers = (layout.groups + 4) * layout.outputs
        order_bytes = 4 * (layout.inputs + layout.groups) if weight.order_I is not None else 0
        size = layout.outputs * layout.inputs
        self.nbytes = (-(-size // 2) if layout.is_packed else size) + numbers + order_bytes
        self._held, self._arrive = self._place(layout.pack(weight))
        self._words = HeldCodes.of(layout, self._held, self._dtype)
        self._bias_O = bias_O

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        assert self._words is not None, "not loaded"
        return self._words.multiply(x_TI, self._bias_O, self.multiprocessors, rounds=self.rounds)


class Fp8Method(TritonCodedMethod):
    """Weights of E4M3 with a scale for each output. More than FEW_ROWS rows are rounded to E4M3 too, and multiplied by
    tensor cores of eight bits (torch._scaled_mm), which give bf16."""

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        assert layout is not None, "not loaded"
        if len(x_TI) <= FEW_ROWS or not takes_fp8(layout, x_TI.dtype):
            return super().apply(x_TI)
        if self._arrive is not None:
            self._arrive()
        codes, scales = layout.outputs * layout.columns, layout.starts[0]
        weight_OI = self._held[:codes].view(torch.float8_e4m3fn).view(layout.outputs, layout.columns)
        scale_O = self._held[scales : scales + 4 * layout.outputs].view(torch.float32)
        return multiply_fp8(x_TI, weight_OI, scale_O, self._bias_O)


def takes_fp8(layout: WordLayout, dtype: torch.dtype) -> bool:
    """True if torch._scaled_mm multiplies such a weight: E4M3, a scale for each output, no padding, bf16."""
    is_rows = layout.scaled is Scaled.WHOLE and layout.columns == layout.inputs and not layout.has_order
    is_e4m3 = layout.meaning.kind is CodeKind.FLOATS and not layout.is_packed and not layout.has_zeros
    return is_rows and is_e4m3 and layout.outputs % ALIGNED == 0 and dtype is torch.bfloat16


def multiply_fp8(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, scale_O: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """Returns y_TO in bf16: of rows rounded to E4M3, by weights in E4M3 with scales by output."""
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    code_TI, of_row_T = rounded_to_e4m3(x_TI)
    scales = of_row_T[:, None], scale_O[None, :]
    return torch._scaled_mm(code_TI, weight_OI.t(), *scales, bias=bias_O, out_dtype=torch.bfloat16)


class TritonInt8Method(Int8Method):
    """Int8 rows in the kernel's form: codes from 0 on, whose 0 is MIDDLE. rounds: inputs too."""

    def __init__(
        self,
        dtype: torch.dtype,
        weights: Sequence[Param],
        context: ParallelContext,
        /,
        place: Place = as_given,
        *,
        rounds: bool = False,
        multiprocessors: Multiprocessors | None = None,
    ) -> None:
        super().__init__(weights, context, place)
        self._dtype, self.multiprocessors = dtype, multiprocessors or H100
        self._words: HeldCodes | None = None
        self.rounds = rounds
        self.layout: WordLayout | None = None

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        assert self._words is not None, "not loaded"
        return self._words.multiply(x_TI, self._bias_O, self.multiprocessors, rounds=self.rounds)

    @property
    def weight_OI(self) -> torch.Tensor:
        return (self._rows_in(self._held)[:, : self._shape[1]] ^ MIDDLE).view(torch.int8)

    def _begin(self, outputs: int, inputs: int) -> None:
        super()._begin(outputs, inputs)
        step = whole_step(inputs, is_packed=False)
        columns = -(-inputs // step) * step
        meaning = Meaning(CodeKind.INTEGERS, MIDDLE, None)
        self.layout = WordLayout(
            outputs, inputs, 1, inputs, 8, columns, step, Scaled.WHOLE, meaning, has_zeros=False, has_order=False
        )

    def _keep(self, held: torch.Tensor, scale_O: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        super()._keep(held, scale_O, bias_O)
        assert self.layout is not None
        self._words = HeldCodes.of(self.layout, self._held, self._dtype)

    def _room(self, device: torch.device) -> torch.Tensor:
        assert self.layout is not None
        return torch.zeros(self.layout.room, dtype=torch.uint8, device=device)

    def _fill(self, held: torch.Tensor, first: int, rows_OI: torch.Tensor) -> None:
        codes_OI = rows_OI.view(torch.uint8) ^ MIDDLE
        self._rows_in(held)[first : first + len(rows_OI), : self._shape[1]] = codes_OI

    def _rows_in(self, held: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        assert layout is not None
        return held[: layout.outputs * layout.columns].view(layout.outputs, layout.columns)

    def _scales_in(self, held: torch.Tensor) -> torch.Tensor:
        assert self.layout is not None
        return held[self.layout.starts[0] :].view(torch.float32)


# ---- experts ----


class TritonCodeExperts(StackedExperts):
    """The products with codes of all experts, in one launch. make: methods that hold words."""

    def __init__(
        self,
        dtype: torch.dtype,
        make: MakeMethod,
        experts: Sequence[ExpertParams],
        context: ParallelContext,
        place: Place = as_given,
    ) -> None:
        super().__init__(make, experts, context, place)
        self._dtype = dtype
        self._layout: WordLayout | None = None
        self._words: HeldCodes | None = None
        self._multiprocessors = H100
        self._rounds = False

    def apply(self, x: torch.Tensor, groups: Groups, *, gathers: bool) -> torch.Tensor:
        self.weights()
        assert self._words is not None, "not loaded"
        return self._words.multiply_groups(
            x, self._bias_EO, groups, self._multiprocessors, gathers=gathers, rounds=self._rounds
        )

    def _finish(self) -> None:
        form = self._forms[0]
        assert isinstance(form, TritonCodedMethod | TritonInt8Method) and form.layout is not None
        layout, self._rounds, self._multiprocessors = form.layout, form.rounds, form.multiprocessors
        super()._finish()
        self._words = HeldCodes.of(layout, self._stack, self._dtype)


class ApartExperts:
    """A product for each of several merged matrices, whose outputs stand side by side: an ExpertMethod."""

    def __init__(self, methods: Sequence[ExpertMethod]) -> None:
        self._methods = tuple(methods)

    def slots(self) -> Iterator[ParameterSlot]:
        for method in self._methods:
            yield from method.slots()

    def apply(self, x: torch.Tensor, groups: Groups, *, gathers: bool) -> torch.Tensor:
        return torch.cat([method.apply(x, groups, gathers=gathers) for method in self._methods], dim=1)


def code_experts(
    dtype: torch.dtype,
    make: MakeMethod,
    experts: Sequence[ExpertParams],
    context: ParallelContext,
    place: Place = as_given,
) -> ExpertMethod | None:
    """Returns the products with experts whose matrices are codes of one scheme each; None where some are not."""
    ways = [
        dict.fromkeys(weight.scheme for weight in weights)
        for weights in zip(*(e.weights for e in experts), strict=True)
    ]
    if any(len(schemes) != 1 or not isinstance(next(iter(schemes)), (Coded, Int8Rows)) for schemes in ways):
        return None
    schemes = [next(iter(each)) for each in ways]
    if len(schemes) == 1 or (len(set(schemes)) == 1 and not (schemes[0] is not None and schemes[0].apart)):
        return TritonCodeExperts(dtype, make, experts, context, place)
    made = [
        TritonCodeExperts(dtype, make, [_only(expert, index) for expert in experts], context, place)
        for index in range(len(schemes))
    ]
    return ApartExperts(made)


def _only(expert: ExpertParams, index: int) -> ExpertParams:
    """Returns one of an expert's merged matrices, with its bias."""
    return ExpertParams(expert.weights[index : index + 1], expert.biases[index : index + 1])
