"""A look at torch's flash kernel before it is used: small steps of prompts through it and through triton_attention.py,
on the device that is there.

Called once at a rank's start by workers/platforms/cuda.py. A build of torch without it, a device that it does not know
and a head or a window that it computes otherwise are found here, and prompts stay with our kernel.
"""

from itertools import accumulate
from typing import Final, NamedTuple

import torch

from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.prompts.flash_prompts import FlashPrompts
from tandem.workers.attention.prompts.varlen_attention import VarlenAttention
from tandem.workers.attention.triton_paged import TritonAttention
from tandem.workers.kernels.kv_store import LayerKV, TorchKVStore, encode
from tandem.workers.models.spec.arch import AttentionParams

HEADS: Final = (4, 2)
"""Query heads and KV heads."""
BLOCK_SIZE: Final = 16
MOST_APART: Final = 2**-5
"""The most by which a number may differ, beside one and itself: some roundings of bf16. One key more or less in a
window of five makes ten times that."""


class ProbeShape(NamedTuple):
    """A step: queries and lengths of its rows."""

    name: str
    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    window: int | None = None


SHAPES: Final = (
    ProbeShape("first chunks", (70, 33), (70, 33)),
    ProbeShape("further chunks", (40, 20), (130, 24)),
    ProbeShape("a window", (50, 30), (120, 30), 5),
)


def flash_obstacle(
    varlen: VarlenAttention, device: torch.device, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype
) -> str | None:
    """Return why prompts are better left to triton_attention.py, if they are."""
    for shape in SHAPES:
        try:
            apart = _apart(shape, varlen, device, dtype, head_dim, kv_dtype)
        except Exception as error:  # whatever it is, a rank without it works
            reason = str(error).strip().partition("\n")[0]
            return f"{shape.name}: {type(error).__name__}: {reason}"
        if not apart <= MOST_APART:
            return f"{shape.name}: results differ by {apart:.3g}"
    return None


def _apart(
    shape: ProbeShape,
    varlen: VarlenAttention,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    kv_dtype: torch.dtype,
) -> float:
    """Return the greatest difference of two outputs, beside one and the number; NaN if one has a NaN."""
    generator = torch.Generator().manual_seed(0)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    (heads, kv_heads), batch = HEADS, _batch(shape, device)
    tokens, blocks = batch.num_tokens, batch.block_table_RN.numel()
    planes = [encode(noise(blocks, BLOCK_SIZE, kv_heads, head_dim), kv_dtype) for _ in "kv"]
    kv = LayerKV.of([plane for plane, _ in planes], [scales for _, scales in planes if scales is not None])
    q_TND, k_TKD, v_TKD = noise(tokens, heads + 2 * kv_heads, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    TorchKVStore().write(k_TKD, v_TKD, kv, batch.slot_mapping_T)
    params = AttentionParams(head_dim**-0.5, shape.window)
    ours, theirs = (
        TritonAttention(prompts).prepare(batch).attend(q_TND, k_TKD, v_TKD, kv, params)
        for prompts in (None, FlashPrompts(varlen, fewest_tokens=0, fewest_queries=1))
    )
    return float(((ours.float() - theirs.float()).abs() / (1 + ours.float().abs())).max())


def _batch(shape: ProbeShape, device: torch.device) -> ForwardBatch:
    """Return the step, whose rows' blocks are out of order."""
    rows, width = len(shape.lengths), -(-max(shape.lengths) // BLOCK_SIZE)
    table_RN = torch.arange(rows * width).flip(0).view(rows, width)
    positions = [range(length - own, length) for own, length in zip(shape.queries, shape.lengths, strict=True)]
    slots = [
        int(table_RN[row, place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE
        for row, own in enumerate(positions)
        for place in own
    ]
    starts = list(accumulate(shape.queries, initial=0))

    def number(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ForwardBatch(
        input_ids_T=number([0] * len(slots), torch.int64),
        positions_T=number([place for own in positions for place in own], torch.int64),
        slot_mapping_T=number(slots, torch.int64),
        query_starts=number(starts),
        seq_lens=number(list(shape.lengths)),
        block_table_RN=table_RN.to(device, torch.int32),
        logits_rows_S=number([], torch.int64),
        query_lens_list=list(shape.queries),
        seq_lens_list=list(shape.lengths),
        block_size=BLOCK_SIZE,
    )
