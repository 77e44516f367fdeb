"""DraftStudent: a small Llama with the target's tokens, which guesses as a model by itself (Leviathan et al. 2023)."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from tandem.configs.errors import SettingsError
from tandem.workers.distill.distill_settings import DistillSettings
from tandem.workers.distill.student import STEMS, LayerShape, LearnedLayer, LearnedNorm, begin, rate_of, shifted
from tandem.workers.distill.target_model import AnswerStates
from tandem.workers.models.spec.arch import ArchSpec, Gqa
from tandem.workers.models.spec.family_rows.families import family_of
from tandem.workers.models.spec.parameter_names import Role

EPS: Final = 1e-5
LAYER: Final = family_of("LlamaForCausalLM").names.layer_prefix
WIDTH: Final = 8
"""Hidden sizes that nobody has chosen are the target's by this, in whole heads, and two heads at least."""
MULTIPLE: Final = 32


def draft_shape(spec: ArchSpec, settings: DistillSettings) -> LayerShape:
    """Returns a draft's sizes: heads as large as the target's where they divide the hidden size, and as many query
    heads to a key. SettingsError, by flag, where heads do not divide it."""
    attention = spec.layers[0].attention
    dim = attention.head_dim if isinstance(attention, Gqa) and attention.head_dim % 2 == 0 else 64
    hidden = settings.hidden or max(2, spec.hidden_size // WIDTH // dim) * dim
    heads = settings.heads or (hidden // dim if hidden % dim == 0 else None)
    if heads is None:
        words = f"{hidden} is no multiple of {dim}, the size of the target's heads; --heads names how many it has"
        raise SettingsError(words, "--hidden")
    if hidden % heads or (hidden // heads) % 2:
        raise SettingsError(f"{hidden} has no {heads} heads of an even size", "--hidden")
    group = attention.num_heads // attention.num_kv_heads if isinstance(attention, Gqa) else 1
    rope = spec.layers[0].position
    return LayerShape(
        hidden_size=hidden,
        intermediate_size=-(-3 * hidden // MULTIPLE) * MULTIPLE,
        num_attention_heads=heads,
        num_key_value_heads=heads // group if heads % group == 0 else heads,
        head_dim=hidden // heads,
        rms_norm_eps=EPS,
        rope_theta=10000.0 if rope is None else rope.theta,
    )


class _Llama(nn.Module):
    """A Llama with one table for embedding and head."""

    def __init__(self, shape: LayerShape, layers: int, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(LearnedLayer(shape, shape.hidden_size) for _ in range(layers))
        self.norm = LearnedNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, ids_BW: torch.Tensor) -> torch.Tensor:
        x_BWH = self.table(ids_BW)
        for layer in self.layers:
            x_BWH = x_BWH + layer.attended(layer.attention_norm(x_BWH))
            x_BWH = x_BWH + layer.fed(x_BWH)
        return self.norm(x_BWH)


class DraftStudent:
    """Implements Student. At each place it has what it would have had, had it read the same tokens."""

    taps: tuple[int, ...] = ()
    ids: torch.Tensor | None = None
    trained_places = 1

    def __init__(self, spec: ArchSpec, settings: DistillSettings, generator: torch.Generator) -> None:
        self._spec = spec
        self._layers = settings.layers
        self.shape = draft_shape(spec, settings)
        self._llama = _Llama(self.shape, settings.layers, spec.vocab_size)
        self.module: nn.Module = self._llama
        begin(self.module, generator)
        self.learning_rate = rate_of(3e-3, 128, self.shape.hidden_size)

    def hidden(self, states: AnswerStates, places: int) -> list[torch.Tensor]:
        """Implements Student."""
        first_BWH = self.module(states.ids_BW)
        return [shifted(first_BWH, place) for place in range(places)]

    def logits(self, hidden_NH: torch.Tensor, place: int) -> torch.Tensor:
        """Implements Student."""
        return functional.linear(hidden_NH, self._llama.table.weight)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Implements Student."""
        found = {f"{STEMS[Role.EMBEDDING]}.weight": self._llama.table.weight.detach()}
        for number, layer in enumerate(self._llama.layers):
            found |= layer.tensors(LAYER.format(layer=number))
        return {**found, f"{STEMS[Role.FINAL_NORM]}.weight": self._llama.norm.weight.detach()}

    def config(self) -> Mapping[str, Any]:
        """Implements Student."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **llama_keys(self.shape, self._spec),
            "num_hidden_layers": self._layers,
            "tie_word_embeddings": True,
        }


def llama_keys(shape: LayerShape, spec: ArchSpec) -> dict[str, Any]:
    """Returns the keys of config.json that both a draft and a head of one Llama layer have."""
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "bos_token_id": None,
        "eos_token_id": list(spec.eos_token_ids) or None,
    }
