"""Attention of decode steps by torch's operations whose shapes depend on nothing but how many tokens and blocks there
is room for, so that a graph can hold them: each token attends alone to the first W blocks of its row.

Lengths and block tables are read on the device; positions beyond a token's own are masked. Kernels that read the cache
in place do without the gather and the padding; this is what torch alone can do. Shapes as in backend.py; R tokens of a
group, J = W * block size positions, G = N / K query heads of a KV head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tandem.workers.attention.chunks import additive_mask
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.latent import LatentHeads, attend_absorbed
from tandem.workers.attention.pieces import piece_blocks
from tandem.workers.kernels.kv_store import KVStore, LayerKV
from tandem.workers.models.spec.arch import AttentionParams


def padded_blocks(batch: ForwardBatch) -> int:
    """Returns the least power of two of blocks that holds each row's context."""
    return 1 << (-(-max(batch.seq_lens_list) // batch.block_size) - 1).bit_length()


def padded_width(batch: ForwardBatch, kv: LayerKV, dtype: torch.dtype) -> int | None:
    """Returns padded_blocks; None where that is more than may be gathered at once."""
    width = padded_blocks(batch)
    return width if width <= piece_blocks(kv, dtype) else None


class PaddedDecode:
    """A ReplayableStep of up to num_tokens tokens. Padded tokens attend to the first slot of scratch_block."""

    def __init__(self, batch: ForwardBatch, num_tokens: int, width: int, scratch_block: int, store: KVStore) -> None:
        device = batch.block_table_RN.device
        self._store = store
        self._scratch_block = scratch_block
        self._block_size = batch.block_size
        self._tables_TW = [
            torch.empty((num_tokens, width), dtype=torch.int64, device=device) for _ in range(batch.num_groups)
        ]
        self._lens_T1 = torch.empty((num_tokens, 1), dtype=torch.int64, device=device)
        self._position_J = torch.arange(width * batch.block_size, device=device)
        self._tokens_T = torch.arange(num_tokens, dtype=torch.int32, device=device)
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}
        self._of_heads: dict[Sequence[float], torch.Tensor] = {}
        self.set_batch(batch)

    def set_batch(self, batch: ForwardBatch) -> None:
        count = batch.num_tokens
        row_T = torch.searchsorted(batch.query_starts[1:], self._tokens_T[:count], right=True)
        for group, table_TW in enumerate(self._tables_TW):
            table_RN = batch.block_table(group)
            width = min(table_TW.shape[1], table_RN.shape[1])
            table_TW.fill_(self._scratch_block)
            table_TW[:count, :width] = table_RN[row_T, :width]
        self._lens_T1.fill_(1)
        self._lens_T1[:count, 0] = batch.positions_T + 1
        for (window, dtype), mask_TJ in self._masks.items():
            mask_TJ.copy_(self._mask(window, dtype))

    def attend(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, params: AttentionParams
    ) -> torch.Tensor:
        mask_TJ = self._mask_of(params.window, q_TND.dtype if params.is_plain else torch.float32)
        table_TW = self._tables_TW[kv.group]
        rows = max(1, piece_blocks(kv, q_TND.dtype) // table_TW.shape[1])
        outputs = []
        for start in range(0, len(q_TND), rows):
            own = slice(start, start + rows)
            k_RKJD, v_RKJD = self._gathered(table_TW[own], kv, q_TND.dtype)
            q_RKGD = q_TND[own].unflatten(1, (k_RKJD.shape[1], -1))
            mask_R11J = mask_TJ[own, None, None]
            if params.is_plain:
                out = F.scaled_dot_product_attention(q_RKGD, k_RKJD, v_RKJD, attn_mask=mask_R11J, scale=params.scale)
            else:
                out = self._attend_any(q_RKGD, k_RKJD, v_RKJD, mask_R11J, self._lens_T1[own], params)
            outputs.append(out.flatten(1, 2))
        return torch.cat(outputs)

    def attend_latent(
        self,
        q_TND: torch.Tensor,
        latents_T1E: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
        heads: LatentHeads,
    ) -> torch.Tensor:
        mask_TJ = self._mask_of(None, torch.float32)
        table_TW = self._tables_TW[kv.group]
        rows = max(1, piece_blocks(kv, q_TND.dtype) // table_TW.shape[1])
        q_TNE, outputs = heads.absorb(q_TND), []
        for start in range(0, len(q_TND), rows):
            own = slice(start, start + rows)
            table_RW = table_TW[own]
            latents_BS1E = q_TND.new_empty((table_RW.numel(), *kv.keys.shape[1:]))
            self._store.gather(kv.keys, kv.key_scales, table_RW.flatten(), latents_BS1E)
            latents_RJE = latents_BS1E.view(len(table_RW), -1, heads.spec.head_dim)
            outputs.append(attend_absorbed(q_TNE[own], latents_RJE, mask_TJ[own, None], params, heads.spec))
        return heads.release(torch.cat(outputs))

    def _gathered(self, table_RW: torch.Tensor, kv: LayerKV, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [R, K, J, D]. Their memory is new: a graph's must not be another step's."""
        shape = (table_RW.numel(), *kv.keys.shape[1:])
        k_BSKD, v_BSKD = (torch.empty(shape, dtype=dtype, device=table_RW.device) for _ in "kv")
        self._store.gather(kv.keys, kv.key_scales, table_RW.flatten(), k_BSKD)
        self._store.gather(kv.values, kv.value_scales, table_RW.flatten(), v_BSKD)
        rows, _, heads, dim = len(table_RW), *shape[1:]
        return k_BSKD.view(rows, -1, heads, dim).transpose(1, 2), v_BSKD.view(rows, -1, heads, dim).transpose(1, 2)

    def _attend_any(
        self,
        q_RKGD: torch.Tensor,
        k_RKJD: torch.Tensor,
        v_RKJD: torch.Tensor,
        mask_R11J: torch.Tensor,
        lens_R1: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Soft-caps, ALiBi and sinks, in float32."""
        scores_RKGJ = (q_RKGD.float() @ k_RKJD.float().transpose(2, 3)) * params.scale
        if params.softcap is not None:
            scores_RKGJ = torch.tanh(scores_RKGJ / params.softcap) * params.softcap
        if params.slopes is not None:
            slopes_KG1 = self._of_head(params.slopes, q_RKGD.device).view(*q_RKGD.shape[1:3], 1)
            scores_RKGJ = scores_RKGJ + slopes_KG1 * (self._position_J - (lens_R1 - 1))[:, None, None]
        scores_RKGJ = scores_RKGJ + mask_R11J
        if params.sinks is not None:
            sinks_KG1 = self._of_head(params.sinks, q_RKGD.device).view(*q_RKGD.shape[1:3], 1)
            scores_RKGJ = torch.cat((scores_RKGJ, sinks_KG1.expand(len(scores_RKGJ), -1, -1, 1)), dim=-1)
        weights_RKGJ = scores_RKGJ.softmax(-1)[..., : k_RKJD.shape[2]]
        return (weights_RKGJ @ v_RKJD.float()).to(q_RKGD.dtype)

    def _mask_of(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Kept, as the layers with one window share it and a graph reads it."""
        if (window, dtype) not in self._masks:
            self._masks[window, dtype] = self._mask(window, dtype)
        return self._masks[window, dtype]

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Returns [T, J]: 0 where a token attends, -inf elsewhere."""
        seen_TJ = self._position_J < self._lens_T1
        if window is not None:
            seen_TJ &= self._position_J >= self._lens_T1 - window
        return additive_mask(seen_TJ, dtype)

    def _of_head(self, numbers: Sequence[float], device: torch.device) -> torch.Tensor:
        """Returns slopes or sinks [N] on the device, kept as a graph reads them."""
        if numbers not in self._of_heads:
            self._of_heads[numbers] = torch.tensor(numbers, dtype=torch.float32, device=device)
        return self._of_heads[numbers]
