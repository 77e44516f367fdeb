"""Attention over latents for GPUs in Triton: decodes and chunks of prompts, which read each latent of the cache once.

To queries that are multiplied with the heads' matrix ("absorbed", attention/latents/latent_chunks.py) a latent and its
key that rotates are the key of all heads, and the latent alone is their value. So a program fetches a tile of latents
once for its products with queries and with weights, in half the bytes of keys and values. The heads of a query, up to
the rows of a tile, share it. Everything else is that of triton_attention.py and triton_decode.py: weights, tiles of
rows, block ids fetched a step ahead; parts of decodes' contexts, their list, memory and merge. Sums are those of
latents, which the heads' matrix turns into values. Plain scores without windows: no family of latents has others.

T tokens, R rows, N query heads of this rank, P elements of a key that do not rotate and R that do, D = P + R, L of a
latent, E = L + R of the cache.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from tandem.workers.kernels.kv_store import LARGEST, LayerKV, as_indexable
from tandem.workers.kernels.triton.tiles import AttentionClass, DecodeTile, Tile
from tandem.workers.kernels.triton.triton_attention import (
    NOTHING,
    ROOMY_BYTES,
    Kept,
    Rows,
    _codes,
    all_registers,
    rows_compiled_for,
    tile_of,
    weigh,
)
from tandem.workers.kernels.triton.triton_decode import (
    FIELDS,
    PartSums,
    WorkLists,
    keep_part,
    merge,
    programs_at_once,
)
from tandem.workers.kernels.triton.triton_lora import FP_FUSION

SIZES: Final = (128, 256, 512)
"""Elements of a latent: the most that a size of tiles is for."""
MOST_ROTATED: Final = 64
"""The most elements of a key that rotate."""
DECODE: Final[Mapping[AttentionClass, DecodeTile]] = {
    (2, 128, False): DecodeTile(16, 64, 4, 3),
    (2, 256, False): DecodeTile(16, 32, 4, 3),
    (2, 512, False): DecodeTile(16, 32, 8, 3),
    (2, 128, True): DecodeTile(16, 32, 8, 3),
    (2, 256, True): DecodeTile(16, 32, 4, 3),
    (2, 512, True): DecodeTile(16, 32, 8, 3),
    (4, 128, False): DecodeTile(16, 16, 4, 3),
    (4, 128, True): DecodeTile(16, 16, 4, 3),
}
PREFILL: Final[Mapping[AttentionClass, Tile]] = {
    (2, 128, False): Tile(64, 32, 4, 3),
    (2, 256, False): Tile(64, 32, 8, 3),
    (2, 512, False): Tile(32, 32, 8, 3),
    (2, 128, True): Tile(32, 32, 4, 3),
    (2, 256, True): Tile(32, 32, 8, 3),
    (2, 512, True): Tile(16, 32, 8, 3),
    (4, 128, False): Tile(16, 16, 4, 3),
    (4, 128, True): Tile(16, 16, 4, 3),
}
"""Tiles as in triton_attention.py. The queries of a tile take as many registers as there are elements of a latent."""
CHANGING: Final = ["rows", "table_stride", "room", "fewest", "most"]
UNALIGNED: Final = ["positions", "starts", "table"]


@triton.jit
def load_queries(
    q, key_q, own, n, here, HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    L_PAD: tl.constexpr, R_PAD: tl.constexpr,
):  # fmt: skip
    """Returns a tile's queries of latents, of q [T, N, L], and of keys that rotate, the last of key_q [T, N, D]."""
    d, r = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    head = own.to(tl.int64) * HEADS + n
    query = tl.load(q + head[:, None] * RANK + d[None, :], mask=here[:, None] & (d < RANK)[None, :], other=0.0)
    at = key_q + head[:, None] * (NOPE + ROPE) + NOPE + r[None, :]
    return query, tl.load(at, mask=here[:, None] & (r < ROPE)[None, :], other=0.0)


@triton.jit
def add_latents(
    best, total, sums, query, turned, position, latents, scales, block, j, high, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr, IS_FP8: tl.constexpr,
    L_PAD: tl.constexpr, R_PAD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Returns what add_keys does, of a tile with the latents of positions j added. MASKED: some may be at `high` or
    beyond, which are not read, or a query may not see all."""
    d, r = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    inside = j < high if MASKED else j >= 0
    slot = block.to(tl.int64) * BLOCK_SIZE + j % BLOCK_SIZE
    at = latents + (slot * (RANK + ROPE))[:, None]
    if MASKED:
        latent = tl.load(at + d[None, :], mask=inside[:, None] & (d < RANK)[None, :], other=0)
        key = tl.load(at + RANK + r[None, :], mask=inside[:, None] & (r < ROPE)[None, :], other=0)
    else:
        latent = tl.load(at + d[None, :]) if RANK == L_PAD else tl.load(at + d[None, :], (d < RANK)[None, :], other=0)
        rotated = at + RANK + r[None, :]
        key = tl.load(rotated) if ROPE == R_PAD else tl.load(rotated, mask=(r < ROPE)[None, :], other=0)
    latent, key = _codes(latent, IS_FP8, query.dtype), _codes(key, IS_FP8, query.dtype)
    score = tl.dot(query, tl.trans(latent), input_precision="ieee")
    score = tl.dot(turned, tl.trans(key), score, input_precision="ieee")
    if SCALED:
        of_slot = tl.load(scales + slot, mask=inside, other=0.0)
        score *= of_slot[None, :]
    higher, kept, weight, total = weigh(score, best, total, position, 0, j, inside, scale, 1.0, 0, False, False, MASKED)
    if SCALED:
        if query.dtype == tl.float16:  # a small weight times a small scale would vanish in fp16
            latent = (latent.to(tl.float32) * of_slot[:, None]).to(query.dtype)
        else:
            weight *= of_slot[None, :]
    sums = tl.dot(weight.to(query.dtype), latent, sums * kept[:, None], input_precision="ieee")
    return higher, total, sums


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def attend_latent_parts(
    q, key_q, latents, scales, items, table, out, part_out, part_sums, table_stride, room, scale,
    HEADS: tl.constexpr, SHARE: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr, IS_FP8: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, LENGTH: tl.constexpr, L_PAD: tl.constexpr, R_PAD: tl.constexpr,
):  # fmt: skip
    """Does what attend_parts does, with out [T, N, L]: sums of latents. q [T, N, L], key_q [T, N, D]; latents
    [blocks, BLOCK_SIZE, E], scales [blocks, BLOCK_SIZE]. SHARE: heads of a program; those of one part are next to each
    other in the list."""
    QUERIES: tl.constexpr = TILE // SHARE
    SHARES: tl.constexpr = (HEADS + SHARE - 1) // SHARE
    m, steps = tl.arange(0, TILE), tl.arange(0, STEP)
    works = tl.load(items) * SHARES
    work = tl.atomic_add(items + 1, 1)
    while work < works:
        item = items + (1 + work // SHARES) * FIELDS
        row, token, stop, position = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        first_part, stop_part, slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
        own, n = token + m // SHARE, work % SHARES * SHARE + m % SHARE
        here = (m < QUERIES * SHARE) & (own < stop) & (n < HEADS)
        query, turned = load_queries(q, key_q, own, n, here, HEADS, NOPE, RANK, ROPE, L_PAD, R_PAD)
        blocks = table + row.to(tl.int64) * table_stride
        high = position + tl.minimum(QUERIES, stop - token)
        for part in range(first_part, stop_part):
            best = tl.full((TILE,), NOTHING, tl.float32)
            total = tl.zeros((TILE,), tl.float32)
            sums = tl.zeros((TILE, L_PAD), tl.float32)
            begin, end = part * LENGTH, tl.minimum(part * LENGTH + LENGTH, high)
            block = tl.load(blocks + (begin + steps) // BLOCK_SIZE, mask=begin + steps < end, other=0)
            for place in range(begin, end, STEP):
                j = place + steps
                following = tl.load(blocks + (j + STEP) // BLOCK_SIZE, mask=j + STEP < end, other=0)
                best, total, sums = add_latents(
                    best, total, sums, query, turned, position + m // SHARE, latents, scales, block, j, end, scale,
                    RANK, ROPE, BLOCK_SIZE, SCALED, IS_FP8, L_PAD, R_PAD, MASKED=True,
                )  # fmt: skip
                block = following
            keep_part(
                best, total, sums, here, own.to(tl.int64) * HEADS + n, part, first_part, stop_part,
                slot, (slot + m // SHARE).to(tl.int64) * HEADS + n, room.to(tl.int64) * HEADS, part_sums,
                part_out, part_sums, out, RANK, False, TILE, L_PAD,
            )  # fmt: skip
        tl.debug_barrier()  # the spare rows are read
        work = tl.atomic_add(items + 1, 1)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def attend_latent_tiles(
    q, key_q, latents, scales, positions, starts, table, out, rows, table_stride, fewest, most, scale,
    HEADS: tl.constexpr, SHARE: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr, IS_FP8: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, L_PAD: tl.constexpr, R_PAD: tl.constexpr,
):  # fmt: skip
    """Does what attend_tiles does, with arguments as in attend_latent_parts. Programs: tiles, T // queries of a tile +
    R; shares of the heads."""
    QUERIES: tl.constexpr = TILE // SHARE
    row, first, token, stop = tile_of(tl.program_id(0), starts, rows, QUERIES, ROWS)
    count = stop - first
    if (token < stop) & (count >= fewest) & (count <= most):
        m, steps = tl.arange(0, TILE), tl.arange(0, STEP)
        own, n = token + m // SHARE, tl.program_id(1) * SHARE + m % SHARE
        here = (m < QUERIES * SHARE) & (own < stop) & (n < HEADS)
        query, turned = load_queries(q, key_q, own, n, here, HEADS, NOPE, RANK, ROPE, L_PAD, R_PAD)
        position = tl.load(positions + own, mask=here, other=0).to(tl.int32)
        least = tl.load(positions + token).to(tl.int32)
        high = tl.load(positions + tl.minimum(token + QUERIES, stop) - 1).to(tl.int32) + 1
        best = tl.full((TILE,), NOTHING, tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        sums = tl.zeros((TILE, L_PAD), tl.float32)
        blocks = table + row.to(tl.int64) * table_stride
        middle = (least + 1) // STEP * STEP  # all queries see all positions below
        block = tl.load(blocks + steps // BLOCK_SIZE, mask=steps < high, other=0)
        for place in range(0, middle, STEP):
            j = place + steps
            following = tl.load(blocks + (j + STEP) // BLOCK_SIZE, mask=j + STEP < high, other=0)
            best, total, sums = add_latents(
                best, total, sums, query, turned, position, latents, scales, block, j, high, scale,
                RANK, ROPE, BLOCK_SIZE, SCALED, IS_FP8, L_PAD, R_PAD, MASKED=False,
            )  # fmt: skip
            block = following
        for place in range(middle, high, STEP):
            j = place + steps
            following = tl.load(blocks + (j + STEP) // BLOCK_SIZE, mask=j + STEP < high, other=0)
            best, total, sums = add_latents(
                best, total, sums, query, turned, position, latents, scales, block, j, high, scale,
                RANK, ROPE, BLOCK_SIZE, SCALED, IS_FP8, L_PAD, R_PAD, MASKED=True,
            )  # fmt: skip
            block = following
        d = tl.arange(0, L_PAD)
        place = out + (own.to(tl.int64) * HEADS + n)[:, None] * RANK + d[None, :]
        result = (sums / tl.where(here, total, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(place, result, mask=here[:, None] & (d < RANK)[None, :])


class LatentQueries(NamedTuple):
    """A layer's queries: of latents, and of keys, of which the last `rope` elements rotate; both contiguous. scale: of
    the products."""

    q_TNL: torch.Tensor
    q_TND: torch.Tensor
    rope: int
    scale: float


def takes_latents(dtype: torch.dtype, rank: int, rope: int, kv_dtype: torch.dtype | None) -> bool:
    """Return whether the kernels suit queries and caches of these dtypes, latents of `rank` elements and keys of which
    `rope` rotate. In fp32 registers spill with quantized caches and with latents of more than 128 elements. kv_dtype
    None: dtype."""
    is_quantized = kv_dtype in LARGEST
    suits = (dtype.itemsize, _size_of(rank), False) in DECODE and (dtype.itemsize == 2 or not is_quantized)
    return suits and rope <= MOST_ROTATED


def attend_latent_decodes(
    queries: LatentQueries, kv: LayerKV, out_TNL: torch.Tensor, rows: Rows, kept: Kept, lists: WorkLists
) -> None:
    """Writes out_TNL, sums of latents, of the tokens of the rows that are listed; other tokens are left as they are."""
    tile = DECODE[_class_of(queries, kv)]
    arguments = _arguments(tile, queries, kv, rows)
    if queries.q_TNL.element_size() < 4:  # in float32 it spills with them, and without them not
        arguments.update(all_registers(kept.multiprocessors))
    of_position = (arguments["L_PAD"] + arguments["R_PAD"]) * kv.keys.element_size()
    programs = programs_at_once(tile, of_position, kept.multiprocessors)
    sums = PartSums.of(kept.parts(out_TNL.device), out_TNL, programs * tile.rows)
    work = lists.of(0, tile.rows // arguments["SHARE"], tile.length, sums.room)
    attend_latent_parts[(programs,)](items=work.items, out=out_TNL, **sums._asdict(), LENGTH=tile.length, **arguments)
    merge(sums, work, out_TNL, None)


def attend_latent_chunks(
    queries: LatentQueries, kv: LayerKV, out_TNL: torch.Tensor, rows: Rows, kept: Kept, lengths: range
) -> None:
    """Writes out_TNL, sums of latents, of the tokens of rows that have as many queries as `lengths` says; other tokens
    are left as they are."""
    tile = PREFILL[_class_of(queries, kv)]
    arguments = {**_arguments(tile, queries, kv, rows), **all_registers(kept.multiprocessors)}
    if arguments["L_PAD"] == SIZES[-1] and kept.multiprocessors.shared_bytes < ROOMY_BYTES:
        arguments["num_stages"] = 2
    (tokens, heads, _), num_rows, share = out_TNL.shape, len(rows.starts) - 1, arguments["SHARE"]
    attend_latent_tiles[(tokens // (tile.rows // share) + num_rows, -(-heads // share))](
        positions=rows.positions_T, starts=rows.starts, out=out_TNL, rows=num_rows,
        fewest=lengths.start, most=lengths.stop - 1, ROWS=rows_compiled_for(num_rows), **arguments,
    )  # fmt: skip


def _class_of(queries: LatentQueries, kv: LayerKV) -> AttentionClass:
    return queries.q_TNL.element_size(), _size_of(queries.q_TNL.shape[2]), kv.key_scales is not None


def _arguments(tile: Tile | DecodeTile, queries: LatentQueries, kv: LayerKV, rows: Rows) -> dict[str, Any]:
    """Returns the arguments that both kernels have."""
    heads, rank = queries.q_TNL.shape[1:]
    latents = as_indexable(kv.keys)
    return {
        "q": queries.q_TNL, "key_q": queries.q_TND, "latents": latents,
        "scales": latents if kv.key_scales is None else kv.key_scales,
        "table": rows.table_RN, "table_stride": rows.table_RN.stride(0), "scale": queries.scale,
        "HEADS": heads, "SHARE": -(-heads // -(-heads // tile.rows)), "NOPE": queries.q_TND.shape[2] - queries.rope,
        "RANK": rank, "ROPE": queries.rope, "BLOCK_SIZE": kv.keys.shape[1], "SCALED": kv.key_scales is not None,
        "IS_FP8": kv.keys.dtype is torch.float8_e4m3fn, "TILE": tile.rows, "STEP": tile.positions,
        "L_PAD": max(16, triton.next_power_of_2(rank)), "R_PAD": max(16, triton.next_power_of_2(queries.rope)),
        "num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": FP_FUSION,
    }  # fmt: skip


def _size_of(rank: int) -> int:
    return next((size for size in SIZES if rank <= size), 0)
