"""StreamHead: an EAGLE-1 or EAGLE-2 head (Li et al. 2024), or an MTP layer of DeepSeek-V3 (2024).

Both make one vector of a token's embedding and the hidden state that the model has behind the token before it, and pass
it through layers like the model's. What comes out guesses the token after that, and takes the hidden state's place for
the next guess. An MTP layer has norms of both inputs and a norm and a head of its own; EAGLE uses the model's head. The
arithmetic is vLLM's (llama_eagle.py, deepseek_mtp.py). T tokens, S rows with a guess, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Hashable, Iterator
from functools import partial

import torch

from tandem.offload.weights.weight_stream import WeightStream
from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from tandem.parallel.linear import ColumnParallelLinear
from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.models.decoder import attention_of
from tandem.workers.models.layers.arrangements import make_layer
from tandem.workers.models.layers.decoder_layer import DecoderLayer
from tandem.workers.models.layers.layer_inputs import LayerInputs
from tandem.workers.models.layers.norms import AddNorm, make_norm
from tandem.workers.models.layers.positions import RotaryPositions
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.head_config import HeadSpec, StreamParams
from tandem.workers.models.spec.parameters import NormParams
from tandem.workers.models.step_tensors import Heard
from tandem.workers.platforms.base import Platform
from tandem.workers.rank.drafters.eagle_head import Embed
from tandem.workers.rank.drafters.medusa_drafts import Normed

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Makes logits [S, V], float32, of hidden states [S, H]."""


class StreamHead:
    """The head, whole on this rank. embed, logits: the model's, for a head that has none of its own (None: it has);
    normed: gives the model's hidden states after the final norm."""

    def __init__(
        self,
        spec: HeadSpec,
        platform: Platform,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        embed: Embed,
        logits: Logits | None,
        normed: Normed,
    ) -> None:
        params, own = spec.params, spec.spec
        assert isinstance(params, StreamParams) and own is not None
        alone, ops = ParallelContext.single(), platform.fused_ops(dtype)
        make = partial(platform.linear, dtype=dtype)
        norm = own.layers[0].norm

        def norm_of(part: NormParams | None) -> AddNorm | None:
            return None if part is None else make_norm(norm, part, ops)

        biases = () if params.mix_bias is None else (params.mix_bias,)
        self._mix = ColumnParallelLinear((params.mix,), biases, alone, make)
        self._token_norm, self._hidden_norm = norm_of(params.token_norm), norm_of(params.hidden_norm)
        self._layers = _layers_of(own, params, platform, dtype)
        self._norm = norm_of(params.norm)
        self._own_head = None if params.head is None else VocabParallelHead(params.head, alone, make)
        head = logits if self._own_head is None else self._own_head
        assert head is not None, "neither has a head"
        self._head: Logits = head
        self._own_embedding = None if params.embedding is None else VocabParallelEmbedding(params.embedding, alone)
        self._embed: Embed = embed if self._own_embedding is None else self._own_embedding
        self._ropes = [RotaryPositions(rope, own.rope_dim, platform.device) for rope in own.ropes]
        self._backend, self._dtype = attention_of(own, platform, dtype, kv_dtype), dtype
        self._normed = normed

    def vectors(self, heard: Heard, at: torch.Tensor) -> torch.Tensor:
        """Returns the model's hidden states [N, H] of the tokens at indices N of what a step has left."""
        return self._normed(heard, at)

    def forward(
        self, ids_T: torch.Tensor, vectors_TH: torch.Tensor, batch: ForwardBatch, kv: KVTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes as EagleHead.forward() does."""
        tokens_TH = self._embed(ids_T).to(vectors_TH.dtype)
        if self._token_norm is not None and self._hidden_norm is not None:
            tokens_TH = torch.where(batch.positions_T[:, None] == 0, 0, tokens_TH)  # as MTP layers are trained
            tokens_TH, vectors_TH = self._token_norm.alone(tokens_TH), self._hidden_norm.alone(vectors_TH)
        residual_TH = self._mix(torch.cat((tokens_TH, vectors_TH), -1))
        slots = [batch.slot_mapping_T, *(table.slot_mapping_T for table in batch.further_groups)]
        angles = tuple(rope.angles(batch.positions_T, residual_TH.dtype) for rope in self._ropes)
        inputs = LayerInputs(batch, residual_TH, slots, angles, None, self._backend, kv, batch.num_tokens)
        branch_TH: torch.Tensor | None = None
        for layer, layer_kv in zip(self._layers, kv.layers, strict=True):
            branch_TH = layer(branch_TH, inputs, layer_kv)
        assert branch_TH is not None, "a head without layers"
        rows_S = batch.logits_rows_S
        next_SH, branch_SH = inputs.residual_TH[rows_S], branch_TH[rows_S]
        if self._norm is None:
            next_SH += branch_SH
            return self._head(next_SH), next_SH
        hidden_SH = self._norm(branch_SH, next_SH)  # adds to next_SH in place
        return self._head(hidden_SH), next_SH

    def replay_key(self, shape: StepShape, kv: KVTensors) -> Hashable | None:
        """Returns as Decoder.replay_key() does."""
        return self._backend.replay_key(shape, next(iter(kv.layers)), self._dtype)

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._mix.slots()
        for norm in (self._token_norm, self._hidden_norm, self._norm):
            if norm is not None:
                yield from norm.slots()
        for layer in self._layers:
            yield from layer.slots()
        for part in (self._own_head, self._own_embedding):
            if part is not None:
                yield from part.slots()


def _layers_of(own: ArchSpec, params: StreamParams, platform: Platform, dtype: torch.dtype) -> list[DecoderLayer]:
    """Returns the head's layers."""
    alone, place = ParallelContext.single(), WeightStream((), None).place_of(0)
    made = []
    for layer, layer_params in zip(own.layers, params.layers, strict=True):
        rope = None if layer.position is None else own.ropes.index(layer.position)
        make = partial(platform.linear, dtype=dtype)
        experts = partial(platform.experts, dtype, place)
        made.append(make_layer(layer, layer_params, alone, platform.fused_ops(dtype), make, experts, rope))
    if params.bare_first:
        made[0].leave_out_norm()
    return made
