"""Inputs before products with codes, on GPUs in Triton: rows rounded to int8 or E4M3, each with a scale of its own, and
inputs in the order of a weight's columns. Imported only where Triton is installed. T rows, I inputs, C columns, E
experts, P pairs of a token and an expert.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from typing import Final

import torch
import triton
import triton.language as tl

from tandem.parallel.expert_methods import Groups
from tandem.workers.kernels.triton.triton_lora import FP_FUSION

ROW_BLOCK: Final = 1024
"""Elements of a row that one program takes at a time."""


@triton.jit(do_not_specialize=["inputs", "x_stride", "size"])
def round_rows(x, to, of_row, inputs, x_stride, size, FLOATS: tl.constexpr, BLOCK: tl.constexpr):
    """Rounds rows to 127 steps each way of their largest number, as numbers of to's dtype, or to codes of E4M3, uint8
    [T, size], 0 from inputs on. of_row: the scales [T]. A row that has a NaN has a scale of NaN. Programs: T."""
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    most, odd = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, inputs, BLOCK):
        value = tl.load(x + t * x_stride + first + j, mask=first + j < inputs, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(value))
        odd += value - value  # NaN of what is no number, else 0
    largest = tl.max(most, axis=0) + tl.sum(odd, axis=0)
    steps: tl.constexpr = 448.0 if FLOATS else 127.0
    inverse = tl.where(largest > 0, steps / largest, 0.0)
    for first in range(0, size, BLOCK):
        value = tl.load(x + t * x_stride + first + j, mask=first + j < inputs, other=0.0).to(tl.float32) * inverse
        if FLOATS:
            rounded = e4m3_bits(value)
        else:
            rounded = (value + 12582912.0) - 12582912.0  # 1.5 * 2**23: to the nearest integer, halves to even ones
        tl.store(to + t * size + first + j, rounded.to(to.dtype.element_ty), mask=first + j < size)
    tl.store(of_row + t, largest / steps)


@triton.jit
def e4m3_bits(value):
    """Returns the nearest E4M3 of numbers within its range, ties to even, as codes in int32; NaN stays one."""
    bits = value.to(tl.int32, bitcast=True)
    sign, size = (bits >> 24) & 128, bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + ((size >> 20) & 1) - (120 << 23)) >> 20
    small = (tl.abs(value) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(size < (121 << 23), small, tl.minimum(normal, 126))
    return sign | tl.where(size > 0x7F800000, 127, code)


@triton.jit(do_not_specialize=["inputs", "x_stride", "columns", "room", "experts", "top_k"])
def gather_inputs(
    x, to, order, pairs, ends, inputs, x_stride, columns, room, experts, top_k,
    EXPERTS: tl.constexpr, GATHERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """to[r, c] = x[row of r, order[c]], 0 where the order is less. order: int32, of each expert, `room` apart.
    EXPERTS: a power of two; 0: rows are those of x, and there is one order. Programs: rows, C / BLOCK."""
    r = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, own, others = r.to(tl.int64), order, 0
    if EXPERTS > 0:
        e = tl.arange(0, EXPERTS)
        expert = tl.sum(((tl.load(ends + e, mask=e < experts, other=0) <= r) & (e < experts)).to(tl.int32), axis=0)
        others = expert // experts  # 1: the row is another rank's
        own = order + tl.minimum(expert, experts - 1).to(tl.int64) * room
        if GATHERS:
            row = (tl.load(pairs + r) // top_k).to(tl.int64)
    i = tl.load(own + c, mask=c < columns, other=-1)
    value = tl.load(x + row * x_stride + i, mask=i >= others * inputs, other=0.0)
    tl.store(to + r.to(tl.int64) * columns + c, value, mask=c < columns)


# ---- calls ----


def rounded_to_int8(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows rounded to integers up to 127, in x's dtype, and their scales [T], float32."""
    to_TI = torch.empty(x_TI.shape, dtype=x_TI.dtype, device=x_TI.device)
    return to_TI, _round(x_TI, to_TI, floats=False)


def rounded_to_e4m3(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows rounded to float8_e4m3fn, and their scales [T], float32."""
    to_TI = torch.empty(x_TI.shape, dtype=torch.uint8, device=x_TI.device)
    of_row_T = _round(x_TI, to_TI, floats=True)
    return to_TI.view(torch.float8_e4m3fn), of_row_T


def _round(x_TI: torch.Tensor, to_TI: torch.Tensor, *, floats: bool) -> torch.Tensor:
    rows, inputs = x_TI.shape
    assert x_TI.stride(1) == 1
    of_row_T = torch.empty(rows, dtype=torch.float32, device=x_TI.device)
    if rows:
        round_rows[(rows,)](
            x_TI,
            to_TI,
            of_row_T,
            inputs,
            x_TI.stride(0),
            inputs,
            FLOATS=floats,
            BLOCK=ROW_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return of_row_T


def gathered(
    x: torch.Tensor,
    order: torch.Tensor,
    columns: int,
    groups: Groups | None = None,
    *,
    room: int = 0,
    gathers: bool = False,
) -> torch.Tensor:
    """Returns rows [T, C] of x's inputs in an order, 0 where it has PADDING; for groups rows [P, C], each in its
    expert's order, `room` numbers apart."""
    rows = len(x) if groups is None else len(groups.order_P)
    to = x.new_empty(rows, columns)
    if not rows:
        return to
    assert x.stride(1) == 1
    pairs, ends, experts, top_k = (order, order, 0, 1) if groups is None else _lists(groups)
    gather_inputs[(rows, triton.cdiv(columns, ROW_BLOCK))](
        x, to, order, pairs, ends, x.shape[1], x.stride(0), columns, room, experts, top_k,
        EXPERTS=triton.next_power_of_2(experts) if experts else 0, GATHERS=gathers, BLOCK=ROW_BLOCK, num_warps=4,
        enable_fp_fusion=FP_FUSION,
    )  # fmt: skip
    return to


def _lists(groups: Groups) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return groups.order_P, groups.ends_E, len(groups.ends_E), groups.top_k
