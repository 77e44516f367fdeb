"""Prompt chunks: rows with several queries, one SDPA each, over their own tokens or a gathered context.

Shared by the torch and the CPU backends. T tokens of the chunk, J context positions, N query heads, K KV heads, D dim.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from workers.models.forward_batch import ForwardBatch


class Scratch:
    """Memory that gathers reuse from layer to layer and step to step: fresh pages would cost more than the copy."""

    def __init__(self) -> None:
        self._bytes: dict[str, torch.Tensor] = {}

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialized; valid until the next take of the same use."""
        size = torch.Size(shape).numel() * dtype.itemsize
        held = self._bytes.get(use)
        if held is None or held.nbytes < size or held.device != device:
            held = self._bytes[use] = torch.empty(size, dtype=torch.uint8, device=device)
        return held[:size].view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row with several queries. `block_ids` hold its context from position `first` on; None: it has no other context
    than its own tokens. bias_TJ: None means plain causal order."""

    start: int
    stop: int
    block_ids: torch.Tensor | None
    context_len: int
    bias_TJ: torch.Tensor | None


def gather(scratch: Scratch, use: str, cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """[blocks, block_size, K, D]: those blocks of a cache, copied."""
    out = scratch.take(use, (block_ids.shape[0], *cache.shape[1:]), cache.dtype, cache.device)
    return torch.index_select(cache, 0, block_ids, out=out)


def attend_chunk(
    chunk: Chunk,
    q_TND: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    scratch: Scratch,
) -> torch.Tensor:
    """out_TND of one row's chunk, over its own tokens or over its gathered context."""
    if chunk.block_ids is not None:
        k_TKD = gather(scratch, "keys", keys, chunk.block_ids).flatten(0, 1)[: chunk.context_len]
        v_TKD = gather(scratch, "values", values, chunk.block_ids).flatten(0, 1)[: chunk.context_len]
    out_1NTD = F.scaled_dot_product_attention(
        q_TND.transpose(0, 1)[None],
        k_TKD.transpose(0, 1)[None],
        v_TKD.transpose(0, 1)[None],
        attn_mask=chunk.bias_TJ,
        is_causal=chunk.bias_TJ is None,
        scale=scale,
        enable_gqa=q_TND.shape[1] != k_TKD.shape[1],
    )
    return out_1NTD[0].transpose(0, 1)


def visible_span(batch: ForwardBatch, row: int, window: int | None) -> range:
    """Indices into the row's block table that its first query, and all later ones, can see."""
    seq_len, num_queries = batch.seq_lens_list[row], batch.query_lens_list[row]
    first_seen = 0 if window is None else max(0, seq_len - num_queries - window + 1)
    return range(first_seen // batch.block_size, -(-seq_len // batch.block_size))


def chunk_of(
    batch: ForwardBatch, row: int, start: int, num_queries: int, window: int | None, dtype: torch.dtype
) -> Chunk:
    """A prompt chunk. Alone (no context before it, no window in reach) it needs neither gather nor mask."""
    seq_len, device = batch.seq_lens_list[row], batch.block_table_RN.device
    stop = start + num_queries
    if seq_len == num_queries and (window is None or window >= seq_len):
        return Chunk(start, stop, None, seq_len, None)
    span = visible_span(batch, row, window)
    first = span.start * batch.block_size
    position_T1 = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    position_J = torch.arange(first, seq_len, device=device)
    seen_TJ = position_J <= position_T1
    if window is not None:
        seen_TJ &= position_J > position_T1 - window
    block_ids = batch.block_table_RN[row, span.start : span.stop].long()
    return Chunk(start, stop, block_ids, seq_len - first, additive_mask(seen_TJ, dtype))


def additive_mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What SDPA adds to the scores: 0 where a position is seen, -inf where not."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
