"""Attention of any AttentionParams, row by row in torch operations: soft-caps, ALiBi and sinks, which SDPA does not
compute.

Used by the torch backend in place of its fast path. Shapes as in backend.py.
"""

import torch

from tandem.workers.attention.chunks import Gatherer
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.pieces import attend_in_pieces, context_pieces
from tandem.workers.attention.row_layout import RowLayouts
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.spec.arch import AttentionParams


class GeneralAttention:
    """One step, all of whose rows are chunks."""

    def __init__(self, batch: ForwardBatch, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self._layouts = RowLayouts(batch, most_queries=0)

    def attend(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, params: AttentionParams
    ) -> torch.Tensor:
        """Return out_TND. The step's keys and values have been written to the cache."""
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
        for chunk in self._layouts.of(params.window, kv, k_TKD.dtype).chunks:
            own = slice(chunk.start, chunk.stop)
            pieces = context_pieces(self._gatherer, chunk, k_TKD, v_TKD, kv)
            out_TND[own] = attend_in_pieces(q_TND[own], pieces, chunk.context_len, params, chunk.before)
        return out_TND
