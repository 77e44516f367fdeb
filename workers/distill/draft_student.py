"""DraftStudent: a small Llama with the target's tokens, which guesses as a model by itself (Leviathan et al. 2023)."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from tandem.configs.errors import SettingsError
from tandem.workers.distill.distill_settings import DistillSettings
from tandem.workers.distill.student import Attention, LayerShape, Mlp, RMSNorm, begin, shifted
from tandem.workers.distill.target_model import AnswerStates
from tandem.workers.models.spec.arch import ArchSpec

EPS: Final = 1e-5
WIDTH: Final = 8
"""Hidden sizes that nobody has chosen are the target's by this, in whole heads, and two heads at least."""
MULTIPLE: Final = 32


def draft_shape(spec: ArchSpec, settings: DistillSettings) -> LayerShape:
    """Returns a draft's sizes: heads as large as the target's where they divide the hidden size, and as many query
    heads to a key. SettingsError, by flag, where heads do not divide it."""
    dim = spec.head_dim if spec.head_dim % 2 == 0 else 64
    hidden = settings.hidden or max(2, spec.hidden_size // WIDTH // dim) * dim
    heads = settings.heads or (hidden // dim if hidden % dim == 0 else None)
    if heads is None:
        words = f"{hidden} is no multiple of {dim}, the size of the target's heads; --heads names how many it has"
        raise SettingsError(words, "--hidden")
    if hidden % heads or (hidden // heads) % 2:
        raise SettingsError(f"{hidden} has no {heads} heads of an even size", "--hidden")
    attention = spec.layers[0].attention
    group = max(1, getattr(attention, "num_heads", 1) // max(1, spec.kv_heads))
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


class _Layer(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x_BWH: torch.Tensor) -> torch.Tensor:
        x_BWH = x_BWH + self.self_attn(self.input_layernorm(x_BWH))
        return x_BWH + self.mlp(self.post_attention_layernorm(x_BWH))


class _Llama(nn.Module):
    """A Llama whose parameters are named as in checkpoints, with one table for embedding and head."""

    def __init__(self, shape: LayerShape, layers: int, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, ids_BW: torch.Tensor) -> torch.Tensor:
        x_BWH = self.embed_tokens(ids_BW)
        for layer in self.layers:
            x_BWH = layer(x_BWH)
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
        self.module: nn.Module = _Llama(self.shape, settings.layers, spec.vocab_size)
        begin(self.module, generator)

    def hidden(self, states: AnswerStates, places: int) -> list[torch.Tensor]:
        """Implements Student."""
        first_BWH = self.module(states.ids_BW)
        return [shifted(first_BWH, place) for place in range(places)]

    def logits(self, hidden_NH: torch.Tensor, place: int) -> torch.Tensor:
        """Implements Student."""
        return functional.linear(hidden_NH, self.module.get_parameter("embed_tokens.weight"))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Implements Student."""
        return {f"model.{name}": tensor for name, tensor in self.module.state_dict().items()}

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
