"""Products with weights that are codes of a few bits, on CPUs with AVX512-VNNI, for any number of rows.

    y[t, o] = s[t] outer[o] sum_g scale[o, g] sum_{i in g} c[t, i] (value(code[o, i]) - zero[o, g]) + b[o]

c, s: x[t] as integers of one to three bytes and their scale (cpu_int8_gemm.py). A value is an integer of one byte, or
where a table has others of as many as an input (NF4 in bf16: to 2**-16 of its largest; the product of two lower bytes
is left out, as far below as what inputs of two bytes round away). The sums within a group are of integers and exact,
those of the groups are added in order in float32: a row's result does not depend on its batch mates. One kernel serves
every format of up to 4 bits, as codes pass a table of 16 bytes in a register; codes of 5 to 8 bits are integers
themselves.

CpuCodedMethod multiplies with it; its twin is CodedMethod. cpu_experts.py has the products with weights of experts.

The layout, in one piece of memory: codes | scales | zeros or outer scales | ends of groups | order of inputs. Codes:
blocks of 32 outputs, each [I / 8][32][4], a byte for the codes of inputs i (its lower half) and i + 4 of eight inputs;
8 bits: [I / 8][2][32][4]. Each group starts with an eight and is padded to whole ones. Scales and zeros: float32,
blocks of [G][32]; scales that have outer ones [O] are a byte each (E4M3), which the kernel widens. Ends and order (of
weights that have one): int32. T rows, I inputs, O outputs, G groups.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import Groups
from tandem.parallel.linear_methods import LinearMethod, MakeMethod, Place, as_given
from tandem.parallel.params import Param
from tandem.parallel.quantization.coded import CodedMethod
from tandem.parallel.quantization.coded_weight import CodedWeight
from tandem.parallel.quantization.schemes import Coded, Inputs
from tandem.workers.kernels.cpu.cpu_build import cpu_code_library
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, REAL, Kernel
from tandem.workers.kernels.cpu.weight_blocks import code_rounding
from tandem.workers.kernels.huge_pages import WEIGHTS

BLOCK, EIGHT, LANES = 32, 8, 16
NIBBLE_BITS, TABLE, TABLES = 4, 16, 3
MOST_INPUTS = 2**16
"""Sums of more products of bytes could leave int32."""
PLANES = {torch.bfloat16: 2, torch.float32: 3}
"""Bytes of an input that is not to lose precision."""
LARGEST_BYTE, MIDDLE, MOST_ABOVE = 255, 128, 127
WORK = (POINTER, NUMBER, POINTER, POINTER, POINTER, POINTER)
"""The arguments that WorkRoom.places are."""


class Values(NamedTuple):
    """The meaning of codes: the sum of 256**k (table_k[code] - offset_k), times unit. Up to three tables, the highest
    first."""

    unit: float
    offsets: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CodeLayout:
    """The form of a weight in its piece of memory. held_inputs: with groups padded, at most.

    A weight's shape decides it, so that layers of one shape can share memory; only groups that end anywhere are padded
    for the worst case.
    """

    outputs: int
    inputs: int
    groups: int
    held_inputs: int
    bits: int
    values: Values
    has_zeros: bool
    has_order: bool
    is_narrow: bool = False

    @property
    def blocks(self) -> int:
        return -(-self.outputs // BLOCK)

    @property
    def line(self) -> int:
        """Bytes of eight inputs of a block."""
        return BLOCK * EIGHT * self.bits // 8

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Places in bytes where the parts begin, and where the last one ends: scales, zeros or outer scales, ends,
        order."""
        numbers = self.blocks * BLOCK * self.groups
        sizes = [
            self.blocks * self.held_inputs // EIGHT * self.line,
            numbers if self.is_narrow else 4 * numbers,
            4 * numbers if self.has_zeros else 4 * self.blocks * BLOCK * self.is_narrow,
            4 * self.groups,
            4 * self.inputs if self.has_order else 0,
        ]
        return tuple(sum(sizes[: count + 1]) for count in range(len(sizes)))

    @property
    def room(self) -> int:
        """Bytes of the piece."""
        return self.starts[-1]

    @property
    def nbytes(self) -> int:
        """Bytes that Coded.parts() counts: without padding."""
        codes = -(-self.outputs * self.inputs * self.bits // 8)
        order = 4 * (self.inputs + self.groups) if self.has_order else 0
        if self.is_narrow:
            return codes + self.outputs * (self.groups + 4) + order
        return codes + self.outputs * self.groups * (8 if self.has_zeros else 4) + order

    @cached_property
    def numbers(self) -> "ctypes.Array[ctypes.c_long]":
        """The struct of cpu_code_gemm.c."""
        scales, zeros, ends, order, _ = self.starts
        zero_at, order_at = (zeros if self.has_zeros else 0), (order if self.has_order else 0)
        outer_at = zeros if self.is_narrow else 0
        values, spare = self.values, (0,) * TABLE
        offsets = [*values.offsets, *[0] * TABLES][:TABLES]
        tables = [(*table, *spare)[:TABLE] for table in [*values.tables, *[spare] * TABLES][:TABLES]]
        numbers = [
            self.outputs, self.inputs, self.groups, self.line, scales, zero_at, outer_at, ends, order_at,
            len(values.tables), *offsets, *chain.from_iterable(tables),
        ]  # fmt: skip
        return (ctypes.c_long * len(numbers))(*numbers)


def layout_of(coded: CodedWeight, dtype: torch.dtype) -> CodeLayout | None:
    """Returns how a weight is held; None for one that the kernel does not multiply: too many inputs, or codes of more
    than 4 bits whose table has others than integers of a byte.

    dtype: of the inputs.
    """
    (outputs, inputs), groups = coded.codes_OI.shape, coded.scale_OG.shape[1]
    values = values_of(coded.table, coded.bits, PLANES[dtype])
    if values is None or not 0 < inputs <= MOST_INPUTS:
        return None
    if coded.ends_G is None:
        held = _padded(inputs, coded.group)
    else:
        held = (inputs + (EIGHT - 1) * min(groups, inputs)) // EIGHT * EIGHT
    bits = NIBBLE_BITS if coded.bits <= NIBBLE_BITS else 8
    has_zeros, has_order = coded.zero_OG is not None, coded.order_I is not None
    return CodeLayout(outputs, inputs, groups, held, bits, values, has_zeros, has_order, coded.outer_O is not None)


def values_of(table: torch.Tensor | None, bits: int, most: int) -> Values | None:
    """Returns what codes of so many bits mean to the kernel; None if it cannot say it. table: as CodedWeight has it.
    most: bytes of a value that is no integer of one."""
    if table is None:
        return Values(1.0, (0,), (tuple(range(2**bits)),))
    numbers = table.tolist()
    if (unit := _unit_of(numbers)) is not None:
        offset = -round(min(numbers) / unit)
        raised = [round(number / unit) + offset for number in numbers]
        if max(raised) <= LARGEST_BYTE:
            return Values(unit, (offset,), (tuple(raised),))
    if bits > NIBBLE_BITS:
        return None
    ones = (256**most - 1) // LARGEST_BYTE  # 1 in each byte
    unit = max(map(abs, numbers)) / (MOST_ABOVE * ones)
    raised = [round(number / unit) + MIDDLE * ones for number in numbers]
    return Values(unit, (MIDDLE,) * most, tuple(zip(*(number.to_bytes(most, "big") for number in raised), strict=True)))


def _unit_of(numbers: Sequence[float]) -> float | None:
    """Returns the largest power of two of which all numbers are multiples, from 1 down to 2**-8; None without one."""
    units = (2.0**-power for power in range(9))
    return next((unit for unit in units if all((number / unit).is_integer() for number in numbers)), None)


class Digits(NamedTuple):
    """The integers that an input is held in: how many, and their bytes."""

    number: int
    size: int

    @classmethod
    def of(cls, library: ctypes.CDLL, planes: int) -> "Digits":
        size = ctypes.c_int.in_dll(library, "code_gemm_digit_bytes").value
        return cls(-(-planes // size), size)


class WorkRoom(NamedTuple):
    """Memory for the rows of one call. places: where integers of the inputs begin, their stride, and where their
    scales, sums, totals and sorted inputs begin."""

    memory: torch.Tensor
    places: tuple[int, ...]

    @classmethod
    def of(cls, layout: CodeLayout, rows: int, digits: Digits, element_bytes: int) -> "WorkRoom":
        stride = -(-layout.held_inputs // LANES) * LANES + LANES
        codes, scales = rows * digits.number * digits.size * stride, 4 * rows
        sums = 4 * rows * digits.number * layout.groups
        totals = 4 * rows * layout.groups if layout.has_zeros else 0
        inputs = rows * layout.inputs * element_bytes if layout.has_order else 0
        memory = torch.empty(codes + scales + sums + totals + inputs, dtype=torch.uint8)
        at = memory.data_ptr()
        return cls(memory, (at, stride, *accumulate((scales, sums, totals), initial=at + codes)))


class CodeGemm:
    """The kernel for inputs of `dtype` that are rounded to `planes` bytes."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, planes: int) -> None:
        self.dtype = dtype
        self._kernel = Kernel(
            library, "code_gemm", POINTER, POINTER, REAL, POINTER, NUMBER, POINTER, POINTER, *WORK, COUNT, NUMBER, COUNT
        )
        self._pack = Kernel(library, "pack_codes", POINTER, POINTER, NUMBER, NUMBER, POINTER, COUNT)
        self._planes, self._digits = planes, Digits.of(library, planes)

    def pack(self, coded: CodedWeight, layout: CodeLayout) -> torch.Tensor:
        """Returns the weight in its layout, uint8 [layout.room]."""
        held = self.room(layout, _ends(coded))
        scales, zeros, ends, order, end = layout.starts
        if coded.order_I is not None:
            held[order:end].view(torch.int32).copy_(coded.order_I)
        held[scales:zeros].view(coded.scale_OG.dtype).copy_(_by_block(coded.scale_OG))
        if coded.outer_O is not None:
            held[zeros:ends].view(torch.float32)[: layout.outputs].copy_(coded.outer_O)
        if coded.zero_OG is not None:
            held[zeros:ends].view(torch.float32).copy_(_by_block(coded.zero_OG / layout.values.unit))
        self.fill(layout, held, 0, _integers(coded.codes_OI, layout).contiguous())
        return held

    def room(self, layout: CodeLayout, ends_G: torch.Tensor) -> torch.Tensor:
        """Returns memory for a weight, uint8 [layout.room]: zeros, and where its groups end."""
        held, ends = WEIGHTS.zeros(layout.room), layout.starts[2]
        held[ends : ends + 4 * layout.groups].view(torch.int32).copy_(ends_G)
        return held

    def fill(self, layout: CodeLayout, held: torch.Tensor, first: int, codes_OI: torch.Tensor) -> None:
        """Writes codes, uint8, from the output `first` on into what room() returned. Those of 8 bits are raised by
        their offset."""
        self._pack(layout.numbers, codes_OI.data_ptr(), first, len(codes_OI), held.data_ptr(), torch.get_num_threads())

    def __call__(
        self, layout: CodeLayout, held: torch.Tensor, x_TI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns y_TO in x's dtype. held: as pack() returns it. bias: in x's dtype."""
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        assert x_TI.shape[1] == layout.inputs and (bias_O is None or bias_O.dtype is x_TI.dtype)
        rows = len(x_TI)
        y_TO = torch.empty(rows, layout.outputs, dtype=x_TI.dtype)
        work = WorkRoom.of(layout, rows, self._digits, x_TI.element_size())
        self._kernel(
            layout.numbers, held.data_ptr(), layout.values.unit, x_TI.data_ptr(), x_TI.stride(0),
            None if bias_O is None else bias_O.data_ptr(), y_TO.data_ptr(),
            *work.places, self._planes, rows, torch.get_num_threads(),
        )  # fmt: skip
        return y_TO


class GroupedCodeGemm:
    """The kernel for the rows of several weights of one layout. See cpu_experts.py."""

    def __init__(self, library: ctypes.CDLL, planes: int) -> None:
        self._kernel = Kernel(
            library, "grouped_code_gemm", POINTER, POINTER, NUMBER, REAL, POINTER, NUMBER, POINTER, POINTER, *WORK,
            COUNT, POINTER, POINTER, NUMBER, NUMBER, COUNT,
        )  # fmt: skip
        self._planes, self._digits = planes, Digits.of(library, planes)

    def __call__(
        self,
        layout: CodeLayout,
        held_E: torch.Tensor,
        x: torch.Tensor,
        bias_EO: torch.Tensor | None,
        groups: Groups,
        *,
        gathers: bool,
    ) -> torch.Tensor:
        """Returns y_PO as ExpertMethod.apply() does. held_E: what pack() returns for each expert, stacked."""
        assert x.stride(1) == 1 and x.shape[1] == layout.inputs
        rows = len(groups.order_P)
        y_PO = torch.empty(rows, layout.outputs, dtype=x.dtype)
        work = WorkRoom.of(layout, rows, self._digits, x.element_size())
        self._kernel(
            layout.numbers, held_E.data_ptr(), held_E.stride(0), layout.values.unit, x.data_ptr(), x.stride(0),
            None if bias_EO is None else bias_EO.data_ptr(), y_PO.data_ptr(),
            *work.places, self._planes, groups.order_P.data_ptr(), groups.ends_E.data_ptr(), len(held_E),
            groups.top_k if gathers else 0, torch.get_num_threads(),
        )  # fmt: skip
        return y_PO


@cache
def code_gemm(dtype: torch.dtype, planes: int) -> CodeGemm | None:
    """Returns the kernel for inputs and outputs of `dtype`; None where this CPU or its compiler has none. planes: 1, or
    PLANES[dtype]."""
    library = _library(dtype, planes)
    return None if library is None else CodeGemm(library, dtype, planes)


@cache
def grouped_code_gemm(dtype: torch.dtype, planes: int) -> GroupedCodeGemm | None:
    """Returns the kernel for the rows of several weights; None where code_gemm's is."""
    library = _library(dtype, planes)
    return None if library is None else GroupedCodeGemm(library, planes)


class CpuCodedMethod(CodedMethod):
    """Coded weights in the kernel's layout."""

    def __init__(
        self, gemm: CodeGemm, weights: Sequence[Param], context: ParallelContext, place: Place = as_given
    ) -> None:
        super().__init__(weights, context, place, rounding=code_rounding())
        self._gemm = gemm
        self.layout: CodeLayout | None = None

    def take_coded(self, weight: CodedWeight, bias_O: torch.Tensor | None) -> None:
        self.layout = layout_of(weight, self._gemm.dtype)
        assert self.layout is not None, "code_methods() asked"
        self.nbytes = self.layout.nbytes
        self._held, self._arrive = self._place(self._gemm.pack(weight, self.layout))
        self._bias_O = bias_O

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._arrive is not None:
            self._arrive()
        assert self.layout is not None, "not loaded"
        return self._gemm(self.layout, self._held, x_TI, self._bias_O)


def code_methods(dtype: torch.dtype, scheme: Coded) -> MakeMethod:
    """Returns what makes compiled methods of weights that the kernel multiplies, else twins."""
    gemm = code_gemm(dtype, planes_of(dtype, scheme))

    def make(weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given) -> LinearMethod:
        inputs = weights[0].span(1, context.mesh).length
        if gemm is None or not multiplies(scheme, inputs):
            return CodedMethod(weights, context, place, rounding=code_rounding())
        return CpuCodedMethod(gemm, weights, context, place)

    return make


def planes_of(dtype: torch.dtype, scheme: Coded) -> int:
    """Returns the bytes of an input that a scheme asks for."""
    return 1 if scheme.inputs is Inputs.INT8 else PLANES.get(dtype, 1)


def multiplies(scheme: Coded, inputs: int) -> bool:
    """True if the kernel multiplies weights of a scheme with so many inputs."""
    return 0 < inputs <= MOST_INPUTS and scheme.has_product


# ---- inside ----


def _library(dtype: torch.dtype, planes: int) -> ctypes.CDLL | None:
    library = cpu_code_library(dtype)
    assert planes in (1, PLANES.get(dtype, 1)), (dtype, planes)
    return library if library is not None and hasattr(library, "code_gemm") else None


def _padded(inputs: int, group: int) -> int:
    """Returns the inputs of regular groups, each padded to eights."""
    return inputs // group * _eights(group) + _eights(inputs % group)


def _eights(inputs: int) -> int:
    return -(-inputs // EIGHT) * EIGHT


def _ends(coded: CodedWeight) -> torch.Tensor:
    if coded.ends_G is not None:
        return coded.ends_G
    inputs = coded.codes_OI.shape[1]
    return torch.arange(1, coded.scale_OG.shape[1] + 1).mul_(coded.group).clamp_(max=inputs).to(torch.int32)


def _integers(codes_OI: torch.Tensor, layout: CodeLayout) -> torch.Tensor:
    """Returns codes as they are held: 4 bits, or integers that have been raised by their offset."""
    if layout.bits == NIBBLE_BITS:
        return codes_OI
    return torch.tensor(layout.values.tables[0], dtype=torch.uint8)[codes_OI.long()]


def _by_block(numbers_OG: torch.Tensor) -> torch.Tensor:
    """Returns numbers of outputs and groups in the kernel's order, in one row."""
    outputs, groups = numbers_OG.shape
    padded_OG = numbers_OG.new_zeros(-(-outputs // BLOCK) * BLOCK, groups)
    padded_OG[:outputs] = numbers_OG
    return padded_OG.view(-1, BLOCK, groups).transpose(1, 2).reshape(-1)
