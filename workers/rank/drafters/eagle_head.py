"""EagleHead: an EAGLE-3 head (Li et al. 2025), one Llama layer over what several of the model's layers pass on.

`fc` makes one vector of them for each token that the model has computed. The layer reads it, normed, beside the normed
embedding of the token behind; what it puts out guesses the token after that, and takes the vector's place for the next
guess. The arithmetic is vLLM's (llama_eagle3.py). T tokens, H hidden size, V ids that the head guesses among.
"""

from collections.abc import Callable, Hashable, Iterator
from functools import partial

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from tandem.parallel.linear import ColumnParallelLinear
from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.models.decoder import attention_of
from tandem.workers.models.layers.attention_layer import AttentionLayer
from tandem.workers.models.layers.layer_inputs import LayerInputs
from tandem.workers.models.layers.mlp import MLP
from tandem.workers.models.layers.norms import make_norm
from tandem.workers.models.layers.positions import RotaryPositions
from tandem.workers.models.spec.arch import Moe
from tandem.workers.models.spec.config.head_config import EagleParams, HeadSpec
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.models.step_tensors import Heard
from tandem.workers.platforms.base import Platform

Embed = Callable[[torch.Tensor], torch.Tensor]
"""Looks up token ids, int64 [T], in an embedding: [T, H]."""


class EagleHead:
    """The head, whole on this rank. embed: the model's embedding, for a head without one of its own."""

    def __init__(
        self, spec: HeadSpec, platform: Platform, dtype: torch.dtype, kv_dtype: torch.dtype, embed: Embed
    ) -> None:
        params, own, alone = spec.params, spec.spec, ParallelContext.single()
        assert isinstance(params, EagleParams) and own is not None
        (layer,), (rope,) = own.layers, own.ropes
        assert not isinstance(layer.mlp, Moe)
        ops, make = platform.fused_ops(dtype), partial(platform.linear, dtype=dtype)
        self._normed_residual = spec.normed_residual
        self._fc = ColumnParallelLinear((params.fc,), (), alone, make)
        self._token_norm = make_norm(layer.norm, params.layer.norm(Role.ATTENTION_NORM), ops)
        self._hidden_norm = make_norm(layer.norm, params.hidden_norm, ops)
        self._attention = AttentionLayer(layer, params.layer, alone, ops, make, 0)
        self._mlp_norm = make_norm(layer.norm, params.layer.norm(Role.MLP_NORM), ops)
        self._mlp = MLP(layer.mlp, params.layer, alone, ops, make)
        self._norm = make_norm(own.final_norm, params.norm, ops)
        self._head = VocabParallelHead(params.head, alone, make)
        self._rope = RotaryPositions(rope, own.rope_dim, platform.device)
        self._backend, self._dtype = attention_of(own, platform, dtype, kv_dtype), dtype
        self._embedding = None if params.embedding is None else VocabParallelEmbedding(params.embedding, alone)
        self._embed: Embed = embed if self._embedding is None else self._embedding

    def vectors(self, heard: Heard, at: torch.Tensor) -> torch.Tensor:
        """Returns the vectors [N, H] of the tokens at indices N of what a step has left."""
        return self._fc(torch.cat([tap_TH[at] for tap_TH in heard.taps], -1))

    def forward(
        self, ids_T: torch.Tensor, vectors_TH: torch.Tensor, batch: ForwardBatch, kv: KVTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes tokens behind the vectors' own. Returns the logits [S, V], float32, of the batch's logits_rows_S,
        and the vectors [S, H] for the guesses behind them. ids_T: the token behind each; positions and slots in the
        batch are the vectors'."""
        normed_TH = self._hidden_norm.alone(vectors_TH)
        residual_TH = normed_TH.clone() if self._normed_residual else vectors_TH.clone()
        x_TI = torch.cat((self._token_norm.alone(self._embed(ids_T).to(vectors_TH.dtype)), normed_TH), -1)
        (layer_kv,) = kv.layers
        slots = [batch.slot_mapping_T, *(table.slot_mapping_T for table in batch.further_groups)]
        angles = (self._rope.angles(batch.positions_T, vectors_TH.dtype),)
        inputs = LayerInputs(batch, residual_TH, slots, angles, None, self._backend, kv, batch.num_tokens)
        attended_TH = self._attention(x_TI, inputs, layer_kv)
        branch_TH = self._mlp(self._mlp_norm(attended_TH, residual_TH))
        rows_S = batch.logits_rows_S
        next_SH = residual_TH[rows_S]
        hidden_SH = self._norm(branch_TH[rows_S], next_SH)  # adds to next_SH in place
        return self._head(hidden_SH), next_SH

    def replay_key(self, shape: StepShape, kv: KVTensors) -> Hashable | None:
        """Returns as Decoder.replay_key() does."""
        return self._backend.replay_key(shape, next(iter(kv.layers)), self._dtype)

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._fc.slots()
        for part in (self._hidden_norm, self._token_norm, self._attention, self._mlp_norm, self._mlp, self._norm):
            yield from part.slots()
        yield from self._head.slots()
        if self._embedding is not None:
            yield from self._embedding.slots()
