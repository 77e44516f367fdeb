"""Products with int8 weights on CPUs with AVX512-VNNI or AVX2, for any number of rows. Twins:
parallel/quantization/int8.py. cpu_experts.py has those with the weights of experts.

    y[t, o] = (sum_i c[t, i] W[o, i]) s[t] scale[o] + b[o]      c, s: x[t] as integers and their scale

Sums are of integers and exact, so a row's result does not depend on its batch mates. The CPU multiplies bytes, four
pairs at a time, and larger integers byte by byte. w8a8 has integers of one byte, the largest input being 127. int8 has
two for bf16 and three for float32, and a power of two as scale, about 2**-14 (2**-22) of the row's largest input: bits
below it are rounded, so bf16 inputs down to 2**-6 of the largest stay as they are. That costs as many instructions as
pairs of bf16 do, and spares the conversion of weights, which takes longer than reading them. A step of few rows is
bound by reading weights in either case.

The layout: blocks of 64 outputs, each [I / 4][64][4], padded to a whole block; numbers + 128, without sign. The scales
follow, so that one piece of memory has it all. CPUs without VNNI multiply them as codes of 8 bits, in the layout of
cpu_code_gemm.py. T rows, I inputs, O outputs.
"""

from collections.abc import Sequence
from functools import cache, cached_property
from typing import NamedTuple

import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import LinearMethod, MakeMethod, Place, as_given
from tandem.parallel.params import Param
from tandem.parallel.quantization.int8 import Int8Method, W8A8Method
from tandem.parallel.quantization.rounding import CodeGroups
from tandem.parallel.quantization.schemes import Coded
from tandem.workers.kernels.cpu.cpu_build import cpu_int8_library
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, Kernel
from tandem.workers.kernels.cpu.cpu_code_gemm import BLOCK as CODE_BLOCK
from tandem.workers.kernels.cpu.cpu_code_gemm import EIGHT, CodeGemm, CodeLayout, Values, code_gemm
from tandem.workers.kernels.cpu.weight_blocks import code_rounding, in_blocks
from tandem.workers.kernels.huge_pages import WEIGHTS

BLOCK, QUAD, LANES = 64, 4, 16
BYTES = Coded(bits=8, group=None, zeros=True)
OFFSET = 128
INTEGERS = Values(1.0, (OFFSET,), (tuple(range(256)),))
MOST_INPUTS = 2**16
"""Sums of more products of bytes could leave int32."""
PLANES = {torch.bfloat16: 2, torch.float32: 3}
"""Bytes of an input that is not to lose precision."""


class _RoundedInC(Int8Method):
    """Int8 weights that are made by compiled passes."""

    def _largest(self, rows_OI: torch.Tensor) -> torch.Tensor:
        least_O1, largest_O1 = code_rounding().bounds(rows_OI, _all_of(rows_OI))
        return torch.maximum(-least_O1, largest_O1)[:, 0]

    def _rounded(self, rows_OI: torch.Tensor, scale_O: torch.Tensor) -> torch.Tensor:
        scale_O1 = scale_O[:, None].contiguous()
        middle_O1 = torch.full_like(scale_O1, OFFSET)
        codes_OI = code_rounding().codes(rows_OI, BYTES, CodeGroups(_all_of(rows_OI), scale_O1, middle_O1))
        return codes_OI.bitwise_xor_(OFFSET).view(torch.int8)


class CpuInt8Method(_RoundedInC):
    """Int8 weights in the kernel's layout, multiplied by inputs of `planes` bytes."""

    def __init__(
        self, kernel: Kernel, planes: int, weights: Sequence[Param], context: ParallelContext, place: Place
    ) -> None:
        super().__init__(weights, context, place)
        self._kernel = kernel
        self._planes = planes

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        held, bias_O, rows, (outputs, inputs) = self._held, self._bias_O, len(x_TI), self._shape
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        assert x_TI.shape[1] == inputs and (bias_O is None or bias_O.dtype is x_TI.dtype)
        y_TO = torch.empty(rows, outputs, dtype=x_TI.dtype)
        rounded = RoundedRows.room(rows, self._planes, inputs)
        self._kernel(
            held.data_ptr(), held.data_ptr() + self._weight_bytes, x_TI.data_ptr(), x_TI.stride(0),
            None if bias_O is None else bias_O.data_ptr(), y_TO.data_ptr(), *rounded.arguments, self._planes, rows,
            inputs, outputs, torch.get_num_threads(),
        )  # fmt: skip
        return y_TO

    # ---- memory ----

    @property
    def weight_OI(self) -> torch.Tensor:
        weights = self._weights_in(self._held)
        rows_OI = weights.transpose(1, 2).reshape(-1, self._shape[1])[: self._shape[0]]
        return rows_OI.bitwise_xor(OFFSET).view(torch.int8)

    @property
    def _weight_bytes(self) -> int:
        return padded_bytes(*self._shape)

    def _room(self, device: torch.device) -> torch.Tensor:
        padded_outputs = -(-self._shape[0] // BLOCK) * BLOCK
        return WEIGHTS.zeros(self._weight_bytes + 4 * padded_outputs)

    def _fill(self, held: torch.Tensor, first: int, rows_OI: torch.Tensor) -> None:
        quads = in_blocks((rows_OI.contiguous().view(torch.uint8) ^ OFFSET).view(torch.float32), 1)
        start = first // BLOCK
        self._weights_in(held)[start : start + len(quads)] = quads.view(torch.uint8)

    def _weights_in(self, held: torch.Tensor) -> torch.Tensor:
        return held[: self._weight_bytes].view(-1, self._shape[1] // QUAD, BLOCK, QUAD)

    def _scales_in(self, held: torch.Tensor) -> torch.Tensor:
        return held[self._weight_bytes :].view(torch.float32)


class Int8CodesMethod(_RoundedInC):
    """Int8 weights as codes of 8 bits, of which all of an output are one group."""

    def __init__(self, weights: Sequence[Param], context: ParallelContext, place: Place, gemm: CodeGemm) -> None:
        super().__init__(weights, context, place)
        self._gemm = gemm

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        return self._gemm(self._layout, self._held, x_TI, self._bias_O)

    @cached_property
    def _layout(self) -> CodeLayout:
        outputs, inputs = self._shape
        return CodeLayout(
            outputs, inputs, 1, -(-inputs // EIGHT) * EIGHT, 8, INTEGERS, has_zeros=False, has_order=False
        )

    @property
    def weight_OI(self) -> torch.Tensor:
        (outputs, inputs), layout = self._shape, self._layout
        halves = self._held[: layout.starts[0]].view(layout.blocks, -1, 2, CODE_BLOCK, EIGHT // 2)
        rows_OI = halves.permute(0, 3, 1, 2, 4).reshape(-1, layout.held_inputs)[:outputs, :inputs]
        return rows_OI.bitwise_xor(OFFSET).view(torch.int8)

    def _room(self, device: torch.device) -> torch.Tensor:
        return self._gemm.room(self._layout, torch.tensor([self._shape[1]], dtype=torch.int32))

    def _fill(self, held: torch.Tensor, first: int, rows_OI: torch.Tensor) -> None:
        self._gemm.fill(self._layout, held, first, rows_OI.contiguous().view(torch.uint8) ^ OFFSET)

    def _scales_in(self, held: torch.Tensor) -> torch.Tensor:
        scales, end, *_ = self._layout.starts
        return held[scales:end].view(torch.float32)


def _all_of(rows_OI: torch.Tensor) -> torch.Tensor:
    """Returns the end of a group that has all inputs."""
    return torch.tensor([rows_OI.shape[1]], dtype=torch.int32)


def padded_bytes(outputs: int, inputs: int) -> int:
    """Returns the bytes of a weight in the kernel's layout, which its scales follow."""
    return -(-outputs // BLOCK) * BLOCK * inputs


class RoundedRows(NamedTuple):
    """Memory for the rows of one call as integers. codes: int8 [rows, planes, inputs rounded up]; scales: float32;
    sums: int32 [rows, planes]."""

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def room(cls, rows: int, planes: int, inputs: int) -> "RoundedRows":
        codes = torch.empty(rows, planes, -(-inputs // LANES) * LANES, dtype=torch.int8)
        sums = torch.empty(rows, planes, dtype=torch.int32)
        return cls(codes, torch.empty(rows, dtype=torch.float32), sums)

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """The arguments of a kernel that works in it."""
        return self.codes.data_ptr(), self.codes.shape[2], self.scales.data_ptr(), self.sums.data_ptr()


def int8_methods(dtype: torch.dtype) -> MakeMethod:
    """Returns what makes the methods of int8 weights."""
    return _methods(dtype, PLANES.get(dtype, 0), Int8Method)


def w8a8_methods(dtype: torch.dtype) -> MakeMethod:
    """Returns what makes the methods of int8 weights whose inputs are rounded too."""
    return _methods(dtype, 1, W8A8Method)


@cache
def int8_kernel(dtype: torch.dtype) -> Kernel | None:
    """Returns the kernel for inputs and outputs of `dtype`; None where this CPU or its compiler has none."""
    library = cpu_int8_library(dtype)
    if library is None or not hasattr(library, "int8_gemm"):
        return None
    work = (POINTER, NUMBER, POINTER, POINTER, COUNT)
    return Kernel(
        library, "int8_gemm", POINTER, POINTER, POINTER, NUMBER, POINTER, POINTER, *work, NUMBER, NUMBER, NUMBER, COUNT
    )


def grouped_int8_kernel(dtype: torch.dtype) -> Kernel | None:
    """Returns the kernel for the rows of several weights; None where int8_kernel is. See cpu_experts.py."""
    library = cpu_int8_library(dtype)
    if library is None or int8_kernel(dtype) is None:
        return None
    work, groups = (POINTER, NUMBER, POINTER, POINTER, COUNT), (POINTER, POINTER, NUMBER, NUMBER)
    return Kernel(
        library, "grouped_int8_gemm", POINTER, NUMBER, NUMBER, POINTER, NUMBER, POINTER, POINTER, *work, *groups,
        NUMBER, NUMBER, COUNT,
    )  # fmt: skip


def multiplies_int8(dtype: torch.dtype) -> bool:
    """True if a kernel multiplies int8 weights by inputs of `dtype` on this CPU."""
    return int8_kernel(dtype) is not None or code_gemm(dtype, 1) is not None


def _methods(dtype: torch.dtype, planes: int, twin: type[Int8Method]) -> MakeMethod:
    """Returns what makes compiled methods of weights whose inputs the kernel can read, else twins."""
    kernel = int8_kernel(dtype)
    codes = code_gemm(dtype, planes) if kernel is None and planes else None

    def make(weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given) -> LinearMethod:
        inputs = weights[0].span(1, context.mesh).length
        if inputs > MOST_INPUTS or not inputs:
            return twin(weights, context, place)
        if kernel is not None and inputs % QUAD == 0:
            return CpuInt8Method(kernel, planes, weights, context, place)
        return twin(weights, context, place) if codes is None else Int8CodesMethod(weights, context, place, codes)

    return make
