"""Chunks of attention over latents, by whichever of two ways to the same result, up to rounding, multiplies less:

    absorbed  q @ W_uk once for each query, scores and sums over the latents themselves, then @ W_uv
    expanded  k and v of each head made of every latent of the context, then attention as usual

By multiplications for each head, of t queries over J positions with a mean of j = J - (t - 1) / 2 each, latents of L
elements, keys of P that do not rotate and R that do, values of V:

    absorbed  t L (P + V) + t j (2 L + R)
    expanded  J L (P + V) + t j (P + R + V)

A decode is absorbed, a long prompt expanded; with DeepSeek's widths (512, 128, 64, 128) chunks of up to some 170 tokens
over a long context are absorbed. The choice depends on a row's own t and J only, never on other rows.

T tokens, J context positions, N query heads, D = P + R elements of a key, E = L + R of the cache.
"""

from collections.abc import Iterator

import torch

from tandem.workers.attention.backend import DECODE_QUERIES
from tandem.workers.attention.chunks import ChunkAttention, Gatherer
from tandem.workers.attention.latents.latent_heads import LatentHeads
from tandem.workers.attention.pieces import attend_in_pieces, heads_that_fit
from tandem.workers.attention.row_layout import Chunk
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.spec.arch import AttentionParams, Mla
from tandem.workers.planning.budget import GATHER_BYTES


def absorbs(spec: Mla, num_queries: int, context_len: int) -> bool:
    """Return whether absorbed attention of a row takes fewer multiplications. A token and its drafts are always
    absorbed: they come out as in steps of one token each."""
    if num_queries <= DECODE_QUERIES:
        return True
    seen = num_queries * (2 * context_len - num_queries + 1)  # twice the sum over queries
    both = 2 * spec.kv_rank * (spec.nope_dim + spec.v_dim)
    absorbed = num_queries * both + seen * (2 * spec.kv_rank + spec.rope_dim)
    return absorbed < context_len * both + seen * (spec.key_dim + spec.v_dim)


class LatentChunks:
    """Rows with several queries, one by one. Keys and values of heads, which are made here, never take more than
    GATHER_BYTES, or room_bytes: as many heads as that allows attend at once. They come in pieces of the context where
    it is too long for one head, or its latents take more to gather. keeps_scores: `attention` might keep all scores,
    and a mask; where they take more than SCORE_BYTES (pieces.py) there are pieces too."""

    def __init__(
        self, gatherer: Gatherer, attention: ChunkAttention, *, keeps_scores: bool, room_bytes: int | None = None
    ) -> None:
        self._gatherer = gatherer
        self._attention = attention
        self._keeps_scores = keeps_scores
        self._room_bytes = room_bytes

    def attend(
        self,
        chunk: Chunk,
        q_TND: torch.Tensor,
        latents_T1E: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
        heads: LatentHeads,
    ) -> torch.Tensor:
        """Return out_TNV of the chunk's own tokens."""
        spec, own = heads.spec, q_TND[chunk.start : chunk.stop]
        if chunk.before is not None or absorbs(spec, len(own), chunk.context_len):
            pieces = self._pieces(chunk, latents_T1E, kv, spec.head_dim)
            keys_and_values = ((piece, piece[..., : spec.kv_rank]) for piece in pieces)
            out_TNL = attend_in_pieces(heads.absorb(own), keys_and_values, chunk.context_len, params, chunk.before)
            return heads.release(out_TNL)
        num_heads, at_once = own.shape[1], self.heads_at_once(chunk, own, spec)
        if at_once == 0:
            pieces = self._pieces(chunk, latents_T1E, kv, num_heads * _of_head(spec))
            expanded = (heads.expand(piece.squeeze(1), slice(None)) for piece in pieces)
            return attend_in_pieces(own, expanded, chunk.context_len, params)
        assert params.slopes is None and params.sinks is None, "numbers of all heads"
        (latents_J1E,) = self._pieces(chunk, latents_T1E, kv, None)
        out_TNV = own.new_empty((*own.shape[:2], spec.v_dim))
        for first in range(0, num_heads, at_once):
            part = slice(first, min(first + at_once, num_heads))
            k_JND, v_JNV = heads.expand(latents_J1E.squeeze(1), part)
            out_TNV[:, part] = self._attention.attend(own[:, part], k_JND, v_JNV, params)
        return out_TNV

    def heads_at_once(self, chunk: Chunk, own: torch.Tensor, spec: Mla) -> int:
        """Return how many heads of an expanded chunk attend at once; 0 for pieces."""
        is_gathered, num_bytes = chunk.block_ids is not None, chunk.context_len * own.element_size()
        room_bytes = GATHER_BYTES if self._room_bytes is None else self._room_bytes
        if is_gathered and num_bytes * spec.head_dim > room_bytes:
            return 0
        if is_gathered and self._keeps_scores and own.shape[1] > heads_that_fit(len(own), chunk.context_len):
            return 0
        return min(own.shape[1], room_bytes // (num_bytes * _of_head(spec)))

    def _pieces(
        self, chunk: Chunk, latents_T1E: torch.Tensor, kv: LayerKV, of_position: int | None
    ) -> Iterator[torch.Tensor]:
        """Yield latents_J1E of the chunk's context in order, each valid until the next; of_position: elements that a
        piece takes for each position, None: all in one piece."""
        block_size = kv.keys.shape[1]
        blocks = -(-chunk.context_len // block_size)
        if of_position is not None:
            blocks = max(1, GATHER_BYTES // (block_size * of_position * latents_T1E.element_size()))
        for start in range(0, chunk.context_len, blocks * block_size):
            stop = min(start + blocks * block_size, chunk.context_len)
            if chunk.block_ids is None:
                yield latents_T1E[chunk.start + start : chunk.start + stop]
            else:
                ids = chunk.block_ids[start // block_size : -(-stop // block_size)]
                yield self._gatherer.keys(kv, ids, latents_T1E.dtype).flatten(0, 1)[: stop - start]


def _of_head(spec: Mla) -> int:
    """Return the elements that are made for each position and head: the product with the latents, which has the value,
    and the key."""
    return spec.nope_dim + spec.v_dim + spec.key_dim
