"""LoraOps for GPUs in Triton: one shrink and one expand launch for up to three projections of a layer.

Formula and layouts as in lora_ops.py, whose TorchLora is the twin. Grids and arguments depend on shapes alone; slots,
true ranks, scales and row starts are read on the device, so a captured CUDA graph serves any mix of adapters. Up to
TOKEN_STEP tokens each token is one program (BGMV, Punica) with the inputs in SPLITS parts, whose sums the expand adds
in fixed order; above, tiles of tokens go through tensor cores once per adapter that they hold (SGMV). Blocks beyond an
adapter's rank read nothing. Weights are read 16 bytes at a time, ahead of their use: rows of adapters begin at
multiples of ROW elements and are padded to one, and so may be read to there; rows of x are made so where they are not.
bf16, fp16 and fp32, summed in float32; tensor cores take the values between the two rounded to the model's dtype, fp32
unrounded. Imported only where Triton is installed.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tandem.workers.kernels.lora_ops import AdapterRows, ProjectionTables
from tandem.workers.planning.adapter_room import ALIGNED_ELEMENTS

PROJECTIONS: Final = 3
"""Projections of one launch: q, k and v."""
TOKEN_STEP: Final = 256
SPLITS: Final = 8
RANK_BLOCK: Final = 16
TILE: Final = 32
INPUT_BLOCK: Final = 128
TILE_INPUTS: Final = {2: 64, 4: 16}
"""A token's inputs in one piece, by the bytes of one: in fp32 32 spill registers on sm_86 and sm_89."""
OUTPUT_BLOCK: Final = 128
"""Outputs of a block: with 256, fp16 on sm_80 spills registers."""
TILE_OUTPUTS: Final = {2: 128, 4: 32}
"""Outputs of a block of a tile: in fp32 128 spill on sm_120, 64 on sm_100."""
CHANGING: Final = [
    "tokens", "x_stride", "y_stride", "projections",
    "start_0", "outputs_0", "start_1", "outputs_1", "start_2", "outputs_2",
]  # fmt: skip
"""Integers that differ between layers and steps. Triton would compile a kernel anew for each 1 and multiple of 16."""
UNALIGNED: Final = ["y", "slots"]
"""Pointers into other tensors, for which it would do the same by their alignment."""
ROW: Final = tl.constexpr(ALIGNED_ELEMENTS)
VECTOR: Final = tl.constexpr(8)
"""INPUTS and x_stride are a multiple of it, and x is at a multiple of VECTOR_BYTES: 16 bytes are fetched at once."""
VECTOR_BYTES: Final = 16
TOKEN_WARPS: Final = 2
"""Warps of a program that shrinks a token: each thread has two of its inputs, as fewer bytes than four are not fetched
ahead."""
AHEAD: Final = tl.constexpr(3)
"""Stages of the loops without tensor cores, of which Triton pipelines those alone that say so."""
FP_FUSION: Final = True
"""Stated with every launch: Triton's own default differs between its versions, and with it the last bits."""


@triton.jit
def _starts(rows, slot, room, k, used):
    """Returns where the rows k of a slot's matrix begin in the slab, int64."""
    return tl.multiple_of(tl.load(rows + slot * room + k, mask=used, other=0), ROW)


@triton.jit
def _shrink_token(
    x, slab, a_rows, ranks, scales, out, slot, part, room,
    INPUTS: tl.constexpr, PART: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[k] = scale * sum over this part of the inputs of x * A[k], for one token's block of ranks."""
    rank = tl.load(ranks + slot)
    k = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    if tl.program_id(1) * RANKS < rank:
        used = k < rank
        at_a = slab + _starts(a_rows, slot, room, k, used)[:, None]
        products = tl.zeros((RANKS, BLOCK), tl.float32)
        for first in tl.range(0, PART, BLOCK, num_stages=AHEAD):
            i = part * PART + first + tl.arange(0, BLOCK)
            there = i < INPUTS
            token = tl.load(x + i, mask=there, other=0.0)
            a = tl.load(at_a + i[None, :], mask=used[:, None] & there[None, :], other=0.0)
            products += a.to(tl.float32) * token.to(tl.float32)[None, :]
        tl.store(out + k, tl.sum(products, axis=1) * tl.load(scales + slot), mask=used)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def shrink_tokens(
    x, x_stride, slab, slots, shrunk, room,
    a_rows_0, ranks_0, scales_0, a_rows_1, ranks_1, scales_1, a_rows_2, ranks_2, scales_2,
    INPUTS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """shrunk: float32 [T, projections, PARTS, room]. Programs: tokens, blocks of ranks, projections x PARTS."""
    token = tl.program_id(0).to(tl.int64)
    projection = tl.program_id(2) // PARTS
    part = tl.program_id(2) % PARTS
    slot = tl.load(slots + token).to(tl.int64)
    x += token * (x_stride // VECTOR * VECTOR)
    out = shrunk + (token * tl.num_programs(2) + tl.program_id(2)) * room
    if slot >= 0:
        if projection == 0:
            _shrink_token(x, slab, a_rows_0, ranks_0, scales_0, out, slot, part, room, INPUTS, PART, RANKS, BLOCK)
        if projection == 1:
            _shrink_token(x, slab, a_rows_1, ranks_1, scales_1, out, slot, part, room, INPUTS, PART, RANKS, BLOCK)
        if projection == 2:
            _shrink_token(x, slab, a_rows_2, ranks_2, scales_2, out, slot, part, room, INPUTS, PART, RANKS, BLOCK)


@triton.jit
def _expand_token(
    y, slab, b_rows, ranks, shrunk, slot, start, outputs, room,
    PARTS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[start + o] += sum over k and parts of shrunk[part, k] * B[k, o], for one token's block of columns."""
    rank = tl.load(ranks + slot)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if (rank > 0) & (tl.program_id(1) * BLOCK < outputs):
        held = o < (outputs + ROW - 1) // ROW * ROW
        products = tl.zeros((RANKS, BLOCK), tl.float32)
        k = tl.arange(0, RANKS)
        starts = _starts(b_rows, slot, room, k, k < rank)
        at_shrunk, at_b = shrunk + (tl.arange(0, PARTS) * room)[:, None], slab + o[None, :]
        for first in tl.range(0, rank, RANKS, num_stages=AHEAD):
            k = first + tl.arange(0, RANKS)
            used = k < rank
            following = _starts(b_rows, slot, room, k + RANKS, k + RANKS < rank)
            parts = tl.load(at_shrunk + k[None, :], mask=used[None, :], other=0.0)
            b = tl.load(at_b + starts[:, None], mask=used[:, None] & held[None, :], other=0.0)
            products += tl.sum(parts, axis=0)[:, None] * b.to(tl.float32)
            starts = following
        at = y + start + o
        before = tl.load(at, mask=o < outputs, other=0.0).to(tl.float32)
        tl.store(at, (before + tl.sum(products, axis=0)).to(y.dtype.element_ty), mask=o < outputs)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def expand_tokens(
    y, y_stride, slab, slots, shrunk, room, projections,
    b_rows_0, ranks_0, start_0, outputs_0, b_rows_1, ranks_1, start_1, outputs_1, b_rows_2, ranks_2, start_2, outputs_2,
    PARTS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs: tokens, blocks of columns of the widest projection, projections."""
    token = tl.program_id(0).to(tl.int64)
    projection = tl.program_id(2)
    slot = tl.load(slots + token).to(tl.int64)
    y += token * y_stride
    shrunk += (token * projections + projection) * PARTS * room
    if slot >= 0:
        if projection == 0:
            _expand_token(y, slab, b_rows_0, ranks_0, shrunk, slot, start_0, outputs_0, room, PARTS, RANKS, BLOCK)
        if projection == 1:
            _expand_token(y, slab, b_rows_1, ranks_1, shrunk, slot, start_1, outputs_1, room, PARTS, RANKS, BLOCK)
        if projection == 2:
            _expand_token(y, slab, b_rows_2, ranks_2, shrunk, slot, start_2, outputs_2, room, PARTS, RANKS, BLOCK)


@triton.jit
def _shrink_tile(
    x, x_stride, slab, a_rows, ranks, scales, shrunk, t, slots, room, out_stride,
    INPUTS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """shrunk[t, k] of a tile's tokens `t` and one block of ranks, one adapter of the tile after another."""
    k = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    left = slots
    slot = tl.max(left, axis=0)
    while slot >= 0:
        mine = slots == slot
        rank = tl.load(ranks + slot)
        if tl.program_id(1) * RANKS < rank:
            used = k < rank
            starts = _starts(a_rows, slot, room, k, used)
            total = tl.zeros((TILE, RANKS), tl.float32)
            at_x, at_a = x + (t * x_stride)[:, None], slab + starts[None, :]
            for first in range(0, INPUTS, BLOCK):
                i = first + tl.arange(0, BLOCK)
                there = i < INPUTS
                token = tl.load(at_x + i[None, :], mask=mine[:, None] & there[None, :], other=0.0)
                a = tl.load(at_a + i[:, None], mask=used[None, :] & there[:, None], other=0.0)
                total += tl.dot(token, a, input_precision="ieee")
            out = shrunk + t[:, None] * out_stride + k[None, :]
            tl.store(out, total * tl.load(scales + slot), mask=mine[:, None] & used[None, :])
        left = tl.where(mine, -1, left)
        slot = tl.max(left, axis=0)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def shrink_tiles(
    x, x_stride, slab, slots, tokens, shrunk, room, projections,
    a_rows_0, ranks_0, scales_0, a_rows_1, ranks_1, scales_1, a_rows_2, ranks_2, scales_2,
    INPUTS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """shrunk: float32 [T, projections, room]. Programs: tiles of tokens, blocks of ranks, projections."""
    x_stride = x_stride // VECTOR * VECTOR
    t = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    projection = tl.program_id(2)
    own = tl.load(slots + t, mask=t < tokens, other=-1).to(tl.int64)
    stride = projections * room
    out = shrunk + projection * room
    if projection == 0:
        _shrink_tile(
            x, x_stride, slab, a_rows_0, ranks_0, scales_0, out, t, own, room, stride, INPUTS, RANKS, BLOCK, TILE
        )
    if projection == 1:
        _shrink_tile(
            x, x_stride, slab, a_rows_1, ranks_1, scales_1, out, t, own, room, stride, INPUTS, RANKS, BLOCK, TILE
        )
    if projection == 2:
        _shrink_tile(
            x, x_stride, slab, a_rows_2, ranks_2, scales_2, out, t, own, room, stride, INPUTS, RANKS, BLOCK, TILE
        )


@triton.jit
def _expand_tile(
    y, y_stride, slab, b_rows, ranks, shrunk, t, slots, start, outputs, room, in_stride,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """y[t, start + o] of a tile's tokens and one block of columns, one adapter of the tile after another."""
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = o < (outputs + ROW - 1) // ROW * ROW
    left = tl.where(tl.program_id(1) * BLOCK < outputs, slots, -1)
    slot = tl.max(left, axis=0)
    while slot >= 0:
        mine = slots == slot
        rank = tl.load(ranks + slot)
        if rank > 0:
            total = tl.zeros((TILE, BLOCK), tl.float32)
            k = tl.arange(0, RANKS)
            starts = _starts(b_rows, slot, room, k, k < rank)
            at_shrunk, at_b = shrunk + (t * in_stride)[:, None], slab + o[None, :]
            for first in range(0, rank, RANKS):
                k = first + tl.arange(0, RANKS)
                used = k < rank
                following = _starts(b_rows, slot, room, k + RANKS, k + RANKS < rank)
                factor = tl.load(at_shrunk + k[None, :], mask=mine[:, None] & used[None, :], other=0.0)
                b = tl.load(at_b + starts[:, None], mask=used[:, None] & held[None, :], other=0.0)
                total += tl.dot(factor.to(b.dtype), b, input_precision="ieee")
                starts = following
            seen = mine[:, None] & (o < outputs)[None, :]
            at = y + t[:, None] * y_stride + start + o[None, :]
            before = tl.load(at, mask=seen, other=0.0).to(tl.float32)
            tl.store(at, (before + total).to(y.dtype.element_ty), mask=seen)
        left = tl.where(mine, -1, left)
        slot = tl.max(left, axis=0)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def expand_tiles(
    y, y_stride, slab, slots, tokens, shrunk, room, projections,
    b_rows_0, ranks_0, start_0, outputs_0, b_rows_1, ranks_1, start_1, outputs_1, b_rows_2, ranks_2, start_2, outputs_2,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of tokens, blocks of columns of the widest projection, projections."""
    t = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    projection = tl.program_id(2)
    own = tl.load(slots + t, mask=t < tokens, other=-1).to(tl.int64)
    stride = projections * room
    shrunk += projection * room
    if projection == 0:
        _expand_tile(
            y, y_stride, slab, b_rows_0, ranks_0, shrunk, t, own, start_0, outputs_0, room, stride, RANKS, BLOCK, TILE
        )
    if projection == 1:
        _expand_tile(
            y, y_stride, slab, b_rows_1, ranks_1, shrunk, t, own, start_1, outputs_1, room, stride, RANKS, BLOCK, TILE
        )
    if projection == 2:
        _expand_tile(
            y, y_stride, slab, b_rows_2, ranks_2, shrunk, t, own, start_2, outputs_2, room, stride, RANKS, BLOCK, TILE
        )


class TritonLora:
    """LoraOps by these kernels. Every launch depends on shapes alone, so it may be captured in a CUDA graph."""

    warm_up_tokens: tuple[int, ...] = (1, TOKEN_STEP + 1)
    reads_slots = True

    def add(
        self,
        y_TO: torch.Tensor,
        x_TI: torch.Tensor,
        slab: torch.Tensor,
        projections: Sequence[ProjectionTables],
        rows: AdapterRows,
    ) -> None:
        assert y_TO.stride(1) == x_TI.stride(1) == 1 and slab.is_contiguous()
        assert len({(projection.inputs, projection.a_rows.shape[1]) for projection in projections}) == 1
        launch = _add_tokens if y_TO.shape[0] <= TOKEN_STEP else _add_tiles
        if not y_TO.shape[0]:
            return
        x_TI = _in_vectors(x_TI)
        for first in range(0, len(projections), PROJECTIONS):
            launch(y_TO, x_TI, slab, projections[first : first + PROJECTIONS], rows.slots_T)


def _in_vectors(x_TI: torch.Tensor) -> torch.Tensor:
    """Returns x as the kernels read it: itself, or a copy with zeros behind each row."""
    missing = -x_TI.shape[1] % VECTOR.value
    if missing:
        return F.pad(x_TI, (0, missing))
    is_apart = x_TI.stride(0) % VECTOR.value or x_TI.data_ptr() % VECTOR_BYTES
    return x_TI.clone(memory_format=torch.contiguous_format) if is_apart else x_TI


def _shrink_tables(projections: Sequence[ProjectionTables]) -> list[torch.Tensor]:
    """Returns the tables of three projections; the first's fill the unused places."""
    filled = (*projections, *[projections[0]] * (PROJECTIONS - len(projections)))
    return [table for projection in filled for table in (projection.a_rows, projection.ranks, projection.scales)]


def _expand_tables(projections: Sequence[ProjectionTables]) -> list[torch.Tensor | int]:
    """Returns the same for the expand."""
    filled = (*projections, *[projections[0]] * (PROJECTIONS - len(projections)))
    return [fact for s in filled for fact in (s.b_rows, s.ranks, s.start, s.outputs)]


def _add_tokens(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    slab: torch.Tensor,
    projections: Sequence[ProjectionTables],
    slots_T: torch.Tensor,
) -> None:
    """Launches one program per token."""
    (num_tokens, inputs), count, room = x_TI.shape, len(projections), projections[0].a_rows.shape[1]
    part_inputs = triton.cdiv(triton.cdiv(inputs, SPLITS), INPUT_BLOCK) * INPUT_BLOCK
    shrunk = torch.empty((num_tokens, count, SPLITS, room), dtype=torch.float32, device=x_TI.device)
    shrink_tokens[(num_tokens, triton.cdiv(room, RANK_BLOCK), count * SPLITS)](
        x_TI, x_TI.stride(0), slab, slots_T, shrunk, room, *_shrink_tables(projections),
        INPUTS=inputs, PARTS=SPLITS, PART=part_inputs, RANKS=RANK_BLOCK, BLOCK=INPUT_BLOCK,
        num_warps=TOKEN_WARPS, enable_fp_fusion=FP_FUSION,
    )  # fmt: skip
    widest = max(projection.outputs for projection in projections)
    expand_tokens[(num_tokens, triton.cdiv(widest, OUTPUT_BLOCK), count)](
        y_TO, y_TO.stride(0), slab, slots_T, shrunk, room, count, *_expand_tables(projections),
        PARTS=SPLITS, RANKS=RANK_BLOCK, BLOCK=OUTPUT_BLOCK, enable_fp_fusion=FP_FUSION,
    )  # fmt: skip


def _add_tiles(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    slab: torch.Tensor,
    projections: Sequence[ProjectionTables],
    slots_T: torch.Tensor,
) -> None:
    """Launches one program per tile of tokens."""
    (num_tokens, inputs), count, room = x_TI.shape, len(projections), projections[0].a_rows.shape[1]
    tiles = triton.cdiv(num_tokens, TILE)
    shrunk = torch.empty((num_tokens, count, room), dtype=torch.float32, device=x_TI.device)
    shrink_tiles[(tiles, triton.cdiv(room, RANK_BLOCK), count)](
        x_TI, x_TI.stride(0), slab, slots_T, num_tokens, shrunk, room, count, *_shrink_tables(projections),
        INPUTS=inputs, RANKS=RANK_BLOCK, BLOCK=TILE_INPUTS[x_TI.element_size()], TILE=TILE,
        enable_fp_fusion=FP_FUSION,
    )  # fmt: skip
    widest, block = max(projection.outputs for projection in projections), TILE_OUTPUTS[y_TO.element_size()]
    expand_tiles[(tiles, triton.cdiv(widest, block), count)](
        y_TO, y_TO.stride(0), slab, slots_T, num_tokens, shrunk, room, count, *_expand_tables(projections),
        RANKS=RANK_BLOCK, BLOCK=block, TILE=TILE, enable_fp_fusion=FP_FUSION,
    )  # fmt: skip
