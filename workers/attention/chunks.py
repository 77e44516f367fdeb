"""Attention of prefill chunks: rows with several queries, one by one, over their own tokens or a gathered context.

Shared by the torch and the CPU backends, which differ in their ChunkAttention. T tokens of the chunk, J context
positions, N query heads, K KV heads, D head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.kv_store import KVStore, LayerKV
from tandem.workers.models.spec.arch import AttentionParams


class ChunkAttention(Protocol):
    """Attention of one row over its contiguous context."""

    def attend(
        self, q_TND: torch.Tensor, k_JKD: torch.Tensor, v_JKD: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Returns out_TND, as wide as the values. The chunk's tokens are the last T of the J positions."""
        ...


class Scratch:
    """Memory that gathers reuse from layer to layer and step to step: fresh pages would cost more than the copy."""

    def __init__(self) -> None:
        self._bytes: dict[str, torch.Tensor] = {}

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an uninitialized tensor, valid until the next take of the same use."""
        size = torch.Size(shape).numel() * dtype.itemsize
        held = self._bytes.get(use)
        if held is None or held.nbytes < size or held.device != device:
            held = self._bytes[use] = torch.empty(size, dtype=torch.uint8, device=device)
        return held[:size].view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row with several queries, tokens start:stop of the step.

    `block_ids`: the blocks that it attends to, the first context_len of their slots; None when its context is only its
    own tokens. before: the number of positions ahead of its first token, int64 [] on the device, where the host does
    not know it: then context_len is the most. None: context_len less the chunk's tokens.
    """

    start: int
    stop: int
    block_ids: torch.Tensor | None
    context_len: int
    before: torch.Tensor | None = None


class SdpaChunks:
    """ChunkAttention by torch's SDPA, of plain params; one per step, since all layers share the masks."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int, int | None], torch.Tensor] = {}

    def attend(
        self, q_TND: torch.Tensor, k_JKD: torch.Tensor, v_JKD: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        assert params.is_plain, "scores that SDPA does not compute"
        window, v_dim = params.window, v_JKD.shape[2]
        num_tokens, context_len = q_TND.shape[0], k_JKD.shape[0]
        q_TND, k_JKD, v_JKD = _as_wide(q_TND, k_JKD, v_JKD)
        is_plain = num_tokens == context_len and (window is None or window >= context_len)
        out_1NTD = F.scaled_dot_product_attention(
            q_TND.transpose(0, 1)[None],
            k_JKD.transpose(0, 1)[None],
            v_JKD.transpose(0, 1)[None],
            attn_mask=None if is_plain else self._mask(num_tokens, context_len, window, q_TND),
            is_causal=is_plain,
            scale=params.scale,
            enable_gqa=q_TND.shape[1] != k_JKD.shape[1],
        )
        return out_1NTD[0, ..., :v_dim].transpose(0, 1)

    def _mask(self, num_tokens: int, context_len: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """Returns [T, J], the mask that SDPA adds to the scores."""
        key = (num_tokens, context_len, window)
        if key not in self._masks:
            position_T1 = torch.arange(context_len - num_tokens, context_len, device=like.device)[:, None]
            position_J = torch.arange(context_len, device=like.device)
            seen_TJ = position_J <= position_T1
            if window is not None:
                seen_TJ &= position_J > position_T1 - window
            self._masks[key] = additive_mask(seen_TJ, like.dtype)
        return self._masks[key]


def _as_wide(*each_XND: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields queries, keys and values with zeros to the width of the widest: SDPA has kernels for one width."""
    widest = max(x_XND.shape[2] for x_XND in each_XND)
    return (x if x.shape[2] == widest else F.pad(x, (0, widest - x.shape[2])) for x in each_XND)


class Gatherer:
    """Gathers cached blocks into reused memory, in q's dtype."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._scratch = Scratch()

    def blocks(self, kv: LayerKV, block_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [blocks, block_size, K, D], valid until the next call."""
        shape, device = (block_ids.shape[0], *kv.keys.shape[1:]), kv.keys.device
        k_out, v_out = (self._scratch.take(use, shape, dtype, device) for use in ("keys", "values"))
        self._store.gather(kv.keys, kv.key_scales, block_ids, k_out)
        self._store.gather(kv.values, kv.value_scales, block_ids, v_out)
        return k_out, v_out

    def keys(self, kv: LayerKV, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the first plane alone, [blocks, block_size, K, D], valid until the next call."""
        shape, device = (block_ids.shape[0], *kv.keys.shape[1:]), kv.keys.device
        return self._store.gather(kv.keys, kv.key_scales, block_ids, self._scratch.take("keys", shape, dtype, device))

    def context(
        self, chunk: Chunk, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (k_JKD, v_JKD) of a chunk: the step's own, which need no gather, or copies from the cache."""
        if chunk.block_ids is None:
            own = slice(chunk.start, chunk.stop)
            return k_TKD[own], v_TKD[own]
        k_BSKD, v_BSKD = self.blocks(kv, chunk.block_ids, k_TKD.dtype)
        return k_BSKD.flatten(0, 1)[: chunk.context_len], v_BSKD.flatten(0, 1)[: chunk.context_len]


def spare_len(batch: ForwardBatch, row: int) -> int:
    """Returns by how much a row's length may be less than the host's."""
    return 0 if batch.spare_lens_list is None else batch.spare_lens_list[row]


def visible_span(batch: ForwardBatch, row: int, window: int | None) -> range:
    """Returns the indices into the row's block table that its first query, and all later ones, may attend to."""
    seq_len, num_queries = batch.seq_lens_list[row], batch.query_lens_list[row]
    least = seq_len - spare_len(batch, row)
    first_seen = 0 if window is None else max(0, least - num_queries - window + 1)
    return range(first_seen // batch.block_size, -(-seq_len // batch.block_size))


def chunk_of(batch: ForwardBatch, row: int, start: int, window: int | None, is_exact: bool) -> Chunk:
    """Returns the prefill chunk of a row that starts at token `start` of the step.

    is_exact: the cache stores K and V in the step's own dtype, unchanged.
    """
    seq_len, num_queries = batch.seq_lens_list[row], batch.query_lens_list[row]
    if is_exact and seq_len == num_queries:
        return Chunk(start, start + num_queries, None, seq_len)
    span = visible_span(batch, row, window)
    block_ids = batch.block_table_RN[row, span.start : span.stop].long()
    hidden = span.start * batch.block_size
    before = batch.positions_T[start] - hidden if spare_len(batch, row) else None
    return Chunk(start, start + num_queries, block_ids, seq_len - hidden, before)


def additive_mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the mask that SDPA adds to the scores: 0 for visible positions, -inf for others."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
