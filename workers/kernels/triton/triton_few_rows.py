"""Products of a few rows with a weight for GPUs in Triton, whose inputs may be split among programs ("split-K").

    y[t, o] = sum_i x[t, i] W[o, i] + b[o],  1 <= T <= MOST_ROWS

Such a product reads each weight once and computes next to nothing. A program multiplies all rows by some outputs'
weights, over all inputs or over one of several spans of them; then sums of spans are kept in float32 and a second
kernel adds them, one behind the other. So there are no atomic sums, and a row's result depends neither on other rows
nor on how many there are. 16-bit weights, summed in float32 by tensor cores, rounded once. The twin is F.linear, which
multiplies everything else (workers/platforms/few_rows.py chooses). Imported only where Triton is installed. T rows, I
inputs, O outputs, S spans.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

MOST_ROWS: Final = 8
TILE_ROWS: Final = tl.constexpr(16)
"""Rows that a tensor core multiplies at once; those beyond T are zeros."""
ADDED: Final = 256
"""Outputs whose spans a program adds."""
VECTOR: Final = tl.constexpr(8)
"""Inputs are a multiple of it: 16 bytes are fetched at once, and ahead of their use."""


class FewRowsTile(NamedTuple):
    """Outputs of a program and inputs that it multiplies at once; its warps and the depth of its pipeline."""

    outputs: int
    inputs: int
    warps: int
    stages: int


TILES: Final = (FewRowsTile(16, 256, 4, 4), FewRowsTile(32, 256, 4, 4), FewRowsTile(64, 128, 4, 4))
"""Each keeps 24 or 48 KiB of weights under way."""
MOST_SPANS: Final = 8
PROGRAMS_OF_ONE: Final = 3
"""Programs of a multiprocessor, fewer than which are split further."""


class FewRowsPlan(NamedTuple):
    """The way in which a weight of one shape is multiplied."""

    tile: FewRowsTile
    spans: int


def few_rows_plans(outputs: int, inputs: int, multiprocessors: int) -> list[FewRowsPlan]:
    """Returns the plans worth measuring for a shape: each tile unsplit, and where that leaves multiprocessors idle,
    with as many spans as keep them busy."""
    plans = []
    for tile in TILES:
        programs, steps = triton.cdiv(outputs, tile.outputs), triton.cdiv(inputs, tile.inputs)
        busy = triton.cdiv(PROGRAMS_OF_ONE * multiprocessors, programs)
        spans = min(MOST_SPANS, steps, 1 << (busy - 1).bit_length())
        plans += [FewRowsPlan(tile, each) for each in dict.fromkeys((1, spans))]
    return plans


@triton.jit(do_not_specialize=["rows", "outputs", "span"])
def multiply_few(
    x, weight, bias, y, rows, outputs, inputs, x_stride, span,
    BIASED: tl.constexpr, EVEN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Writes y [S, T, O]: sums over spans of inputs, in float32, or the whole product if there is one span, with the
    bias then. x [T, I], its rows x_stride apart; weight [O, I]. span: inputs of one, a multiple of INPUTS. EVEN: INPUTS
    divides I. I and x_stride: multiples of VECTOR. Programs: O / OUTPUTS, S."""
    t, o, i = tl.arange(0, TILE_ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    inputs, x_stride = inputs // VECTOR * VECTOR, x_stride // VECTOR * VECTOR  # so that the compiler knows it
    begin = tl.multiple_of(tl.program_id(1) * span, INPUTS)
    end = tl.multiple_of(tl.minimum(begin + span, inputs), VECTOR)
    here, seen = t < rows, o < outputs
    at_x = x + (t * x_stride)[:, None] + i[None, :]
    at_weight = weight + (tl.minimum(o, outputs - 1).to(tl.int64) * inputs)[:, None] + i[None, :]
    sums = tl.zeros((TILE_ROWS, OUTPUTS), tl.float32)
    for place in range(begin, end, INPUTS):
        if EVEN:
            of_x = tl.load(at_x + place, mask=here[:, None], other=0.0)
            of_weight = tl.load(at_weight + place)
        else:
            inside = (place + i < end)[None, :]
            of_x = tl.load(at_x + place, mask=here[:, None] & inside, other=0.0)
            of_weight = tl.load(at_weight + place, mask=inside, other=0.0)
        sums = tl.dot(of_x, tl.trans(of_weight), sums)
    if BIASED:
        sums += tl.load(bias + o, mask=seen, other=0.0).to(tl.float32)[None, :]
    to = y + (tl.program_id(1) * rows + t).to(tl.int64)[:, None] * outputs + o[None, :]
    tl.store(to, sums.to(y.dtype.element_ty), mask=here[:, None] & seen[None, :])


@triton.jit(do_not_specialize=["size", "outputs"])
def add_spans(
    sums, bias, y, size, outputs, BIASED: tl.constexpr, SPANS: tl.constexpr, ADDED: tl.constexpr
):  # fmt: skip
    """y [T, O] = the sums [S, T, O] of spans, in order, and the bias. size: T O. Programs: T O / ADDED."""
    place = tl.program_id(0) * ADDED + tl.arange(0, ADDED)
    here = place < size
    total = tl.load(sums + place, mask=here, other=0.0)
    for span in tl.static_range(1, SPANS):
        total += tl.load(sums + span * size + place, mask=here, other=0.0)
    if BIASED:
        total += tl.load(bias + place % outputs, mask=here, other=0.0).to(tl.float32)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=here)


def multiply_few_rows(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, plan: FewRowsPlan
) -> torch.Tensor:
    """Returns y_TO in x's dtype. x: 1 to MOST_ROWS rows in 16 bits; weight: contiguous. Inputs: a multiple of
    VECTOR."""
    (rows, inputs), outputs, (tile, spans) = x_TI.shape, len(weight_OI), plan
    assert inputs % VECTOR.value == 0, f"{inputs} inputs are no multiple of {VECTOR.value}"
    if x_TI.stride(1) != 1 or x_TI.stride(0) % VECTOR.value:
        x_TI = x_TI.contiguous()
    y_TO = torch.empty((rows, outputs), dtype=x_TI.dtype, device=x_TI.device)
    is_biased, is_split = bias_O is not None, spans > 1
    bias = weight_OI if bias_O is None else bias_O  # any pointer
    sums = torch.empty((spans, rows, outputs), dtype=torch.float32, device=x_TI.device) if is_split else y_TO
    span = triton.cdiv(triton.cdiv(inputs, tile.inputs), spans) * tile.inputs
    multiply_few[(triton.cdiv(outputs, tile.outputs), spans)](
        x_TI, weight_OI, bias, sums, rows, outputs, inputs, x_TI.stride(0), span,
        BIASED=is_biased and not is_split, EVEN=inputs % tile.inputs == 0, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if is_split:
        size = rows * outputs
        add_spans[(triton.cdiv(size, ADDED),)](
            sums, bias, y_TO, size, outputs, BIASED=is_biased, SPANS=spans, ADDED=ADDED, num_warps=1
        )
    return y_TO
