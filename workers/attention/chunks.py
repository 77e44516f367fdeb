"""Attention of prefill chunks: rows with several queries, one by one, over their own tokens or a gathered context.

Shared by the torch and the CPU backends, which differ in their ChunkAttention. T tokens of the chunk, J context
positions, N query heads, K KV heads, D head dim.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F

from tandem.workers.attention.row_layout import Chunk
from tandem.workers.attention.softmax import as_mask, seen_through
from tandem.workers.kernels.kv_store import KVStore, LayerKV
from tandem.workers.models.spec.arch import AttentionParams


class ChunkAttention(Protocol):
    """Attention of one row over its contiguous context."""

    def attend(
        self, q_TND: torch.Tensor, k_JKD: torch.Tensor, v_JKD: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return out_TND, as wide as the values. The chunk's tokens are the last T of the J positions."""
        ...


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
        """Return [T, J], the mask that SDPA adds to the scores."""
        key = (num_tokens, context_len, window)
        if key not in self._masks:
            position_J = torch.arange(context_len, dtype=torch.int32, device=like.device)
            seen_TJ = seen_through(window, position_J[-num_tokens:, None] - position_J)
            self._masks[key] = as_mask(seen_TJ, like.dtype)
        return self._masks[key]


def _as_wide(*each_XND: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield queries, keys and values with zeros to the width of the widest: SDPA has kernels for one width."""
    widest = max(x_XND.shape[2] for x_XND in each_XND)
    return (x if x.shape[2] == widest else F.pad(x, (0, widest - x.shape[2])) for x in each_XND)


class Gatherer:
    """Gathers cached blocks, in q's dtype, into memory that is reused from layer to layer and step to step: fresh pages
    would cost more than the copy."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._bytes: dict[str, torch.Tensor] = {}

    def blocks(self, kv: LayerKV, block_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [blocks, block_size, K, D], valid until the next call."""
        v_out = self._room("values", block_ids, kv.values, dtype)
        return self.keys(kv, block_ids, dtype), self._store.gather(kv.values, kv.value_scales, block_ids, v_out)

    def keys(self, kv: LayerKV, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the first plane alone, [blocks, block_size, K, D], valid until the next call."""
        k_out = self._room("keys", block_ids, kv.keys, dtype)
        return self._store.gather(kv.keys, kv.key_scales, block_ids, k_out)

    def _room(self, use: str, block_ids: torch.Tensor, plane: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor for these blocks of a plane, valid until the next one of the same use."""
        shape = torch.Size((block_ids.shape[0], *plane.shape[1:]))
        size = shape.numel() * dtype.itemsize
        held = self._bytes.get(use)
        if held is None or held.nbytes < size or held.device != plane.device:
            held = self._bytes[use] = torch.empty(size, dtype=torch.uint8, device=plane.device)
        return held[:size].view(dtype).view(shape)

    def context(
        self, chunk: Chunk, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (k_JKD, v_JKD) of a chunk: the step's own, which need no gather, or copies from the cache."""
        if chunk.block_ids is None:
            own = slice(chunk.start, chunk.stop)
            return k_TKD[own], v_TKD[own]
        k_BSKD, v_BSKD = self.blocks(kv, chunk.block_ids, k_TKD.dtype)
        return k_BSKD.flatten(0, 1)[: chunk.context_len], v_BSKD.flatten(0, 1)[: chunk.context_len]
