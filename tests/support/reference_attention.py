"""Paged attention written as its definition, slow and exact: the reference that the other backends are tested against.

out[t] = softmax(cap(scale * q[t] . k[j]) - slope * (t - j) for j in the row's context, j <= position of t, within the
window; and the sink) @ (v, 0 for the sink), in float32 (float64 for float64 inputs). Works on any device. Shapes as in
backend.py.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from tandem.workers.attention.backend import AttentionStep, ReplayableStep
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.latent import LatentHeads
from tandem.workers.kernels.kv_store import LayerKV, decode
from tandem.workers.models.spec.arch import AttentionParams


@dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """The reference backend."""

    name: str = "reference"

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        return _ReferenceStep(batch)

    def replay_key(self, batch: ForwardBatch, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        return None

    def prepare_replay(self, batch: ForwardBatch, num_tokens: int, scratch_block: int) -> ReplayableStep:
        raise NotImplementedError("the reference has no replay_key")


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
            position_J = torch.arange(seq_len, device=q_TND.device)
            seen_TJ = position_J <= position_T[:, None]
            if params.window is not None:
                seen_TJ &= position_J > position_T[:, None] - params.window
            distance_TJ = position_T[:, None] - position_J
            out_TND[start:stop] = attend_row(q_TND[start:stop], k_JKD, v_JKD, seen_TJ, params, distance_TJ)
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
            distance_TJ = torch.arange(seq_len - num_queries, seq_len)[:, None] - torch.arange(seq_len)
            out_TNV[start:stop] = attend_row(q_TND[start:stop], k_JND, v_JNV, distance_TJ >= 0, params, distance_TJ)
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
    q_TND: torch.Tensor,
    k_JKD: torch.Tensor,
    v_JKD: torch.Tensor,
    seen_TJ: torch.Tensor,
    params: AttentionParams,
    distance_TJ: torch.Tensor,
) -> torch.Tensor:
    """Returns softmax attention of T queries over J positions; consecutive query heads share a KV head. distance: from
    each query to each position."""
    wide = torch.promote_types(q_TND.dtype, torch.float32)
    group = q_TND.shape[1] // k_JKD.shape[1]
    k_JND, v_JND = (x.to(wide).repeat_interleave(group, dim=1) for x in (k_JKD, v_JKD))
    scores_NTJ = torch.einsum("tnd,jnd->ntj", q_TND.to(wide), k_JND) * params.scale
    if params.softcap is not None:
        scores_NTJ = params.softcap * torch.tanh(scores_NTJ / params.softcap)
    if params.slopes is not None:
        slopes_N11 = torch.tensor(params.slopes, dtype=wide, device=q_TND.device)[:, None, None]
        scores_NTJ = scores_NTJ - slopes_N11 * distance_TJ
    scores_NTJ = scores_NTJ.masked_fill(~seen_TJ, float("-inf"))
    if params.sinks is not None:
        sinks_N11 = torch.tensor(params.sinks, dtype=wide, device=q_TND.device)[:, None, None]
        scores_NTJ = torch.cat((scores_NTJ, sinks_N11.expand(-1, scores_NTJ.shape[1], 1)), dim=-1)
    weights_NTJ = scores_NTJ.softmax(dim=-1)[..., : k_JKD.shape[0]]
    return torch.einsum("ntj,jnd->tnd", weights_NTJ, v_JND).to(q_TND.dtype)
