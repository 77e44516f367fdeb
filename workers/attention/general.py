"""Attention of any AttentionParams, row by row in torch operations: soft-caps, ALiBi and sinks, which SDPA does not
compute.

Used by the torch backend in place of its fast path. Shapes as in backend.py.
"""

from itertools import accumulate

import torch

from tandem.workers.attention.chunks import Chunk, Gatherer, chunk_of
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.pieces import attend_in_pieces, context_pieces
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.spec.arch import AttentionParams


class GeneralAttention:
    """One step; rows are sorted once for each group of layers and window."""

    def __init__(self, batch: ForwardBatch, gatherer: Gatherer) -> None:
        self._batch = batch
        self._gatherer = gatherer
        self._chunks: dict[tuple[int | None, int], list[Chunk]] = {}

    def attend(
        self,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Returns out_TND. The step's keys and values have been written to the cache."""
        key = params.window, kv.group
        if key not in self._chunks:
            self._chunks[key] = self._lay_out(*key, kv.keys.dtype is k_TKD.dtype)
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
        for chunk in self._chunks[key]:
            own = slice(chunk.start, chunk.stop)
            pieces = context_pieces(self._gatherer, chunk, k_TKD, v_TKD, kv)
            out_TND[own] = attend_in_pieces(q_TND[own], pieces, chunk.context_len, params, chunk.before)
        return out_TND

    def _lay_out(self, window: int | None, group: int, is_exact: bool) -> list[Chunk]:
        batch = self._batch.of_group(group)
        starts = accumulate(batch.query_lens_list, initial=0)
        return [
            chunk_of(batch, row, start, window, is_exact)
            for row, (start, _) in enumerate(zip(starts, batch.query_lens_list, strict=False))
        ]
