"""Decode attention for GPUs in Triton: contexts are cut into parts of one length, which a fixed number of programs
takes from a list.

Rows of one token, or of one and its drafts (triton_attention.py has the others, and what both share). `list_parts`
lists the parts of a step on the device, once for all layers, the long ones first; `attend_parts` computes them, item by
item (Flash-Decoding, Dao et al. 2023; a list as in FlashInfer, Ye et al. 2025); `merge_parts` adds those of contexts of
several. A long row beside short ones is cut like any other, and one grid serves all steps, so a captured graph does.

A query's sums do not depend on other rows: parts and steps begin at multiples of their lengths, whoever else is in a
tile, and are added in order; a row for whose parts there is no memory left is computed by one program in the same
order.

T tokens, R rows, N query heads, K KV heads, G = N / K, D and V elements of a key and a value, I items.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.kernels.triton.tiles import DECODES, SHORT_DECODES, AttentionClass, DecodeTile
from tandem.workers.kernels.triton.triton_attention import (
    LOG2E,
    NOTHING,
    ROOMY_BYTES,
    Kept,
    Multiprocessors,
    Rows,
    add_keys,
    add_sink,
    all_registers,
    class_of,
    launch_of,
    power_of_two,
    rows_compiled_for,
    use_of,
)
from tandem.workers.kernels.triton.triton_lora import FP_FUSION
from tandem.workers.models.spec.arch import AttentionParams
from tandem.workers.planning.budget import MOST_PARTS

FIELDS: Final = tl.constexpr(8)
"""Numbers of an item of the list."""
LISTED: Final = tl.constexpr(64)
"""Items that a program of the list writes at once."""
AT_ONCE: Final = tl.constexpr(8)
"""Parts whose sums a program of the merge fetches at once."""
WARP_ELEMENTS: Final = 256
"""Elements of a value that a warp merges at most."""


@triton.jit(
    do_not_specialize=["rows", "room", "fewest", "most"], do_not_specialize_on_alignment=["starts", "positions"]
)
def list_parts(
    starts, positions, items, merges, rows, room, fewest, most,
    QUERIES: tl.constexpr, WINDOW: tl.constexpr, LENGTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes items int32 [1 + I, FIELDS], first their number and how many are taken, and merges [R, FIELDS], of rows of
    `fewest` to `most` queries. An item: row, first token, end of the row's tokens, position of the first token, first
    part, end of the parts, slot of the first token's sums; a slot of -1: the parts are all that there are, and no slot
    is needed. A merge: parts, 0 for none to merge; first token, tokens, first slot. Slots of a row are by part, then
    token. room: slots that there are. ROWS: a power of two, at least `rows`. QUERIES: of a tile. Programs: rows."""
    r = tl.arange(0, ROWS)
    first = tl.load(starts + r, mask=r < rows, other=0)
    count = tl.load(starts + r + 1, mask=r < rows, other=0) - first
    here = (count >= fewest) & (count <= most)
    position = tl.load(positions + first, mask=here, other=0).to(tl.int32)
    low = tl.maximum(position + 1 - WINDOW, 0) // LENGTH if WINDOW > 0 else position * 0
    parts = tl.where(here, (position + count - 1) // LENGTH + 1 - low, 0)
    tiles = tl.where(here, (count + QUERIES - 1) // QUERIES, 0)
    needed = tl.where(parts > 1, parts * count, 0)
    ends = tl.cumsum(needed, axis=0)
    apart = (parts > 1) & (ends <= room)
    # first rows for which no slots are left, as they take longest; then all parts that are whole, then the last ones
    uncut = tl.where((parts > 1) & (ends > room), tiles, 0)
    whole = tl.where(apart, tiles * (parts - 1), 0)
    last = tiles - uncut
    row = tl.program_id(0)
    own, before = r == row, r < row
    of_uncut, of_whole = tl.sum(uncut, axis=0), tl.sum(whole, axis=0)
    if row == 0:
        tl.store(items, of_uncut + of_whole + tl.sum(last, axis=0))
        tl.store(items + 1, 0)
    own_tiles, own_parts = tl.sum(tl.where(own, tiles, 0), axis=0), tl.sum(tl.where(own, parts, 0), axis=0)
    own_first, own_count = tl.sum(tl.where(own, first, 0), axis=0), tl.sum(tl.where(own, count, 0), axis=0)
    own_low, own_position = tl.sum(tl.where(own, low, 0), axis=0), tl.sum(tl.where(own, position, 0), axis=0)
    slot = tl.sum(tl.where(own, ends - needed, 0), axis=0)
    is_apart = tl.sum((own & apart).to(tl.int32), axis=0) > 0
    to_merge = merges + row * FIELDS
    tl.store(to_merge, tl.where(is_apart, own_parts, 0))
    tl.store(to_merge + 1, own_first)
    tl.store(to_merge + 2, own_count)
    tl.store(to_merge + 3, slot)
    each = tl.where(is_apart, own_parts, tl.minimum(own_parts, 1))
    is_uncut = tl.sum(tl.where(own, uncut, 0), axis=0) > 0
    to_whole = of_uncut + tl.sum(tl.where(before, whole, 0), axis=0)
    to_last = of_uncut + of_whole + tl.sum(tl.where(before, last, 0), axis=0)
    to_last = tl.where(is_uncut, tl.sum(tl.where(before, uncut, 0), axis=0), to_last)
    for start in range(0, own_tiles * each, LISTED):
        i = start + tl.arange(0, LISTED)
        part, tile = i // own_tiles, i % own_tiles
        place = tl.where(part < each - 1, to_whole + i, to_last + tile)
        item = items + (1 + place) * FIELDS
        mask = i < own_tiles * each
        tl.store(item, row + i * 0, mask=mask)
        tl.store(item + 1, own_first + tile * QUERIES, mask=mask)
        tl.store(item + 2, own_first + own_count + i * 0, mask=mask)
        tl.store(item + 3, own_position + tile * QUERIES, mask=mask)
        tl.store(item + 4, own_low + part, mask=mask)
        tl.store(item + 5, own_low + tl.where(is_apart, part + 1, own_parts), mask=mask)
        tl.store(item + 6, tl.where(is_apart, slot + part * own_count + tile * QUERIES, -1), mask=mask)


@triton.jit
def keep_part(
    best, total, sums, here, row, part, first_part, stop_part, slot, slots, spare, sink, part_out, part_sums, out,
    V_DIM: tl.constexpr, SUNK: tl.constexpr, TILE: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    """Writes out [.., V] at `row` of an item whose only part this is, or the last one for which there was no slot; else
    its sums, greatest score and total weight: to its slots in part_out [.., V] and part_sums [.., 2], or to the
    program's spare rows, two TILEs behind `spare` for each program, where the next part finds them. here: the rows of
    the tile that there are."""
    v = tl.arange(0, V_PAD)
    stored = here[:, None] & (v < V_DIM)[None, :]
    spare += tl.program_id(0) * (2 * TILE) + tl.arange(0, TILE)
    if part > first_part:
        tl.debug_barrier()  # all threads have stored the parts before, and the other spare rows are read
        at = spare + (part + 1) % 2 * TILE
        held, weight = tl.load(part_sums + at * 2, mask=here), tl.load(part_sums + at * 2 + 1, mask=here)
        higher = tl.maximum(best, held)
        before, after = power_of_two(held - higher), power_of_two(best - higher)
        total = weight * before + total * after
        earlier = tl.load(part_out + at[:, None] * V_DIM + v[None, :], mask=stored, other=0.0)
        sums = earlier * before[:, None] + sums * after[:, None]
        best = higher
    if (slot < 0) & (part + 1 == stop_part):
        if SUNK:
            total, factor = add_sink(best, total, tl.load(sink, mask=here, other=0.0) * LOG2E)
            sums *= factor[:, None]
        result = (sums / tl.where(here, total, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * V_DIM + v[None, :], result, mask=stored)
    else:
        at = tl.where(slot < 0, spare + part % 2 * TILE, slots)
        tl.store(part_out + at[:, None] * V_DIM + v[None, :], sums, mask=stored)
        tl.store(part_sums + at * 2, best, mask=here)
        tl.store(part_sums + at * 2 + 1, total, mask=here)


@triton.jit(do_not_specialize=["q_stride", "table_stride", "room"], do_not_specialize_on_alignment=["q", "table"])
def attend_parts(
    q, keys, values, key_scales, value_scales, items, table, slopes, sinks, out, part_out, part_sums,
    q_stride, table_stride, room, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, SUNK: tl.constexpr, SCALED: tl.constexpr, IS_FP8: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, LENGTH: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    """Writes out [T, N, V] of items whose row has no others; of the rest their sums to part_out [room, N, V], and their
    greatest score and total weight to part_sums [room, N, 2]. Behind these there are two TILEs of rows for each
    program, in which it adds parts for which there were no slots. Other arguments as in attend_tiles. Programs: any
    number; each takes an item after the other."""
    QUERIES: tl.constexpr = TILE // SHARE
    KV_HEADS: tl.constexpr = HEADS // GROUP
    SHARES: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    m, steps = tl.arange(0, TILE), tl.arange(0, STEP)
    d = tl.arange(0, D_PAD)
    works = tl.load(items) * (KV_HEADS * SHARES)
    work = tl.atomic_add(items + 1, 1)
    while work < works:
        item = items + (1 + work // (KV_HEADS * SHARES)) * FIELDS
        row, token, stop, position = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        first_part, stop_part, slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
        own, of_group = token + m // SHARE, work % SHARES * SHARE + m % SHARE
        head = work // SHARES % KV_HEADS
        here, n = (m < QUERIES * SHARE) & (own < stop) & (of_group < GROUP), head * GROUP + of_group
        query = tl.load(
            q + (own.to(tl.int64) * q_stride + n * DIM)[:, None] + d[None, :],
            mask=here[:, None] & (d < DIM)[None, :], other=0.0,
        )  # fmt: skip
        blocks = table + row.to(tl.int64) * table_stride
        low = tl.maximum(position + 1 - WINDOW, 0) if WINDOW > 0 else 0
        high = position + tl.minimum(QUERIES, stop - token)
        slope = tl.zeros((TILE,), tl.float32)
        if SLOPED:
            slope = tl.load(slopes + n, mask=here, other=0.0)
        for part in range(first_part, stop_part):
            best = tl.full((TILE,), NOTHING, tl.float32)
            total = tl.zeros((TILE,), tl.float32)
            sums = tl.zeros((TILE, V_PAD), tl.float32)
            begin, end = part * LENGTH, tl.minimum(part * LENGTH + LENGTH, high)
            if WINDOW > 0:
                begin = tl.maximum(begin, low // STEP * STEP)
            block = tl.load(blocks + (begin + steps) // BLOCK_SIZE, mask=begin + steps < end, other=0)
            for place in range(begin, end, STEP):
                j = place + steps
                following = tl.load(blocks + (j + STEP) // BLOCK_SIZE, mask=j + STEP < end, other=0)
                best, total, sums = add_keys(
                    best, total, sums, query, position + m // SHARE, slope, keys, values, key_scales, value_scales,
                    block, j, low, end, head, scale, softcap, KV_HEADS, DIM, V_DIM, BLOCK_SIZE, WINDOW,
                    CAPPED, SLOPED, SCALED, IS_FP8, D_PAD, V_PAD, MASKED=True,
                )  # fmt: skip
                block = following
            keep_part(
                best, total, sums, here, own.to(tl.int64) * HEADS + n, part, first_part, stop_part,
                slot, (slot + m // SHARE).to(tl.int64) * HEADS + n, room.to(tl.int64) * HEADS, sinks + n,
                part_out, part_sums, out, V_DIM, SUNK, TILE, V_PAD,
            )  # fmt: skip
        tl.debug_barrier()  # the spare rows are read
        work = tl.atomic_add(items + 1, 1)


@triton.jit
def merge_parts(
    part_out, part_sums, items, merges, sinks, out,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, SUNK: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    """out = the parts' sums over their total weight, part after part, of the rows that have several. Then no item is
    taken, for the next layer. Programs: rows, query heads."""
    n, v, p = tl.program_id(1), tl.arange(0, V_PAD), tl.arange(0, 128)
    if (tl.program_id(0) == 0) & (n == 0):
        tl.store(items + 1, 0)
    merge = merges + tl.program_id(0) * FIELDS
    parts, token, count, slot = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2), tl.load(merge + 3)
    if parts > 0:
        for query in range(count):
            first, stride = (slot + query).to(tl.int64) * HEADS + n, count * HEADS
            best = tl.full((128,), NOTHING, tl.float32)
            for start in range(0, parts, 128):
                at = first + (start + p) * stride
                best = tl.maximum(best, tl.load(part_sums + at * 2, mask=start + p < parts, other=NOTHING))
            most = tl.max(best, axis=0)
            total = 0.0
            sums = tl.zeros((V_PAD,), tl.float32)
            for start in range(0, parts, AT_ONCE):
                for i in tl.static_range(AT_ONCE):
                    at, inside = first + (start + i) * stride, start + i < parts
                    share = power_of_two(tl.load(part_sums + at * 2, mask=inside, other=NOTHING) - most)
                    total += tl.load(part_sums + at * 2 + 1, mask=inside, other=0.0) * share
                    sums += tl.load(part_out + at * V_DIM + v, mask=v < tl.where(inside, V_DIM, 0), other=0.0) * share
            if SUNK:
                total, factor = add_sink(most, total, tl.load(sinks + n) * LOG2E)
                sums *= factor
            place = out + ((token + query).to(tl.int64) * HEADS + n) * V_DIM + v
            tl.store(place, (sums / total).to(out.dtype.element_ty), mask=v < V_DIM)


class WorkList(NamedTuple):
    """The items of a step and the rows to merge, as list_parts writes them: int32 [1 + I, FIELDS], [R, FIELDS]."""

    items: torch.Tensor
    merges: torch.Tensor


class WorkLists:
    """The lists of a step's decodes: of the rows that have as many queries as `queries` says. A list is made once for
    all layers that cut alike; in a captured step with each of its replays."""

    def __init__(self, starts: torch.Tensor, positions_T: torch.Tensor, queries: range) -> None:
        self._starts = starts
        self._positions_T = positions_T
        self._queries = queries
        self._made: dict[tuple[int, int, int, int], WorkList] = {}

    def of(self, window: int, per_tile: int, length: int, room: int) -> WorkList:
        """Returns the list for tiles of so many queries and parts of a length, with slots for `room` parts. window: 0
        for none."""
        key = (window, per_tile, length, room)
        if key not in self._made:
            rows = len(self._starts) - 1
            most = 1 + room + len(self._positions_T)
            words = self._starts.new_empty((most + rows, FIELDS.value))
            self._made[key] = WorkList(words[:most], words[most:])
            self._write(key)
        return self._made[key]

    def _write(self, key: tuple[int, int, int, int]) -> None:
        window, per_tile, length, room = key
        rows = len(self._starts) - 1
        list_parts[(rows,)](
            self._starts, self._positions_T, *self._made[key], rows, room, self._queries.start, self._queries.stop - 1,
            QUERIES=per_tile, WINDOW=window, LENGTH=length, ROWS=rows_compiled_for(rows),
        )  # fmt: skip


def attend_decodes(
    q_TND: torch.Tensor,
    kv: LayerKV,
    out_TNV: torch.Tensor,
    rows: Rows,
    params: AttentionParams,
    kept: Kept,
    lists: WorkLists,
) -> None:
    """Writes out_TNV of the tokens of the rows that are listed; other tokens are left as they are."""
    default = decode_tiles(class_of(q_TND, kv), q_TND.dtype, kept.multiprocessors)[0]
    tile = kept.tiles.pick(use_of("attend_parts", q_TND, kv), default)
    launch = launch_of(tile, q_TND, kv, rows, params, kept)
    of_position = (launch.arguments["D_PAD"] + launch.arguments["V_PAD"]) * kv.keys.element_size()
    programs = programs_at_once(tile, of_position, kept.multiprocessors)
    sums = PartSums.of(kept.parts(q_TND.device), out_TNV, programs * tile.rows)
    work = lists.of(params.window or 0, launch.queries, tile.length, sums.room)
    launch.arguments.update(all_registers(kept.multiprocessors))
    if kv.key_scales is not None:
        launch.arguments["maxnreg"] = 255  # as on small devices
    attend_parts[(programs,)](
        items=work.items, out=out_TNV, **sums._asdict(), LENGTH=tile.length, **launch.arguments
    )  # fmt: skip
    merge(sums, work, out_TNV, launch.arguments["sinks"] if launch.arguments["SUNK"] else None)


def decode_tiles(of: AttentionClass, dtype: torch.dtype, multiprocessors: Multiprocessors) -> Sequence[DecodeTile]:
    """Returns the tiles of decodes for queries of a dtype, the device's default first. Of a quantized cache's values
    times their scales, which fp16 rounds, small devices would spill some for uneven groups of heads."""
    is_short = of == (2, 128, True) and dtype is torch.float16 and multiprocessors.shared_bytes < ROOMY_BYTES
    return SHORT_DECODES if is_short else DECODES[of]


class PartSums(NamedTuple):
    """Memory for the sums of parts: of `room` parts of all heads, then of what single programs add."""

    part_out: torch.Tensor
    part_sums: torch.Tensor
    room: int

    @classmethod
    def of(cls, memory: torch.Tensor, out_TNV: torch.Tensor, tile_rows: int) -> "PartSums":
        """tile_rows: of the tiles of all programs."""
        heads, v_dim = out_TNV.shape[1:]
        most = memory.numel() // (v_dim + 2) // 4 * 4  # rows of sums, at addresses that are multiples of 16
        return cls(memory, memory[most * v_dim :], min(MOST_PARTS, (most - 2 * tile_rows) // heads))


def merge(sums: PartSums, work: WorkList, out_TNV: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Writes out_TNV of rows of several parts."""
    heads, v_dim = out_TNV.shape[1:]
    v_pad = max(16, triton.next_power_of_2(v_dim))
    merge_parts[(len(work.merges), heads)](
        sums.part_out, sums.part_sums, *work, sums.part_out if sinks is None else sinks, out_TNV,
        HEADS=heads, V_DIM=v_dim, SUNK=sinks is not None, V_PAD=v_pad,
        num_warps=max(1, v_pad // WARP_ELEMENTS), enable_fp_fusion=FP_FUSION,
    )  # fmt: skip


def programs_at_once(tile: DecodeTile, of_position: int, multiprocessors: Multiprocessors) -> int:
    """Returns how many programs the device runs at once, by the shared memory that a program's pipeline takes.
    of_position: bytes that it fetches for each."""
    taken = (tile.stages - 1) * tile.positions * of_position + tile.rows * tile.positions * 4
    return multiprocessors.number * max(1, min(tile.programs, multiprocessors.shared_bytes // taken))
