"""Products with weights that are codes of a few bits, for GPUs in Triton, for any number of rows.

    y[t, o] = s[t] outer[o] sum_g scale[o, g] sum_{i in g} x[t, i] (value(code[o, i]) - zero[o, g]) + b[o]

A program multiplies some rows by some outputs' weights, over all inputs or over one of several spans of them; it reads
each word of codes once, ahead of its use, and turns it into 16-bit floats in registers: integers and small floats by
their bits, which are those of a float but for its exponent, others by a table of 16 values in the cache. Such values
are exact, but for tables that 16 bits round (NF4) and zeros that are no integers. Tensor cores sum a group's products
in float32; the group's scale multiplies the sum. Up to FEW_ROWS rows are one tile, whose spans fill the device; more
take larger tiles, unsplit. Sums of spans are added in order by triton_few_rows.py. s: scales of rows that were rounded
(triton_code_inputs.py), else left out. outer: where scales are E4M3 (NARROW_SCALES), in place of zeros; else left out.

Weights are held as code_words.py says, int8 rows too, as codes from 0 on. The twins are CodedMethod,
Int8Method and W8A8Method. Imported only where Triton is installed. T rows, I inputs, O outputs, G groups, S spans, E
experts, P pairs of a token and an expert.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from tandem.parallel.expert_methods import Groups
from tandem.workers.kernels.triton.codes.code_words import CodeKind, Scaled
from tandem.workers.kernels.triton.triton_attention import H100, ROOMY_BYTES, Multiprocessors
from tandem.workers.kernels.triton.triton_few_rows import ADDED, add_spans
from tandem.workers.kernels.triton.triton_lora import FP_FUSION

INTEGERS: Final = tl.constexpr(int(CodeKind.INTEGERS))
FLOATS: Final = tl.constexpr(int(CodeKind.FLOATS))
WHOLE: Final = tl.constexpr(int(Scaled.WHOLE))
STEP: Final = tl.constexpr(int(Scaled.STEP))
LIST: Final = tl.constexpr(int(Scaled.LIST))

FEW_ROWS: Final = 16
"""Rows that one tile takes."""
MOST_SPANS: Final = 8
LEAST_STEPS: Final = 4
"""Steps of a span, which fill its pipeline."""
PROGRAMS_OF_ONE: Final = 3
"""Programs of a multiprocessor, fewer than which are split further."""
MANY_FROM: Final = 32
"""Rows of an expert on average, from which on tiles are large."""

# Bits of 128 in bf16 and of 1,024 in fp16, whose lower bits are those of an integer that is added to it.
BF16_BASE: Final = tl.constexpr(0x43004300)
FP16_BASE: Final = tl.constexpr(0x64006400)


class CodeTile(NamedTuple):
    """Outputs and rows of a program; its warps and the depth of its pipeline."""

    outputs: int
    rows: int
    warps: int
    stages: int


TILES: Final = {
    2: (CodeTile(64, FEW_ROWS, 4, 4), CodeTile(64, 32, 4, 3), CodeTile(64, 64, 8, 3)),
    4: (CodeTile(32, FEW_ROWS, 4, 3),),
}
"""Tiles by the bytes of an element of x, each for up to as many rows as it has; the last for more."""
SMALL_TILES: Final = {2: (*TILES[2][:2], CodeTile(64, 64, 4, 3)), 4: (CodeTile(32, FEW_ROWS, 8, 3),)}
"""The same for devices with little shared memory, on which the last of TILES[2] and that of TILES[4] spill some."""
NARROW: Final = CodeTile(32, FEW_ROWS, 4, 4)
"""Tile of 16-bit x and of codes in a table, where parts of a step have scales: a wider one spills on sm_100."""


# ---- codes to values ----


@triton.jit
def pair_values(pair, like, table, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """Returns values [.., 2] of `like`'s dtype. pair: codes of four bits at bits 0 and 16, int32. OFFSET: what integers
    are less."""
    wide: tl.constexpr = like.dtype.element_ty == tl.bfloat16
    half: tl.constexpr = tl.bfloat16 if wide else tl.float16
    if KIND == INTEGERS:
        bits = pair | (BF16_BASE if wide else FP16_BASE)
        value = _split(bits).to(half, bitcast=True) - ((128.0 if wide else 1024.0) + OFFSET)
    elif KIND == FLOATS:  # E2M1: 2**126 and 2**14 are the offsets of exponents
        bits = ((pair & 0x00080008) << 12) | ((pair & 0x00070007) << (6 if wide else 9))
        value = _split(bits).to(half, bitcast=True) * (8.507059173023462e37 if wide else 16384.0)
    else:
        value = tl.load(table + tl.join(pair & 15, pair >> 16))
    return value.to(like.dtype.element_ty)


@triton.jit
def _split(bits):
    return tl.join(bits.to(tl.int16), (bits >> 16).to(tl.int16))


@triton.jit
def byte_values(byte, like, table, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """Returns values of `like`'s dtype. byte: codes, uint8."""
    wide: tl.constexpr = like.dtype.element_ty == tl.bfloat16
    code = byte.to(tl.int16)
    if KIND == INTEGERS:
        if wide:  # which has seven bits after the first: the eighth is 128 more or less
            low = ((code & 127) | 0x4300).to(tl.bfloat16, bitcast=True)
            value = low - ((code & 128) ^ 0x4380).to(tl.bfloat16, bitcast=True)
            if OFFSET != 128:
                value += 128.0 - OFFSET
        else:
            value = (code | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)
    elif KIND == FLOATS:  # E4M3
        sign, rest = (code & 128) << 8, code & 127
        if wide:
            value = (sign | (rest << 4)).to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
        else:
            value = (sign | (rest << 7)).to(tl.float16, bitcast=True) * 256.0
    else:
        value = tl.load(table + code)
    return value.to(like.dtype.element_ty)


@triton.jit
def wide_scales(scale, NARROW_SCALES: tl.constexpr):
    """Returns scales in float32. scale: float32, or codes of E4M3, uint8."""
    if NARROW_SCALES:
        code = scale.to(tl.int16)
        scale = (((code & 128) << 8) | ((code & 127) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return scale


# ---- products ----


@triton.jit
def scaled_sums(
    x, at_row, here, codes, scales, zeros, parts, table, o, outputs, inputs, columns, group, begin, end,
    BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, ZEROS: tl.constexpr,
    SCALED: tl.constexpr, STEP_INPUTS: tl.constexpr, NARROW_SCALES: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Returns sums [OUTPUTS, ROWS], float32, over the steps from begin to end. at_row: where rows of x begin; o: the
    outputs; columns: codes of an output that are held, and numbers of a row of x: inputs, and padding to a multiple of
    STEP_INPUTS; group: inputs of one, a multiple or divisor of it."""
    PARTS: tl.constexpr = 4 if BITS == 4 else 1
    TOGETHER: tl.constexpr = STEP_INPUTS // PARTS
    k = tl.arange(0, TOGETHER)
    seen = o < outputs
    own = tl.minimum(o, outputs - 1)
    if BITS == 4:
        c = tl.arange(0, STEP_INPUTS // 8)
        at_code = codes + (own.to(tl.int64) * (columns // 8))[:, None] + c[None, :]
    else:
        at_code = codes + (own.to(tl.int64) * columns)[:, None] + k[None, :]
    at_x = x + at_row[None, :] + k[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    if SCALED == WHOLE and ZEROS:
        zero = tl.load(zeros + own)
    for step in range(begin, end):
        first = step * STEP_INPUTS
        code = tl.load(at_code + (step * (STEP_INPUTS // 8) if BITS == 4 else first))
        if SCALED == STEP:
            of_group = (first // group) * outputs + own
            if ZEROS:
                zero = tl.load(zeros + of_group)
            sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for part in tl.static_range(PARTS):
            if BITS == 4:
                value = pair_values((code >> (4 * part)) & 0x000F000F, x, table, KIND, OFFSET)
                value = value.reshape(OUTPUTS, TOGETHER)
            else:
                value = byte_values(code, x, table, KIND, OFFSET)
            if SCALED > STEP:
                number = tl.minimum(first + part * TOGETHER, inputs - 1) // group
                if SCALED == LIST:
                    number = tl.load(parts + (first // TOGETHER + part))
                of_group = number * outputs + own
                if ZEROS:
                    zero = tl.load(zeros + of_group)
            if ZEROS:
                value -= zero.to(x.dtype.element_ty)[:, None]
            right = tl.load(at_x + (first + part * TOGETHER), mask=here[None, :], other=0.0)
            if SCALED == WHOLE:
                total = tl.dot(value, right, total, input_precision="ieee")
            elif SCALED == STEP:
                sums = tl.dot(value, right, sums, input_precision="ieee")
            else:
                scale = wide_scales(tl.load(scales + of_group), NARROW_SCALES)
                total += tl.dot(value, right, input_precision="ieee") * scale[:, None]
        if SCALED == STEP:
            total += sums * wide_scales(tl.load(scales + of_group), NARROW_SCALES)[:, None]
    if SCALED == WHOLE:
        total *= wide_scales(tl.load(scales + own, mask=seen, other=0), NARROW_SCALES)[:, None]
    if NARROW_SCALES:
        total *= tl.load(zeros + own)[:, None]
    return total


@triton.jit(do_not_specialize=["rows", "group", "span"])
def multiply_codes(
    x, codes, scales, zeros, parts, table, of_row, bias, y, rows, outputs, inputs, columns, x_stride, group, span,
    BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, ZEROS: tl.constexpr,
    SCALED: tl.constexpr, STEP_INPUTS: tl.constexpr, NARROW_SCALES: tl.constexpr, ROUNDED: tl.constexpr,
    BIASED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Writes y [S, T, O]: sums over spans of inputs, in float32, or the whole product if there is one span, with the
    bias then. of_row: scales [T] of rounded rows. span: steps of one. Programs: O / OUTPUTS, S, T / ROWS."""
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    here, seen = t < rows, o < outputs
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, columns // STEP_INPUTS)
    total = scaled_sums(
        x, t.to(tl.int64) * x_stride, here, codes, scales, zeros, parts, table, o, outputs, inputs, columns, group,
        begin, end, BITS, KIND, OFFSET, ZEROS, SCALED, STEP_INPUTS, NARROW_SCALES, ROWS, OUTPUTS,
    )  # fmt: skip
    if ROUNDED:
        total *= tl.load(of_row + t, mask=here, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias + o, mask=seen, other=0.0).to(tl.float32)[:, None]
    to = y + (tl.program_id(1) * rows + t).to(tl.int64)[None, :] * outputs + o[:, None]
    tl.store(to, total.to(y.dtype.element_ty), mask=here[None, :] & seen[:, None])


@triton.jit(do_not_specialize=["group", "experts", "top_k"], do_not_specialize_on_alignment=["order", "ends"])
def multiply_expert_codes(
    x, codes, scales, zeros, parts, table, of_row, bias, y, order, ends, outputs, inputs, columns, x_stride, group,
    codes_room, room, experts, top_k,
    BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, ZEROS: tl.constexpr,
    SCALED: tl.constexpr, STEP_INPUTS: tl.constexpr, NARROW_SCALES: tl.constexpr, ROUNDED: tl.constexpr,
    BIASED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, EXPERTS: tl.constexpr, GATHERS: tl.constexpr,
):  # fmt: skip
    """y[r] = x[row of r] multiplied by the weight of r's expert, in the order of the groups, as grouped_product
    (triton_experts.py) does. codes_room, room: elements from one expert's codes and float32 numbers to the next's.
    of_row: by row of x. Programs: tiles of rows, blocks of outputs."""
    e = tl.arange(0, EXPERTS)
    stop = tl.load(ends + e, mask=e < experts, other=0)
    start = tl.load(ends + e - 1, mask=(e > 0) & (e < experts), other=0)
    tiles = (stop - start + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tl.program_id(0)).to(tl.int32), axis=0)
    if expert < experts:
        before = tl.sum(tl.where(e < expert, tiles, 0), axis=0)
        own_start = tl.sum(tl.where(e == expert, start, 0), axis=0)
        own_stop = tl.sum(tl.where(e == expert, stop, 0), axis=0)
        r = own_start + (tl.program_id(0) - before) * ROWS + tl.arange(0, ROWS)
        o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        here, seen = r < own_stop, o < outputs
        row = r.to(tl.int64)
        if GATHERS:
            row = (tl.load(order + r, mask=here, other=0) // top_k).to(tl.int64)
        of_expert = expert.to(tl.int64) * room
        steps = columns // STEP_INPUTS
        total = scaled_sums(
            x, row * x_stride, here, codes + expert.to(tl.int64) * codes_room,
            scales + of_expert * (4 if NARROW_SCALES else 1), zeros + of_expert,
            parts + of_expert, table, o, outputs, inputs, columns, group, 0, steps,
            BITS, KIND, OFFSET, ZEROS, SCALED, STEP_INPUTS, NARROW_SCALES, ROWS, OUTPUTS,
        )  # fmt: skip
        if ROUNDED:
            total *= tl.load(of_row + row, mask=here, other=0.0)[None, :]
        if BIASED:
            own_bias = tl.load(bias + expert.to(tl.int64) * outputs + o, mask=seen, other=0.0)
            total += own_bias.to(tl.float32)[:, None]
        to = y + r.to(tl.int64)[None, :] * outputs + o[:, None]
        tl.store(to, total.to(y.dtype.element_ty), mask=here[None, :] & seen[:, None])


# ---- calls ----


class CodeTensors(NamedTuple):
    """A weight's parts, of one matrix or of a stack of E. codes: int32 words or uint8; scales, zeros: float32, from
    [.., G, O] on, any tensor for zeros and parts that are not; scales of E4M3: uint8, zeros their outer scales [.., O];
    table: of x's dtype. Experts are codes_room codes apart, and room numbers of float32."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    parts: torch.Tensor
    table: torch.Tensor
    codes_room: int = 0
    room: int = 0


class CodeShape(NamedTuple):
    """Sizes and constants of a product, as scaled_sums() has them."""

    outputs: int
    inputs: int
    columns: int
    group: int
    bits: int
    kind: int
    offset: int
    has_zeros: bool
    scaled: int
    step: int
    is_narrow: bool = False

    @property
    def constants(self) -> dict[str, Any]:
        """Arguments that kernels are compiled for."""
        return {
            "BITS": self.bits, "KIND": self.kind, "OFFSET": self.offset, "ZEROS": self.has_zeros,
            "SCALED": self.scaled, "STEP_INPUTS": self.step, "NARROW_SCALES": self.is_narrow,
        }  # fmt: skip


def tile_for(rows: int, element_bytes: int, shape: CodeShape, multiprocessors: Multiprocessors) -> CodeTile:
    """Returns the tile of so many rows on a device. Where parts have scales of their own, and bytes zeros, those of
    most rows leave too few registers; where parts' codes are looked up in a table, all but those of the fewest."""
    by_part = shape.scaled >= Scaled.PART
    tiles = (SMALL_TILES if multiprocessors.shared_bytes < ROOMY_BYTES else TILES)[element_bytes]
    if by_part and shape.kind == CodeKind.TABLE:
        return NARROW if element_bytes == 2 and shape.scaled == Scaled.PART else tiles[0]
    tiles = tiles[: max(1, len(tiles) - (by_part or (shape.bits > 4 and shape.has_zeros)))]
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])


def spans_of(shape: CodeShape, tile: CodeTile, multiprocessors: int) -> int:
    """Returns the spans of a weight's inputs for FEW_ROWS rows: as many as keep the device busy."""
    programs, steps = triton.cdiv(shape.outputs, tile.outputs), shape.columns // shape.step
    busy = triton.cdiv(PROGRAMS_OF_ONE * multiprocessors, programs)
    return int(max(1, min(MOST_SPANS, steps // LEAST_STEPS, 1 << (busy - 1).bit_length())))


def multiply(
    x_TI: torch.Tensor,
    shape: CodeShape,
    weight: CodeTensors,
    bias_O: torch.Tensor | None,
    of_row_T: torch.Tensor | None = None,
    multiprocessors: Multiprocessors = H100,
) -> torch.Tensor:
    """Returns y_TO in x's dtype. x: with shape.columns numbers in a row. of_row: scales of rows that were rounded."""
    assert x_TI.shape[1] == shape.columns, (x_TI.shape, shape)
    rows, outputs = len(x_TI), shape.outputs
    y_TO = torch.empty((rows, outputs), dtype=x_TI.dtype, device=x_TI.device)
    if not rows or not outputs:
        return y_TO
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    tile = tile_for(rows, x_TI.element_size(), shape, multiprocessors)
    spans = spans_of(shape, tile, multiprocessors.number) if rows <= FEW_ROWS else 1
    sums = y_TO if spans == 1 else torch.empty((spans, *y_TO.shape), dtype=torch.float32, device=x_TI.device)
    steps = shape.columns // shape.step
    bias = weight.scales if bias_O is None else bias_O  # any pointer
    multiply_codes[(triton.cdiv(outputs, tile.outputs), spans, triton.cdiv(rows, tile.rows))](
        x_TI, *weight[:5], weight.scales if of_row_T is None else of_row_T, bias, sums, rows, outputs, shape.inputs,
        shape.columns, x_TI.stride(0), shape.group, triton.cdiv(steps, spans), **shape.constants,
        ROUNDED=of_row_T is not None, BIASED=bias_O is not None and spans == 1, ROWS=tile.rows, OUTPUTS=tile.outputs,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=FP_FUSION,
    )  # fmt: skip
    if spans > 1:
        size = rows * outputs
        add_spans[(triton.cdiv(size, ADDED),)](
            sums, bias, y_TO, size, outputs, BIASED=bias_O is not None, SPANS=spans, ADDED=ADDED, num_warps=1
        )
    return y_TO


def multiply_groups(
    x: torch.Tensor,
    shape: CodeShape,
    weight: CodeTensors,
    bias_EO: torch.Tensor | None,
    groups: Groups,
    of_row: torch.Tensor | None = None,
    multiprocessors: Multiprocessors = H100,
    *,
    gathers: bool,
) -> torch.Tensor:
    """Returns y_PO in the order of the groups. gathers, x: as in ExpertMethod.apply, with shape.columns
    numbers in a row."""
    assert x.shape[1] == shape.columns and x.stride(1) == 1, (x.shape, shape)
    pairs, experts = len(groups.order_P), len(groups.ends_E)
    y_PO = x.new_empty(pairs, shape.outputs)
    if not pairs:
        return y_PO
    of_each = MANY_FROM * 2 if pairs >= MANY_FROM * experts else 1
    tile = tile_for(of_each, x.element_size(), shape, multiprocessors)
    most_tiles = pairs // tile.rows + min(pairs, experts)
    bias = weight.scales if bias_EO is None else bias_EO
    multiply_expert_codes[(most_tiles, triton.cdiv(shape.outputs, tile.outputs))](
        x, *weight[:5], weight.scales if of_row is None else of_row, bias, y_PO, groups.order_P, groups.ends_E,
        shape.outputs, shape.inputs, shape.columns, x.stride(0), shape.group, weight.codes_room, weight.room, experts,
        groups.top_k, **shape.constants, ROUNDED=of_row is not None, BIASED=bias_EO is not None, ROWS=tile.rows,
        OUTPUTS=tile.outputs, EXPERTS=triton.next_power_of_2(experts), GATHERS=gathers, num_warps=tile.warps,
        num_stages=tile.stages, enable_fp_fusion=FP_FUSION,
    )  # fmt: skip
    return y_PO
