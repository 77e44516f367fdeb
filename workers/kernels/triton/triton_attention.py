"""Paged attention for GPUs in Triton: queries in tiles of a row, keys and values read in place from the cache's blocks.

The running softmax of FlashAttention (Dao et al. 2022) over PagedAttention's blocks (Kwon et al. 2023). The query heads
that share a KV head are rows of one tile, with several of a row's tokens where there are any, so that a key is read
once for all of them. Block ids are fetched a step ahead, so that keys and values can be fetched while others are
multiplied. Everything that changes between steps is read on the device: rows, positions and block tables; grids depend
on the numbers of tokens and rows alone, so a captured CUDA graph serves any step that fits. Windows, soft-caps, ALiBi
and sinks; caches in bf16, fp16, fp32, int8 and fp8 (e4m3), the last two with a scale for each token and head. Products
of 16-bit queries go through tensor cores and are summed in float32; fp32 without TF32. Here are chunks of prompts;
triton_decode.py has the decodes, over the same step. Imported only where Triton is installed.

Weights are relative to the greatest score so far, rounded up to a whole power of two. So rescaling rounds nothing: sums
do not depend on which scores came when, nor on steps of a context that a query does not see.

T tokens, R rows, N query heads, K KV heads, G = N / K, D and V elements of a key and a value.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from tandem.workers.kernels.kv_store import LARGEST, LayerKV
from tandem.workers.kernels.triton.tiles import (
    CHUNKS,
    AttentionClass,
    DecodeTile,
    Tile,
    TunedTiles,
    Use,
    attention_class,
    attention_use,
)
from tandem.workers.kernels.triton.triton_lora import FP_FUSION
from tandem.workers.models.spec.arch import AttentionParams

LOG2E: Final = tl.constexpr(1.4426950408889634)
NOTHING: Final = tl.constexpr(-(2.0**127))
"""The greatest score of no keys. Its differences are finite."""
CHANGING: Final = ["q_stride", "rows", "table_stride", "fewest", "most"]
"""Integers that differ between layers and steps. Triton would compile a kernel anew for each 1 and multiple of 16."""
UNALIGNED: Final = ["q", "positions", "starts", "table"]
"""Pointers into other tensors, for which it would do the same by their alignment."""
FEWEST_ROWS: Final = 256
"""Rows that a kernel is compiled for at least: it would be compiled anew for each power of two below, while serving."""
PARTS_BYTES: Final = 64 * 2**20
"""Memory for the sums of parts of contexts: of ATTENTION_BYTES (workers/planning/budget.py)."""
BEYOND: Final = tl.constexpr(1 << 30)
ROOMY_BYTES: Final = 128 * 2**10
"""Shared memory of a multiprocessor, less than which does not hold three stages of chunks with heads of 256
elements."""


@triton.jit
def _codes(x, IS_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """Stored elements in the queries' dtype. e4m3 has fp16's form with four bits of exponent: 2^8 less."""
    if IS_FP8:
        bits = x.to(tl.int16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half.to(tl.float32) * 256.0).to(DTYPE)
    return x.to(DTYPE)


@triton.jit
def power_of_two(x):
    """2^x of whole x up to 0, exactly; 0 below 2^-126."""
    return ((tl.maximum(x, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def weigh(
    score, best, total, position, slope, j, inside, scale, softcap,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Returns, of a tile's products with the keys of positions j, the greatest score (times log2(e), rounded up), the
    factor of earlier sums, the weights, and their total with the earlier one. MASKED: some may not be inside, or a
    query may not see all."""
    unit = scale * LOG2E
    if CAPPED or SLOPED:
        score, unit = score * scale, LOG2E
    if CAPPED:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
    if SLOPED:
        score += slope[:, None] * (j[None, :] - position[:, None]).to(tl.float32)
    if MASKED:
        seen = inside[None, :] & (j[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (j[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(best, tl.ceil(tl.max(score, axis=1) * unit))
    kept = power_of_two(best - higher)
    weight = tl.exp2(score * unit - higher[:, None])
    total = total * kept + tl.sum(weight, axis=1)
    return higher, kept, weight, total


@triton.jit
def add_keys(
    best, total, sums, query, position, slope, keys, values, key_scales, value_scales, block, j, low, high, head,
    scale, softcap,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, SCALED: tl.constexpr, IS_FP8: tl.constexpr,
    D_PAD: tl.constexpr, V_PAD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Returns the greatest score (times log2(e), rounded up), total weight and sums of values of a tile with the keys
    of positions j in `block` added. MASKED: some may be outside low:high, which are not read, or a query may not see
    all."""
    d, v = tl.arange(0, D_PAD), tl.arange(0, V_PAD)
    inside = (j >= low) & (j < high) if MASKED else j >= 0
    slot = block.to(tl.int64) * BLOCK_SIZE + j % BLOCK_SIZE
    at_key = keys + ((slot * KV_HEADS + head) * DIM)[:, None] + d[None, :]
    at_value = values + ((slot * KV_HEADS + head) * V_DIM)[:, None] + v[None, :]
    if MASKED:
        key = tl.load(at_key, mask=inside[:, None] & (d < DIM)[None, :], other=0)
    elif DIM != D_PAD:
        key = tl.load(at_key, mask=(d < DIM)[None, :], other=0)
    else:
        key = tl.load(at_key)
    score = tl.dot(query, _codes(tl.trans(key), IS_FP8, query.dtype), input_precision="ieee")
    if SCALED:
        score *= tl.load(key_scales + slot * KV_HEADS + head, mask=inside, other=0.0)[None, :]
    higher, kept, weight, total = weigh(
        score, best, total, position, slope, j, inside, scale, softcap, WINDOW, CAPPED, SLOPED, MASKED
    )
    if MASKED:
        value = tl.load(at_value, mask=inside[:, None] & (v < V_DIM)[None, :], other=0)
    elif V_DIM != V_PAD:
        value = tl.load(at_value, mask=(v < V_DIM)[None, :], other=0)
    else:
        value = tl.load(at_value)
    value = _codes(value, IS_FP8, query.dtype)
    if SCALED:
        scales = tl.load(value_scales + slot * KV_HEADS + head, mask=inside, other=0.0)
        if query.dtype == tl.float16:  # a small weight times a small scale would vanish in fp16
            value = (value.to(tl.float32) * scales[:, None]).to(query.dtype)
        else:
            weight *= scales[None, :]
    sums = tl.dot(weight.to(query.dtype), value, sums * kept[:, None], input_precision="ieee")
    return higher, total, sums


@triton.jit
def add_sink(best, total, sink):
    """Returns the total weight with that of a sink, a score times log2(e), added, and the factor of the sums."""
    higher = tl.maximum(best, tl.ceil(sink))
    factor = power_of_two(best - higher)
    return total * factor + tl.exp2(sink - higher), factor


@triton.jit
def tile_of(tile, starts, rows, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Returns a tile's row, where that begins among all rows' places, where the tile does, and where the row ends.
    Tiles of SIZE places begin with each row: there are places // SIZE + R, of which some have none. starts [R + 1]."""
    r = tl.arange(0, ROWS)
    begin = tl.load(starts + r, mask=r < rows, other=BEYOND)
    row = tl.sum((begin // SIZE + r <= tile).to(tl.int32), axis=0) - 1
    first, stop = tl.load(starts + row), tl.load(starts + row + 1)
    return row, first, first + (tile - (first // SIZE + row)) * SIZE, stop


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def attend_tiles(
    q, keys, values, key_scales, value_scales, positions, starts, table, slopes, sinks, out,
    q_stride, rows, table_stride, fewest, most, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, SUNK: tl.constexpr, SCALED: tl.constexpr, IS_FP8: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    """Writes out [T, N, V] of rows of `fewest` to `most` queries. starts [R + 1], positions [T], table [R, blocks];
    slopes and sinks [N], any pointer where there are none. q_stride: elements between two tokens' queries. WINDOW: 0
    for none. ROWS: a power of two, at least `rows`. SHARE: query heads of a program, at most GROUP = N / K. TILE:
    queries times SHARE, STEP: positions, that are multiplied at once. D_PAD, V_PAD: powers of two for D and V.
    Programs: tiles, T // queries of a tile + R; K times the shares of a group."""
    QUERIES: tl.constexpr = TILE // SHARE
    KV_HEADS: tl.constexpr = HEADS // GROUP
    SHARES: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    head = tl.program_id(1) // SHARES
    row, first, token, stop = tile_of(tl.program_id(0), starts, rows, QUERIES, ROWS)
    count = stop - first
    if (token < stop) & (count >= fewest) & (count <= most):
        m = tl.arange(0, TILE)
        own, of_group = token + m // SHARE, tl.program_id(1) % SHARES * SHARE + m % SHARE
        here, n = (m < QUERIES * SHARE) & (own < stop) & (of_group < GROUP), head * GROUP + of_group
        d, v = tl.arange(0, D_PAD), tl.arange(0, V_PAD)
        query = tl.load(
            q + (own.to(tl.int64) * q_stride + n * DIM)[:, None] + d[None, :],
            mask=here[:, None] & (d < DIM)[None, :], other=0.0,
        )  # fmt: skip
        position = tl.load(positions + own, mask=here, other=0).to(tl.int32)
        least = tl.load(positions + token).to(tl.int32)
        high = tl.load(positions + tl.minimum(token + QUERIES, stop) - 1).to(tl.int32) + 1
        low = tl.maximum(least + 1 - WINDOW, 0) if WINDOW > 0 else 0
        slope = tl.zeros((TILE,), tl.float32)
        if SLOPED:
            slope = tl.load(slopes + n, mask=here, other=0.0)
        best = tl.full((TILE,), NOTHING, tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        sums = tl.zeros((TILE, V_PAD), tl.float32)
        blocks = table + row.to(tl.int64) * table_stride
        steps = tl.arange(0, STEP)
        start = low // STEP * STEP
        middle = start if WINDOW > 0 else (least + 1) // STEP * STEP  # all queries see all positions below
        block = tl.load(blocks + (start + steps) // BLOCK_SIZE, mask=start + steps < high, other=0)
        for place in range(start, middle, STEP):
            j = place + steps
            following = tl.load(blocks + (j + STEP) // BLOCK_SIZE, mask=j + STEP < high, other=0)
            best, total, sums = add_keys(
                best, total, sums, query, position, slope, keys, values, key_scales, value_scales, block, j, low, high,
                head, scale, softcap, KV_HEADS, DIM, V_DIM, BLOCK_SIZE, WINDOW, CAPPED, SLOPED, SCALED, IS_FP8,
                D_PAD, V_PAD, MASKED=False,
            )  # fmt: skip
            block = following
        for place in range(middle, high, STEP):
            j = place + steps
            following = tl.load(blocks + (j + STEP) // BLOCK_SIZE, mask=j + STEP < high, other=0)
            best, total, sums = add_keys(
                best, total, sums, query, position, slope, keys, values, key_scales, value_scales, block, j, low, high,
                head, scale, softcap, KV_HEADS, DIM, V_DIM, BLOCK_SIZE, WINDOW, CAPPED, SLOPED, SCALED, IS_FP8,
                D_PAD, V_PAD, MASKED=True,
            )  # fmt: skip
            block = following
        if SUNK:
            sink = tl.load(sinks + n, mask=here, other=0.0) * LOG2E
            total, factor = add_sink(best, total, sink)
            sums *= factor[:, None]
        place = out + (own.to(tl.int64) * HEADS + n)[:, None] * V_DIM + v[None, :]
        result = (sums / tl.where(here, total, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(place, result, mask=here[:, None] & (v < V_DIM)[None, :])


class Rows(NamedTuple):
    """The rows of a step, on the device. starts: int32 [R + 1], their places among the T tokens. positions_T: int64,
    those of a row one behind the other. table_RN: int32, their blocks."""

    starts: torch.Tensor
    positions_T: torch.Tensor
    table_RN: torch.Tensor


class Multiprocessors(NamedTuple):
    """A device's multiprocessors: how many there are, and the shared memory of each."""

    number: int
    shared_bytes: int


H100: Final = Multiprocessors(132, 228 * 2**10)


class Kept:
    """Memory of a backend on the device for all layers and steps, where graphs read it: slopes and sinks, and room for
    the sums of parts of contexts. multiprocessors: None for an H100's. tiles: as chosen for the device."""

    def __init__(self, multiprocessors: Multiprocessors | None = None, tiles: TunedTiles | None = None) -> None:
        self.multiprocessors = multiprocessors or H100
        self.tiles = tiles or TunedTiles()
        self._numbers: dict[tuple[Sequence[float], torch.device], torch.Tensor] = {}
        self._parts: torch.Tensor | None = None

    def numbers(self, numbers: Sequence[float], device: torch.device) -> torch.Tensor:
        """Returns slopes or sinks as float32 [N]."""
        held = self._numbers.get((numbers, device))
        if held is None:
            held = self._numbers[numbers, device] = torch.tensor(numbers, dtype=torch.float32, device=device)
        return held

    def parts(self, device: torch.device) -> torch.Tensor:
        """Returns PARTS_BYTES of float32, which each layer may overwrite."""
        if self._parts is None:
            self._parts = torch.empty(PARTS_BYTES // 4, dtype=torch.float32, device=device)
        return self._parts


class Launch(NamedTuple):
    """A layer's attention as the kernels get it: arguments by name, the queries in a tile, and the tiles that all heads
    of a query take."""

    arguments: dict[str, Any]
    queries: int
    shares: int


def takes(dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None) -> bool:
    """Return whether the kernels suit queries and caches of these dtypes and heads of this size. In fp32 they spill
    registers with quantized caches and with heads of more than 128 elements. kv_dtype None: dtype."""
    known = attention_class(dtype.itemsize, head_dim, False) in CHUNKS
    return known and (dtype.itemsize == 2 or kv_dtype not in LARGEST)


def use_of(kernel: str, q_TND: torch.Tensor, kv: LayerKV) -> Use:
    """Returns the use of a kernel in a layer."""
    widest = max(q_TND.shape[2], kv.values.shape[3])
    return attention_use(kernel, q_TND.dtype, widest, q_TND.shape[1] // kv.keys.shape[2], kv.keys.dtype)


def class_of(q_TND: torch.Tensor, kv: LayerKV) -> AttentionClass:
    """Returns the class of a layer's tiles."""
    widest = max(q_TND.shape[2], kv.values.shape[3])
    return attention_class(q_TND.element_size(), widest, kv.key_scales is not None)


def launch_of(
    tile: Tile | DecodeTile,
    q_TND: torch.Tensor,
    kv: LayerKV,
    rows: Rows,
    params: AttentionParams,
    kept: Kept,
) -> Launch:
    """Returns how a layer's queries attend, in such tiles."""
    (heads, dim), (block_size, kv_heads) = q_TND.shape[1:], kv.keys.shape[1:3]
    if q_TND.stride()[1:] != (dim, 1):
        q_TND = q_TND.contiguous()
    group, v_dim = heads // kv_heads, kv.values.shape[3]
    shares = -(-group // tile.rows)
    share = -(-group // shares)
    keys, values = (x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x for x in (kv.keys, kv.values))
    device, none = q_TND.device, keys  # any pointer, of an alignment that does not change
    arguments = {
        "q": q_TND, "keys": keys, "values": values, "table": rows.table_RN,
        "key_scales": none if kv.key_scales is None else kv.key_scales,
        "value_scales": none if kv.value_scales is None else kv.value_scales,
        "slopes": none if params.slopes is None else kept.numbers(params.slopes, device),
        "sinks": none if params.sinks is None else kept.numbers(params.sinks, device),
        "q_stride": q_TND.stride(0), "table_stride": rows.table_RN.stride(0),
        "scale": params.scale, "softcap": 1.0 if params.softcap is None else params.softcap,
        "HEADS": heads, "GROUP": group, "SHARE": share, "DIM": dim, "V_DIM": v_dim, "BLOCK_SIZE": block_size,
        "WINDOW": params.window or 0, "CAPPED": params.softcap is not None, "SLOPED": params.slopes is not None,
        "SUNK": params.sinks is not None, "SCALED": kv.key_scales is not None,
        "IS_FP8": kv.keys.dtype is torch.float8_e4m3fn, "TILE": tile.rows, "STEP": tile.positions,
        "D_PAD": max(16, triton.next_power_of_2(dim)), "V_PAD": max(16, triton.next_power_of_2(v_dim)),
        "num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": FP_FUSION,
    }  # fmt: skip
    return Launch(arguments, tile.rows // share, kv_heads * shares)


def attend_chunks(
    q_TND: torch.Tensor,
    kv: LayerKV,
    out_TNV: torch.Tensor,
    rows: Rows,
    params: AttentionParams,
    kept: Kept,
    queries: range,
) -> None:
    """Writes out_TNV of the tokens of rows that have as many queries as `queries` says; other tokens are left as they
    are."""
    tile = kept.tiles.pick(use_of("attend_tiles", q_TND, kv), chunk_tiles(class_of(q_TND, kv), kept.multiprocessors)[0])
    launch, num_rows = launch_of(tile, q_TND, kv, rows, params, kept), len(rows.starts) - 1
    launch.arguments.update(all_registers(kept.multiprocessors))
    attend_tiles[(len(q_TND) // launch.queries + num_rows, launch.shares)](
        positions=rows.positions_T, starts=rows.starts, out=out_TNV, rows=num_rows,
        fewest=queries.start, most=queries.stop - 1, ROWS=rows_compiled_for(num_rows), **launch.arguments,
    )  # fmt: skip


def rows_compiled_for(num_rows: int) -> int:
    """Returns the power of two of rows that a kernel's constant says."""
    return max(FEWEST_ROWS, int(triton.next_power_of_2(num_rows)))


def chunk_tiles(of: AttentionClass, multiprocessors: Multiprocessors) -> Sequence[Tile]:
    """Returns the tiles of chunks that a device has the shared memory for, its default first."""
    is_wide = of == (2, 256, False) and multiprocessors.shared_bytes < ROOMY_BYTES
    return CHUNKS[of][1:] if is_wide else CHUNKS[of]


def all_registers(multiprocessors: Multiprocessors) -> Mapping[str, int]:
    """Returns the argument of a launch with which ptxas gives a program what registers it needs. On small devices it
    would spill some, so that one program more fits."""
    return {"maxnreg": 255} if multiprocessors.shared_bytes < ROOMY_BYTES else {}
