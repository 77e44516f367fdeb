"""Contexts of several rows gathered from a paged cache into one ragged tensor of keys and one of values, in Triton.

Codes of quantized caches become numbers on the way, bit for bit those of TorchKVStore.gather, the twin. A program takes
some positions of a row and one KV head; rows, block tables and first positions are read on the device. Imported only
where Triton is installed. R rows, J positions of all of them, K KV heads of the cache, D elements of a head.
"""

# Triton's own types are no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-calls

from typing import Final

import torch
import triton
import triton.language as tl

from tandem.workers.kernels.kv_store import LayerKV, as_indexable
from tandem.workers.kernels.triton.triton_attention import FEWEST_ROWS, _codes, tile_of

POSITIONS: Final = 64
ELEMENTS: Final = 8192
"""The most positions of a program, and the most elements of them: with more of wide heads registers run out."""
CHANGING: Final = ["rows", "table_stride", "first_head"]
UNALIGNED: Final = ["starts", "firsts", "table"]


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=UNALIGNED)
def gather_contexts(
    keys, values, key_scales, value_scales, starts, firsts, table, out_keys, out_values, rows, table_stride, first_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr, IS_FP8: tl.constexpr,
    ROWS: tl.constexpr, POSITIONS: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Writes out_keys and out_values [J, heads, D] of heads from first_head on. starts [R + 1]: the rows' places in J;
    firsts [R]: the position that a row's begins with. Programs: tiles, J // POSITIONS + R; heads."""
    head = tl.program_id(1)
    row, first, begin, stop = tile_of(tl.program_id(0), starts, rows, POSITIONS, ROWS)
    place = begin + tl.arange(0, POSITIONS)
    here, d = place < stop, tl.arange(0, D_PAD)
    position = tl.load(firsts + row) + place - first
    block = tl.load(table + row.to(tl.int64) * table_stride + position // BLOCK_SIZE, mask=here, other=0).to(tl.int64)
    source = (block * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + first_head + head
    target = (place.to(tl.int64) * tl.num_programs(1) + head) * DIM
    mask = here[:, None] & (d < DIM)[None, :]
    for plane in tl.static_range(2):
        stored = tl.load((values if plane else keys) + (source * DIM)[:, None] + d[None, :], mask=mask, other=0)
        if SCALED:
            scale = tl.load((value_scales if plane else key_scales) + source, mask=here, other=0.0)
            stored = _codes(stored, IS_FP8, tl.float32) * scale[:, None]
        out = out_values if plane else out_keys
        tl.store(out + target[:, None] + d[None, :], stored.to(out.dtype.element_ty), mask=mask)


def gather(
    kv: LayerKV, starts: torch.Tensor, firsts: torch.Tensor, table_RN: torch.Tensor, out: torch.Tensor, first_head: int
) -> None:
    """Fills out [2, J, heads, D], keys and values, with the contexts of R rows, of KV heads from first_head on. starts,
    firsts, table_RN: int32, as gather_contexts reads them."""
    (_, block_size, kv_heads, dim), (_, positions, heads, _) = kv.keys.shape, out.shape
    rows, scaled, d_pad = len(firsts), kv.key_scales is not None, max(16, triton.next_power_of_2(dim))
    at_once = min(POSITIONS, ELEMENTS // d_pad)
    gather_contexts[(positions // at_once + rows, heads)](
        as_indexable(kv.keys), as_indexable(kv.values), kv.key_scales if scaled else starts,
        kv.value_scales if scaled else starts, starts, firsts, table_RN, *out, rows, table_RN.stride(0), first_head,
        KV_HEADS=kv_heads, DIM=dim, BLOCK_SIZE=block_size, SCALED=scaled, IS_FP8=kv.keys.dtype is torch.float8_e4m3fn,
        ROWS=max(FEWEST_ROWS, triton.next_power_of_2(rows)), POSITIONS=at_once, D_PAD=d_pad, num_warps=4,
    )  # fmt: skip
