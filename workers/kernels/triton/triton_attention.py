"""Paged attention for GPUs in Triton: queries in tiles of a row, keys and values read in place from the cache's blocks.

The running softmax of FlashAttention (Dao et al. 2022) over PagedAttention's blocks (Kwon et al. 2023). The query heads
that share a KV head are rows of one tile, with several of a row's tokens where there are any, so that a key is read
once for all of them. Where tiles are few, a tile's context is split (Flash-Decoding, Dao et al. 2023) and a second
kernel merges the parts. Everything that changes between steps is read on the device: rows, positions and block tables;
grids depend on the numbers of tokens and rows alone, so a captured CUDA graph serves any step that fits. Windows,
soft-caps, ALiBi and sinks; caches in bf16, fp16, fp32, int8 and fp8 (e4m3), the last two with a scale for each token
and head. Products of 16-bit queries go through tensor cores and are summed in float32; fp32 without TF32. Imported
only where Triton is installed.

T tokens, R rows, N query heads, K KV heads, G = N / K, D and V elements of a key and a value, P parts.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from tandem.workers.kernels.kv_store import LARGEST, LayerKV
from tandem.workers.kernels.triton.triton_lora import FP_FUSION
from tandem.workers.models.spec.arch import AttentionParams

LOG2E: Final = tl.constexpr(1.4426950408889634)
CHANGING: Final = ["q_stride", "rows", "table_stride", "fewest", "most"]
"""Integers that differ between layers and steps. Triton would compile a kernel anew for each 1 and multiple of 16."""
UNALIGNED: Final = ["q", "positions", "starts", "table"]
"""Pointers into other tensors, for which it would do the same by their alignment."""
PROGRAMS: Final = 512
"""Programs that keep a device busy: contexts are split until there are as many."""
MOST_PARTS: Final = 32
PART_BYTES: Final = 64 * 2**20
"""The most memory that the parts of a step take."""
FEWEST_ROWS: Final = 256
"""Rows that a kernel is compiled for at least: it would be compiled anew for each power of two below, while serving."""
SIZES: Final = (128, 256)
"""Elements of a head: the most that a size of tiles is for."""
BEYOND: Final = tl.constexpr(1 << 30)


class Tile(NamedTuple):
    """Queries times heads of a KV head, and positions, that a program multiplies at once; its warps and the depth of
    its pipeline."""

    rows: int
    positions: int
    warps: int
    stages: int


DECODE: Final = {(2, 128): Tile(16, 64, 4, 3), (2, 256): Tile(16, 32, 4, 3), (4, 128): Tile(16, 16, 4, 2)}
PREFILL: Final = {(2, 128): Tile(128, 64, 8, 3), (2, 256): Tile(64, 32, 8, 2), (4, 128): Tile(16, 16, 4, 2)}
"""Tiles by the bytes of a query's element, and the most elements of a head. Larger ones spill registers."""
MOST_OF_QUANTIZED: Final = 32
"""Rows of a tile, of caches whose elements are converted in registers."""


@triton.jit
def _codes(x, IS_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """Stored elements in the queries' dtype. e4m3 has fp16's form with four bits of exponent: 2^8 less."""
    if IS_FP8:
        bits = x.to(tl.int16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half.to(tl.float32) * 256.0).to(DTYPE)
    return x.to(DTYPE)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def attend_tiles(
    q, keys, values, key_scales, value_scales, positions, starts, table, slopes, sinks, out, part_out, part_sums,
    q_stride, rows, table_stride, fewest, most, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, SUNK: tl.constexpr, SCALED: tl.constexpr, IS_FP8: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr,
    D_PAD: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    """Writes out [T, N, V], or for several PARTS their sums to part_out [T, N, P, V] and their greatest score and total
    weight to part_sums [T, N, P, 2], the scores times log2(e). Takes rows of `fewest` to `most` queries. starts [R +
    1], positions [T], table [R, blocks]; slopes and sinks [N], any pointer where there are none. q_stride: elements
    between two tokens' queries. WINDOW: 0 for none. ROWS: a power of two, at least `rows`. SHARE: query heads of a
    program, a divisor of GROUP = N / K. TILE: queries times SHARE, STEP: positions, that are multiplied at once. D_PAD,
    V_PAD: powers of two for D and V. Programs: tiles, T // queries of a tile + R; N / SHARE; parts."""
    QUERIES: tl.constexpr = TILE // SHARE
    KV_HEADS: tl.constexpr = HEADS // GROUP
    tile, part = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * SHARE // GROUP
    r = tl.arange(0, ROWS)
    begin = tl.load(starts + r, mask=r < rows, other=BEYOND)
    row = tl.sum((begin // QUERIES + r <= tile).to(tl.int32), axis=0) - 1
    first = tl.load(starts + row)
    stop = tl.load(starts + row + 1)
    count = stop - first
    token = first + (tile - (first // QUERIES + row)) * QUERIES
    if (token < stop) & (count >= fewest) & (count <= most):
        m = tl.arange(0, TILE)
        own, n = token + m // SHARE, tl.program_id(1) * SHARE + m % SHARE
        here = (m < QUERIES * SHARE) & (own < stop)
        d, v = tl.arange(0, D_PAD), tl.arange(0, V_PAD)
        at = own.to(tl.int64) * HEADS + n
        query = tl.load(
            q + (own.to(tl.int64) * q_stride + n * DIM)[:, None] + d[None, :],
            mask=here[:, None] & (d < DIM)[None, :], other=0.0,
        )  # fmt: skip
        position = tl.load(positions + own, mask=here, other=0).to(tl.int32)
        last = tl.load(positions + tl.minimum(token + QUERIES, stop) - 1).to(tl.int32)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(tl.load(positions + token).to(tl.int32) + 1 - WINDOW, 0)
        high = last + 1
        if PARTS > 1:
            each = tl.cdiv(tl.cdiv(high - low, PARTS), STEP) * STEP
            low += part * each
            high = tl.minimum(high, low + each)
        best = tl.full((TILE,), float("-inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        if SUNK and part == 0:
            best = tl.load(sinks + n, mask=here, other=0.0) * LOG2E
            total += 1.0
        if SLOPED:
            slope = tl.load(slopes + n, mask=here, other=0.0)
        sums = tl.zeros((TILE, V_PAD), tl.float32)
        blocks = table + row.to(tl.int64) * table_stride
        for start in range(low, high, STEP):
            j = start + tl.arange(0, STEP)
            inside = j < high
            block = tl.load(blocks + j // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + j % BLOCK_SIZE
            key = tl.load(
                keys + ((slot * KV_HEADS + head) * DIM)[None, :] + d[:, None],
                mask=inside[None, :] & (d < DIM)[:, None], other=0,
            )  # fmt: skip
            score = tl.dot(query, _codes(key, IS_FP8, query.dtype), input_precision="ieee")
            if SCALED:
                score *= tl.load(key_scales + slot * KV_HEADS + head, mask=inside, other=0.0)[None, :]
            score *= scale
            if CAPPED:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            if SLOPED:
                score += slope[:, None] * (j[None, :] - position[:, None]).to(tl.float32)
            seen = inside[None, :] & (j[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (j[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score * LOG2E, float("-inf"))
            higher = tl.maximum(best, tl.max(score, axis=1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            kept = tl.exp2(best - base)
            weight = tl.exp2(score - base[:, None])
            total = total * kept + tl.sum(weight, axis=1)
            value = tl.load(
                values + ((slot * KV_HEADS + head) * V_DIM)[:, None] + v[None, :],
                mask=inside[:, None] & (v < V_DIM)[None, :], other=0,
            )  # fmt: skip
            value = _codes(value, IS_FP8, query.dtype)
            if SCALED:
                scales = tl.load(value_scales + slot * KV_HEADS + head, mask=inside, other=0.0)
                if query.dtype == tl.float16:  # a small weight times a small scale would vanish in fp16
                    value = (value.to(tl.float32) * scales[:, None]).to(query.dtype)
                else:
                    weight *= scales[None, :]
            sums = tl.dot(weight.to(query.dtype), value, sums * kept[:, None], input_precision="ieee")
            best = higher
        if PARTS == 1:
            place = out + at[:, None] * V_DIM + v[None, :]
            result = (sums / tl.where(here, total, 1.0)[:, None]).to(out.dtype.element_ty)
            tl.store(place, result, mask=here[:, None] & (v < V_DIM)[None, :])
        else:
            at = at * PARTS + part
            tl.store(part_out + at[:, None] * V_DIM + v[None, :], sums, mask=here[:, None] & (v < V_DIM)[None, :])
            tl.store(part_sums + at * 2, best, mask=here)
            tl.store(part_sums + at * 2 + 1, total, mask=here)


@triton.jit(do_not_specialize=["rows", "fewest", "most"], do_not_specialize_on_alignment=["starts"])
def merge_parts(
    part_out, part_sums, starts, out, rows, fewest, most,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    """out = the parts' sums over their total weight, each rescaled to the greatest score of all, for tokens of rows as
    in attend_tiles. Programs: tokens, query heads."""
    token, n = tl.program_id(0), tl.program_id(1)
    r = tl.arange(0, ROWS)
    row = tl.sum((tl.load(starts + r, mask=r < rows, other=BEYOND) <= token).to(tl.int32), axis=0) - 1
    count = tl.load(starts + row + 1) - tl.load(starts + row)
    if (count >= fewest) & (count <= most):
        p, v = tl.arange(0, PARTS), tl.arange(0, V_PAD)
        at = (token.to(tl.int64) * HEADS + n) * PARTS + p
        best, total = tl.load(part_sums + at * 2), tl.load(part_sums + at * 2 + 1)
        share = tl.exp2(best - tl.max(best, axis=0))
        own = tl.load(part_out + at[:, None] * V_DIM + v[None, :], mask=(v < V_DIM)[None, :], other=0.0)
        result = tl.sum(own * share[:, None], axis=0) / tl.sum(total * share, axis=0)
        place = out + (token.to(tl.int64) * HEADS + n) * V_DIM + v
        tl.store(place, result.to(out.dtype.element_ty), mask=v < V_DIM)


class Rows(NamedTuple):
    """The rows of a step, on the device. starts: int32 [R + 1], their places among the T tokens. positions_T: int64.
    table_RN: int32, their blocks."""

    starts: torch.Tensor
    positions_T: torch.Tensor
    table_RN: torch.Tensor


class Numbers:
    """Slopes and sinks on the device, kept as a graph reads them."""

    def __init__(self) -> None:
        self._held: dict[tuple[Sequence[float], torch.device], torch.Tensor] = {}

    def of(self, numbers: Sequence[float], device: torch.device) -> torch.Tensor:
        """Returns them as float32 [N]."""
        held = self._held.get((numbers, device))
        if held is None:
            held = self._held[numbers, device] = torch.tensor(numbers, dtype=torch.float32, device=device)
        return held


def takes(dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None) -> bool:
    """Return whether the kernel suits queries and caches of these dtypes and heads of this size. In fp32 it spills
    registers with quantized caches and with heads of more than 128 elements. kv_dtype None: dtype."""
    return (dtype.itemsize, _size_of(head_dim)) in DECODE and (dtype.itemsize == 2 or kv_dtype not in LARGEST)


def attend(
    q_TND: torch.Tensor,
    kv: LayerKV,
    out_TNV: torch.Tensor,
    rows: Rows,
    params: AttentionParams,
    numbers: Numbers,
    *,
    queries: range,
    in_parts: bool,
) -> None:
    """Writes out_TNV of the tokens of rows that have as many queries as `queries` says; other tokens are left as they
    are. in_parts: such rows are few, or all there are, and their contexts may be split."""
    (tokens, heads, dim), (_, block_size, kv_heads, _) = q_TND.shape, kv.keys.shape
    if q_TND.stride()[1:] != (dim, 1):
        q_TND = q_TND.contiguous()
    num_rows, group, v_dim = len(rows.starts) - 1, heads // kv_heads, kv.values.shape[3]
    is_decode = queries.start == 1
    tile = _tile(
        DECODE if is_decode else PREFILL, q_TND.element_size(), max(dim, v_dim), group, kv.key_scales is not None
    )
    share = next(count for count in range(min(group, tile.rows), 0, -1) if group % count == 0)
    parts = _num_parts(num_rows * heads // share, tokens * heads * v_dim * 4) if in_parts else 1
    part_out = part_sums = out_TNV
    if parts > 1:
        part_out = out_TNV.new_empty((tokens, heads, parts, v_dim), dtype=torch.float32)
        part_sums = out_TNV.new_empty((tokens, heads, parts, 2), dtype=torch.float32)
    keys, values = (x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x for x in (kv.keys, kv.values))
    device, none = q_TND.device, rows.positions_T
    slopes = none if params.slopes is None else numbers.of(params.slopes, device)
    sinks = none if params.sinks is None else numbers.of(params.sinks, device)
    constants: dict[str, Any] = {
        "HEADS": heads, "V_DIM": v_dim, "ROWS": max(FEWEST_ROWS, triton.next_power_of_2(num_rows)), "PARTS": parts,
        "V_PAD": max(16, triton.next_power_of_2(v_dim)), "enable_fp_fusion": FP_FUSION,
    }  # fmt: skip
    limits = (num_rows, queries.start, queries.stop - 1)
    attend_tiles[(tokens // (tile.rows // share) + num_rows, heads // share, parts)](
        q_TND, keys, values, none if kv.key_scales is None else kv.key_scales,
        none if kv.value_scales is None else kv.value_scales,
        rows.positions_T, rows.starts, rows.table_RN, slopes, sinks, out_TNV, part_out, part_sums,
        q_TND.stride(0), num_rows, rows.table_RN.stride(0), *limits[1:],
        params.scale, 1.0 if params.softcap is None else params.softcap,
        GROUP=group, SHARE=share, DIM=dim, BLOCK_SIZE=block_size, WINDOW=params.window or 0,
        CAPPED=params.softcap is not None, SLOPED=params.slopes is not None, SUNK=params.sinks is not None,
        SCALED=kv.key_scales is not None, IS_FP8=kv.keys.dtype is torch.float8_e4m3fn,
        TILE=tile.rows, STEP=tile.positions,
        D_PAD=max(16, triton.next_power_of_2(dim)), num_warps=tile.warps, num_stages=tile.stages, **constants,
    )  # fmt: skip
    if parts > 1:
        merge_parts[(tokens, heads)](part_out, part_sums, rows.starts, out_TNV, *limits, num_warps=4, **constants)


def _tile(tiles: dict[tuple[int, int], Tile], element_bytes: int, dim: int, group: int, is_quantized: bool) -> Tile:
    tile = tiles[element_bytes, _size_of(dim)]
    if is_quantized and tile.rows > MOST_OF_QUANTIZED:
        tile = Tile(MOST_OF_QUANTIZED, min(tile.positions, 32), 4, 2)
    if group > tile.rows and element_bytes == 2:
        tile = tile._replace(rows=triton.next_power_of_2(group), positions=min(tile.positions, 32), warps=8)
    return tile


def _size_of(dim: int) -> int:
    return next((size for size in SIZES if dim <= size), 0)


def _num_parts(programs: int, part_bytes: int) -> int:
    """Returns a power of two. programs: of one part; part_bytes: memory of one."""
    parts = max(1, min(MOST_PARTS, triton.next_power_of_2(PROGRAMS // programs)))
    while parts > 1 and parts * part_bytes > PART_BYTES:
        parts //= 2
    return int(parts)
