"""Attention over latents by torch's operations, on any device: decodes absorbed, in groups of similar length or padded
for a graph; latent_chunks.py has the chunks.

The twin of cpu_latents.py, and the backend of GPUs. Shapes as in backend.py; R rows of a group, J their positions.
"""

from collections.abc import Hashable

import torch

from tandem.workers.attention.chunks import Gatherer, SdpaChunks
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.attention.latents.latent_backend import LatentStep
from tandem.workers.attention.latents.latent_chunks import LatentChunks
from tandem.workers.attention.latents.latent_heads import LatentHeads
from tandem.workers.attention.padded_decode import PaddedRows, padded_width
from tandem.workers.attention.softmax import attend
from tandem.workers.attention.torch_sdpa import DecodeGroups
from tandem.workers.kernels.kv_store import LayerKV, TorchKVStore
from tandem.workers.models.spec.arch import AttentionParams


class TorchLatents:
    """The backend. is_bounded and replays: as TorchAttention has them. It keeps scratch memory between steps, so one
    instance serves one decoder on one thread."""

    name = "torch-sdpa"

    def __init__(self, *, is_bounded: bool = False, replays: bool = False) -> None:
        self._replays = replays
        self._is_bounded = is_bounded
        self._gatherer = Gatherer(TorchKVStore())

    def prepare(self, batch: ForwardBatch) -> LatentStep:
        if batch.real_T is not None:
            return PaddedLatents(batch, TorchKVStore())
        return _GroupsStep(batch, self._gatherer, self._is_bounded)

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        return padded_width(shape, kv, dtype) if self._replays else None


class _GroupsStep:
    """One step: decodes in groups, chunks one by one."""

    def __init__(self, batch: ForwardBatch, gatherer: Gatherer, is_bounded: bool) -> None:
        self._gatherer = gatherer
        self._groups = DecodeGroups(batch, is_bounded=is_bounded)
        self._chunks = LatentChunks(gatherer, SdpaChunks(), keeps_scores=is_bounded)

    def attend_latent(
        self, q_TND: torch.Tensor, latents_T1E: torch.Tensor, kv: LayerKV, params: AttentionParams, heads: LatentHeads
    ) -> torch.Tensor:
        out_TNV = q_TND.new_empty((*q_TND.shape[:2], heads.spec.v_dim))
        for group in self._groups.of(params.window, kv, q_TND.dtype, torch.bool):
            tokens = slice(None) if group.tokens_R is None else group.tokens_R
            latents_BS1E = self._gatherer.keys(kv, group.block_ids, q_TND.dtype)
            latents_RJE = latents_BS1E.view(group.num_rows, -1, heads.spec.head_dim)
            q_RNE = heads.absorb(q_TND[tokens])
            out_TNV[tokens] = heads.release(_attend_absorbed(q_RNE, latents_RJE, group.mask_R11J, params, heads))
        for chunk in self._groups.chunks(params.window, kv, q_TND.dtype):
            own = slice(chunk.start, chunk.stop)
            out_TNV[own] = self._chunks.attend(chunk, q_TND, latents_T1E, kv, params, heads)
        return out_TNV


class PaddedLatents(PaddedRows):
    """A LatentStep that a graph may hold."""

    def attend_latent(
        self, q_TND: torch.Tensor, latents_T1E: torch.Tensor, kv: LayerKV, params: AttentionParams, heads: LatentHeads
    ) -> torch.Tensor:
        seen_TJ = self.mask(params.window, torch.bool)
        q_TNE, outputs = heads.absorb(q_TND), []
        for own in self.at_once(kv, q_TND.dtype):
            latents_RJE = self.gather(own, kv.group, kv.keys, kv.key_scales, q_TND.dtype).squeeze(2)
            outputs.append(_attend_absorbed(q_TNE[own], latents_RJE, seen_TJ[own, None, None], params, heads))
        return heads.release(torch.cat(outputs))


def _attend_absorbed(
    q_RNE: torch.Tensor,
    latents_RJE: torch.Tensor,
    seen_R11J: torch.Tensor | None,
    params: AttentionParams,
    heads: LatentHeads,
) -> torch.Tensor:
    """Return out_RNL of rows with one query each; to the latents, all heads are those of one KV head."""
    keys_R1JE = latents_RJE[:, None].float()
    seen_R111J = None if seen_R11J is None else seen_R11J[:, None]
    out_R1N1L = attend(q_RNE[:, None, :, None], keys_R1JE, keys_R1JE[..., : heads.spec.kv_rank], params, seen_R111J)
    return out_R1N1L[:, 0, :, 0]
