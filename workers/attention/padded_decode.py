"""Attention of decode steps by torch's operations whose shapes depend on nothing but how many tokens and blocks there
is room for, so that a graph can hold them: each token attends alone to the first W blocks of its row.

Lengths and block tables are read on the device; positions beyond a token's own are masked. Kernels that read the cache
in place do without the gather and the padding; this is what torch alone can do. Shapes as in backend.py; R tokens of a
group, J = W * block size positions, G = N / K query heads of a KV head.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from tandem.workers.attention.backend import DECODE_QUERIES
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.attention.pieces import piece_blocks
from tandem.workers.attention.softmax import as_mask, attend, seen_through
from tandem.workers.kernels.kv_store import KVStore, LayerKV
from tandem.workers.models.spec.arch import AttentionParams
from tandem.workers.planning.graph_room import table_width


def padded_width(shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> int | None:
    """Return the width of graph_room.py that holds each row's blocks; None for a step of chunks, and where that
    is more than may be gathered at once."""
    width = table_width(shape.num_blocks, kv.keys.shape[1])
    return width if shape.most_queries <= DECODE_QUERIES and width <= piece_blocks(kv, dtype) else None


class PaddedRows:
    """The tokens of a step: the blocks and the length of each, made of a batch's tensors alone."""

    def __init__(self, batch: ForwardBatch, store: KVStore) -> None:
        device, width = batch.block_table_RN.device, batch.block_table_RN.shape[1]
        self._store = store
        tokens_T = torch.arange(batch.num_tokens, dtype=torch.int32, device=device)
        row_T = torch.searchsorted(batch.query_starts[1:], tokens_T, right=True)
        self._tables_TW = [batch.block_table(group)[row_T].long() for group in range(batch.num_groups)]
        self._last_T1 = batch.positions_T[:, None]
        self._position_J = torch.arange(width * batch.block_size, device=device)
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def at_once(self, kv: LayerKV, dtype: torch.dtype) -> Iterator[slice]:
        """Yield the tokens in order, as many at a time as may be gathered."""
        num_tokens, width = self._tables_TW[kv.group].shape
        rows = max(1, piece_blocks(kv, dtype) // width)
        return (slice(start, start + rows) for start in range(0, num_tokens, rows))

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return as_mask of where tokens attend, [T, J], which the layers with one window share."""
        if (window, dtype) not in self._masks:
            self._masks[window, dtype] = as_mask(seen_through(window, self._last_T1 - self._position_J), dtype)
        return self._masks[window, dtype]

    def back(self, own: slice) -> torch.Tensor:
        """Return by how many positions each slot is behind tokens, [R, 1, 1, 1, J]."""
        return self._last_T1[own, :, None, None, None] - self._position_J

    def gather(
        self, own: slice, group: int, plane: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the tokens' contexts in a plane of the cache, [R, J, K, D]. Their memory is new: a graph's must not be
        another step's."""
        table_RW = self._tables_TW[group][own]
        shape = (table_RW.numel(), *plane.shape[1:])
        out_BSKD = torch.empty(shape, dtype=dtype, device=table_RW.device)
        self._store.gather(plane, scales, table_RW.flatten(), out_BSKD)
        return out_BSKD.view(len(table_RW), -1, *plane.shape[2:])


class PaddedDecode(PaddedRows):
    """An AttentionStep that a graph may hold."""

    def attend(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, params: AttentionParams
    ) -> torch.Tensor:
        mask_TJ = self.mask(params.window, q_TND.dtype if params.is_plain else torch.bool)
        outputs = []
        for own in self.at_once(kv, q_TND.dtype):
            k_RKJD = self.gather(own, kv.group, kv.keys, kv.key_scales, q_TND.dtype).transpose(1, 2)
            v_RKJD = self.gather(own, kv.group, kv.values, kv.value_scales, q_TND.dtype).transpose(1, 2)
            q_RKGD = q_TND[own].unflatten(1, (k_RKJD.shape[1], -1))
            mask_R11J = mask_TJ[own, None, None]
            if params.is_plain:
                out = F.scaled_dot_product_attention(q_RKGD, k_RKJD, v_RKJD, attn_mask=mask_R11J, scale=params.scale)
            else:
                q_RKG1D, seen_R111J = q_RKGD[..., None, :], mask_R11J[:, None]
                out = attend(q_RKG1D, k_RKJD, v_RKJD, params, seen_R111J, self.back(own)).squeeze(3)
            outputs.append(out.flatten(1, 2))
        return torch.cat(outputs)
