"""Paged attention as its definition over contiguous contexts, slow: the reference that the other backends are tested
against. Its arithmetic is attention/softmax.py's, which parity with transformers tests. Works on any device. Shapes as
in backend.py.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from tandem.workers.attention.backend import AttentionStep
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.attention.latents.latent_heads import LatentHeads
from tandem.workers.attention.softmax import attend, seen_through
from tandem.workers.kernels.kv_store import LayerKV, decode
from tandem.workers.models.spec.arch import AttentionParams


@dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """The reference backend."""

    name: str = "reference"

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        return _ReferenceStep(batch)

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        return None


@dataclass(frozen=True, slots=True)
class _ReferenceStep:
    batch: ForwardBatch

    def attend(
        self,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
    ) -> torch.Tensor:
        batch = self.batch.of_group(kv.group)
        out_TND = torch.empty_like(q_TND)
        start = 0
        for row, (num_queries, seq_len) in enumerate(zip(batch.query_lens_list, batch.seq_lens_list, strict=True)):
            stop = start + num_queries
            k_JKD = row_context(kv.keys, kv.key_scales, batch, row)
            v_JKD = row_context(kv.values, kv.value_scales, batch, row)
            position_T = torch.arange(seq_len - num_queries, seq_len, device=q_TND.device)
            out_TND[start:stop] = attend_row(q_TND[start:stop], k_JKD, v_JKD, position_T, params)
            start = stop
        return out_TND

    def attend_latent(
        self,
        q_TND: torch.Tensor,
        latents_T1E: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
        heads: LatentHeads,
    ) -> torch.Tensor:
        """Keys and values of every head, made of every latent."""
        batch = self.batch.of_group(kv.group)
        out_TNV = q_TND.new_empty((*q_TND.shape[:2], heads.spec.v_dim))
        start = 0
        for row, (num_queries, seq_len) in enumerate(zip(batch.query_lens_list, batch.seq_lens_list, strict=True)):
            stop = start + num_queries
            latents_J1E = row_context(kv.keys, kv.key_scales, batch, row)
            k_JND, v_JNV = heads.expand(latents_J1E.squeeze(1).to(q_TND.dtype), slice(None))
            position_T = torch.arange(seq_len - num_queries, seq_len)
            out_TNV[start:stop] = attend_row(q_TND[start:stop], k_JND, v_JNV, position_T, params)
            start = stop
        return out_TNV


def row_context(cache: torch.Tensor, scales: torch.Tensor | None, batch: ForwardBatch, row: int) -> torch.Tensor:
    """Returns [J, K, D]: one row's keys or values, in order of position; quantized ones in float32."""
    seq_len = batch.seq_lens_list[row]
    blocks = batch.block_table_RN[row, : -(-seq_len // batch.block_size)].long()
    if scales is None:
        return cache[blocks].flatten(0, 1)[:seq_len]
    return decode(cache[blocks], scales[blocks], torch.float32).flatten(0, 1)[:seq_len]


def attend_row(
    q_TND: torch.Tensor, k_JKD: torch.Tensor, v_JKD: torch.Tensor, position_T: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Returns out_TND of queries at those positions over all J; consecutive query heads share a KV head."""
    back_TJ = position_T[:, None] - torch.arange(k_JKD.shape[0], device=q_TND.device)
    q_KGTD = q_TND.unflatten(1, (k_JKD.shape[1], -1)).permute(1, 2, 0, 3)
    k_KJD, v_KJD = k_JKD.transpose(0, 1), v_JKD.transpose(0, 1)
    out_KGTD = attend(q_KGTD, k_KJD, v_KJD, params, seen_through(params.window, back_TJ), back_TJ)
    return out_KGTD.permute(2, 0, 1, 3).flatten(1, 2)
