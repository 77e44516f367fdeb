"""config.json to ArchSpec, by the family's row.

`load_spec` is called by the launcher, the coordinator, the gateway and the ranks, so nothing here imports torch. Both
the classic keys (rope_theta, rope_scaling, torch_dtype) and those of transformers 5 (rope_parameters, dtype,
layer_types) are read. What the decoder cannot compute is refused by name, never ignored.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.configs.errors import SettingsError, UnsupportedModelError
from tandem.workers.models.spec.arch import (
    Activation,
    ArchSpec,
    AttentionParams,
    Gated,
    Gqa,
    LayerSpec,
    Learned,
    Moe,
    Norm,
    Plain,
    RopeSpec,
)
from tandem.workers.models.spec.families import Family, PositionKind, Window, family_of
from tandem.workers.models.spec.rope_config import context_length, rope_from_config

LLAMA_KEYS: Mapping[str, str] = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "mlp_width": "intermediate_size",
    "context": "max_position_embeddings",
    "activation": "hidden_act",
    "norm_eps": "rms_norm_eps",
}
"""The keys of what every family has; a family's `keys` replace some."""
# Keys of other families or of other uses that would change what is computed: accepted only with these values.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1.0),
    "is_encoder_decoder": (None, False),
    "is_causal": (None, True),  # of encoders made of decoders, each token sees all others
    "use_bidirectional_attention": (None, False),
}


SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
ACTIVATIONS: Mapping[str, str] = {"gelu_new": "gelu_pytorch_tanh"}
"""Other spellings of activations."""


def load_spec(folder: str | Path, overrides: Mapping[str, Any] | None = None) -> ArchSpec:
    """Reads folder/config.json, with `overrides` (--hf-overrides) replacing its keys.

    Raises SettingsError without a readable config.json, UnsupportedModelError for values that the decoder does not
    support.
    """
    file = Path(folder) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {file}: {error.strerror}", "MODEL") from error
    except ValueError as error:
        raise SettingsError(f"{file} is not JSON: {error}", "MODEL") from error
    if not isinstance(config, dict):
        raise SettingsError(f"{file} is not a JSON object", "MODEL")
    return spec_from_config({**config, **(overrides or {})}, overridden=frozenset(overrides or ()))


def spec_from_config(config: Mapping[str, Any], overridden: frozenset[str] = frozenset()) -> ArchSpec:
    """Returns the ArchSpec of config.json's keys. `overridden`: keys that the user gave, which win over their
    aliases."""
    architectures = config.get("architectures") or []
    if len(architectures) != 1:
        raise UnsupportedModelError(f"config.json: architectures is {architectures!r}, want exactly one name", "MODEL")
    family = family_of(architectures[0])
    reader = _Reader(config, family)
    reader.check_neutral()
    num_layers, hidden_size = reader.positive("num_layers"), reader.positive("hidden_size")
    positions = reader.positive("context")
    rope: RopeSpec | None = None
    if family.positions is PositionKind.ROTARY:
        rope = rope_from_config(config, reader.get("rope_theta", 10000.0), positions, overridden)
    return ArchSpec(
        architecture=family.architecture,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=_layers(reader, family, num_layers, hidden_size, rope),
        max_position_embeddings=positions if rope is None else context_length(rope, positions),
        final_norm=_norm(reader, family),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", False)),
        torch_dtype=_dtype(config, overridden),
        bos_token_id=reader.get("bos_token_id", None),
        eos_token_ids=_ids(reader.get("eos_token_id", None)),
        positions=Learned(positions) if family.positions is PositionKind.LEARNED else None,
        embedding_norm=_norm(reader, family) if family.embedding_norm else None,
        embedding_scale=hidden_size**0.5 if family.scales_embeddings else 1.0,
        final_softcap=reader.softcap("final_logit_softcapping") if family.softcaps else None,
    )


def _layers(
    reader: "_Reader", family: Family, num_layers: int, hidden_size: int, rope: RopeSpec | None
) -> tuple[LayerSpec, ...]:
    attention = _attention(reader, family, hidden_size)
    rotary, windows = _rotary_layers(reader, family, num_layers), _windows(reader, family, num_layers)
    of_scores = attention.head_dim if family.score_scale is None else reader.get(family.score_scale, None)
    slopes = alibi_slopes(attention.num_heads) if family.positions is PositionKind.ALIBI else None
    softcap = reader.softcap("attn_logit_softcapping") if family.softcaps else None
    mlp = _mlp(reader, family, hidden_size)
    return tuple(
        LayerSpec(
            attention=attention,
            params=AttentionParams(of_scores**-0.5, window, softcap, slopes),
            position=rope if rotates else None,
            norm=_norm(reader, family),
            mlp=mlp,
            place=family.place,
        )
        for rotates, window in zip(rotary, windows, strict=True)
    )


def _attention(reader: "_Reader", family: Family, hidden_size: int) -> Gqa:
    num_heads = reader.positive("num_heads")
    num_kv_heads = reader.positive("num_kv_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}", "MODEL"
        )
    return Gqa(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=reader.positive("head_dim", hidden_size // num_heads),
        qkv_bias=reader.flag(family.qkv_bias),
        o_bias=reader.flag(family.o_bias),
        qk_norm=family.qk_norm,
    )


def _mlp(reader: "_Reader", family: Family, hidden_size: int) -> Gated | Plain | Moe:
    width = reader.positive("mlp_width", None if family.gated else 4 * hidden_size)
    activation, bias = reader.activation(), reader.flag(family.mlp_bias)
    if family.moe is None:
        return (Gated if family.gated else Plain)(width, activation, bias)
    num_experts, top_k = reader.positive(family.moe.num_experts), reader.positive(family.moe.top_k)
    if top_k > num_experts:
        raise UnsupportedModelError(f"config.json: {family.moe.top_k} {top_k} of {num_experts} experts", "MODEL")
    return Moe(num_experts, top_k, width, activation)


def _norm(reader: "_Reader", family: Family) -> Norm:
    return Norm(float(reader.get(reader.key("norm_eps"), 1e-6)), family.norm, family.norms_store_offset)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Returns ALiBi's slope of each head (Press et al. 2021): powers of 2 ** (-8 / n) for n heads, n the greatest power
    of two in num_heads; then every other one of those for 2 n heads."""
    n = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    more = [2 ** (-4 * (2 * i + 1) / n) for i in range(num_heads - n)]
    return (*slopes, *more)


class _Reader:
    """Reads config.json by a family's row, and makes the errors for invalid values."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        self._config = config
        self._family = family

    def key(self, what: str) -> str:
        """Returns config.json's key of one of LLAMA_KEYS; other keys are called the same everywhere."""
        return self._family.keys.get(what) or LLAMA_KEYS.get(what, what)

    def get(self, key: str, default: Any) -> Any:
        """A key's value. An absent key means the family's default, if it has one; null means `default`."""
        if key in self._config:
            return default if self._config[key] is None else self._config[key]
        return self._family.defaults.get(key, default)

    def check_neutral(self) -> None:
        """UnsupportedModelError for a key that would change what is computed, but for the family's own."""
        own = SOFTCAPS if self._family.softcaps else ()
        for key, neutral in {**NEUTRAL_VALUES, **self._family.neutral}.items():
            if key not in own and self._config.get(key) not in neutral:
                raise self.unsupported(key, self._config[key])

    def positive(self, what: str, default: int | None = None) -> int:
        key = self.key(what)
        value = self.get(key, default)
        if value is None:
            raise UnsupportedModelError(f"config.json has no {key}", "MODEL")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModelError(f"config.json: {key} is {value!r}, want a positive integer", "MODEL")
        return value

    def softcap(self, key: str) -> float | None:
        value = self.get(key, None)
        return None if value is None else float(value)

    def flag(self, rule: bool | str) -> bool:
        return bool(self.get(rule, False)) if isinstance(rule, str) else rule

    def activation(self) -> Activation:
        key = self.key("activation")
        value = self.get(key, "silu")
        try:
            return Activation(ACTIVATIONS.get(value, value))
        except ValueError:
            raise self.unsupported(key, value, tuple(Activation)) from None

    def unsupported(self, key: str, value: Any, supported: tuple[str, ...] = ()) -> UnsupportedModelError:
        words = f"; supported: {', '.join(supported)}" if supported else ""
        return UnsupportedModelError(f"config.json: {key} {value!r} is not supported{words}", "MODEL")


def _rotary_layers(reader: _Reader, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Returns whether each layer rotates: where `no_rope_layers` is 1 (sic); else all but each `interval`-th."""
    if not family.has_no_rope_layers:
        return (True,) * num_layers
    given = reader.get("no_rope_layers", None)
    if given is None:
        interval = reader.positive("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(given) < num_layers:
        raise UnsupportedModelError(f"config.json: no_rope_layers names {len(given)} of {num_layers} layers", "MODEL")
    return tuple(bool(rotates) for rotates in given[:num_layers])


def _windows(reader: _Reader, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, None where attention is full."""
    used = family.window in (Window.ALWAYS, Window.ALTERNATING) or (
        family.window is Window.IF_USED and bool(reader.get("use_sliding_window", False))
    )
    window = reader.get("sliding_window", None)
    if not used or window is None:
        return (None,) * num_layers
    layer_types = reader.get("layer_types", None)
    if family.window is Window.ALWAYS and layer_types is None:
        return (window,) * num_layers
    if family.window is Window.ALTERNATING and layer_types is None:
        return tuple(None if layer % 2 else window for layer in range(num_layers))
    if layer_types is None and family.has_no_rope_layers:
        rotary = _rotary_layers(reader, family, num_layers)
        return tuple(None if rotates else window for rotates in rotary)
    if layer_types is None:
        first = reader.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    by_type = {"full_attention": None, "sliding_attention": window}
    unknown = [kind for kind in layer_types if kind not in by_type]
    if unknown or len(layer_types) != num_layers:
        raise reader.unsupported("layer_types", unknown[0] if unknown else layer_types, tuple(by_type))
    return tuple(by_type[kind] for kind in layer_types)


def _dtype(config: Mapping[str, Any], overridden: frozenset[str]) -> str | None:
    """`dtype` or `torch_dtype`, whichever the user gave, else the newer spelling."""
    keys = sorted(("dtype", "torch_dtype"), key=lambda key: key not in overridden)
    value = next((config[key] for key in keys if config.get(key)), None)
    return None if value in (None, "auto") else str(value).removeprefix("torch.")


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
