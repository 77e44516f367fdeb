"""EagleStudent: an EAGLE-3 head (Li et al. 2025): one Llama layer over what three of the target's layers pass on.

fc takes the three to one vector, 3H -> H, for each token that the target has computed. The layer reads it, normed,
beside the normed embedding of the token behind it: 2H inputs of q, k and v. What the layer puts out is in place of the
vector for the next guess, and behind a norm and a head of few tokens it is the guess. So a step unrolls as many guesses
as it learns (training-time test): guess j of a chain sees the vectors of all tokens before the chain, and its own
j - 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.distill.draft_student import EPS, MULTIPLE, llama_keys
from tandem.workers.distill.student import LayerShape, LearnedLayer, LearnedNorm, begin, rate_of, shifted
from tandem.workers.distill.target_model import AnswerStates, TargetModel
from tandem.workers.models.spec.arch import ArchSpec, Gated, Gqa, NormKind

UNROLLED: Final = 3
"""Guesses that a step of training makes one behind the other."""


def tapped_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the layers before which the residual stream is taken: EAGLE-3's (2, N / 2, N - 3), and in models of less
    than ten layers, where these do not ascend, (1, N / 2, N - 1). UnsupportedModelError under four layers."""
    if num_layers < 4:
        raise UnsupportedModelError(f"{num_layers} layers: an EAGLE-3 head reads three places between four", "TARGET")
    found = (2, num_layers // 2, num_layers - 3)
    return found if found[0] < found[1] < found[2] else (1, num_layers // 2, num_layers - 1)


def eagle_shape(spec: ArchSpec) -> LayerShape:
    """Returns the head's sizes: the target's, as far as a Llama has them."""
    attention, mlp, rope = spec.layers[0].attention, spec.layers[0].mlp, spec.layers[0].position
    heads, kv_heads, dim = max(1, spec.hidden_size // 64), max(1, spec.hidden_size // 64), 64
    if isinstance(attention, Gqa) and attention.head_dim % 2 == 0:
        heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    wide = mlp.width if isinstance(mlp, Gated) else 3 * spec.hidden_size
    return LayerShape(
        hidden_size=spec.hidden_size,
        intermediate_size=-(-wide // MULTIPLE) * MULTIPLE,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=EPS,
        rope_theta=10000.0 if rope is None else rope.theta,
    )


class _Head(nn.Module):
    """The layer's attention_norm is of the embeddings, hidden_norm of the vectors."""

    def __init__(self, shape: LayerShape, draft_vocab: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = LearnedNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layer = LearnedLayer(shape, 2 * shape.hidden_size)
        self.norm = LearnedNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, draft_vocab, bias=False)


class EagleStudent:
    """Implements Student. ids: the target's ids of its vocabulary, ascending. It begins as the target would be without
    the layers behind the last tap: with its norm and its head's rows."""

    trained_places = UNROLLED

    def __init__(self, target: TargetModel, ids: torch.Tensor, generator: torch.Generator) -> None:
        self._spec, self._target = target.spec, target
        self.taps: tuple[int, ...] = tapped_layers(target.spec.num_layers)
        self.ids: torch.Tensor | None = ids
        self.shape = eagle_shape(target.spec)
        self._head = _Head(self.shape, len(ids))
        self.module: nn.Module = self._head
        begin(self._head, generator)
        self.learning_rate = rate_of(1e-3, 256, self.shape.hidden_size)
        device, norm = target.platform.device, target.spec.final_norm
        with torch.no_grad():
            self._head.fc.weight.zero_()[:, -self.shape.hidden_size :] = torch.eye(self.shape.hidden_size)
            self._head.lm_head.weight.copy_(target.decoder.head_rows(ids.to(device)))
            if norm is not None and norm.kind is NormKind.RMS:
                self._head.norm.weight.copy_(target.decoder.final_norm_weight(device))
            for matrix in (self._head.layer.o, self._head.layer.down):
                matrix.weight.zero_()

    def hidden(self, states: AnswerStates, places: int) -> list[torch.Tensor]:
        """Implements Student."""
        head, layer = self._head, self._head.layer
        vector_BWH = head.fc(shifted(states.taps_BWH, -1))  # behind token s - 1, when s is known and not yet computed
        found: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for place in range(places):
            embedded_BWH = self._embedded(shifted(states.ids_BW, place))
            x_BWI = torch.cat([layer.attention_norm(embedded_BWH), head.hidden_norm(vector_BWH)], -1)
            q_BhWD, k_BhWD, v_BhWD = layer.projected(x_BWI, place)
            keys.append(k_BhWD)
            values.append(v_BhWD)
            vector_BWH = vector_BWH + layer.merged(_attended(q_BhWD, keys, values))
            vector_BWH = vector_BWH + layer.fed(vector_BWH)
            found.append(head.norm(vector_BWH))
        return found

    def logits(self, hidden_NH: torch.Tensor, place: int) -> torch.Tensor:
        """Implements Student."""
        return self._head.lm_head(hidden_NH)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Implements Student. d2t is how far a target's id is from the head's, t2d which ids there are."""
        assert self.ids is not None
        known_V = torch.zeros(self._spec.vocab_size, dtype=torch.bool)
        known_V[self.ids] = True
        head = self._head
        plain = {"fc": head.fc, "midlayer.hidden_norm": head.hidden_norm, "norm": head.norm, "lm_head": head.lm_head}
        found = {f"{name}.weight": part.weight.detach() for name, part in plain.items()}
        known = {"d2t": self.ids - torch.arange(len(self.ids)), "t2d": known_V}
        return {**found, **head.layer.tensors("midlayer."), **known}

    def config(self) -> Mapping[str, Any]:
        """Implements Student."""
        assert self.ids is not None
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **llama_keys(self.shape, self._spec),
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "draft_vocab_size": len(self.ids),
            "target_hidden_size": self._spec.hidden_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.taps), "use_aux_hidden_state": True},
        }

    def _embedded(self, ids_BW: torch.Tensor) -> torch.Tensor:
        """Returns the target's embeddings of tokens, which the head shares and does not change."""
        with torch.inference_mode():
            rows_NH = self._target.decoder.token_rows(ids_BW.flatten()).float()
        return rows_NH.clone().view(*ids_BW.shape, -1)


def _attended(q_BhWD: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns what the guesses of one place take: of the first place's keys all up to their own chain's start, of later
    ones their own chain's."""
    scale, width = q_BhWD.shape[-1] ** -0.5, q_BhWD.shape[2]
    hidden_WW = torch.ones(width, width, dtype=torch.bool, device=q_BhWD.device).triu(1)
    hidden_WW[1:, 0] = True  # nothing was computed before the first token: its place is empty
    scores = [(q_BhWD @ keys[0].transpose(2, 3)).masked_fill(hidden_WW, float("-inf"))]
    scores += [(q_BhWD * key_BhWD).sum(-1, keepdim=True) for key_BhWD in keys[1:]]
    shares = functional.softmax(torch.cat(scores, -1) * scale, -1)
    taken = shares[..., :width] @ values[0]
    for place, value_BhWD in enumerate(values[1:]):
        taken = taken + shares[..., width + place : width + place + 1] * value_BhWD
    return taken
