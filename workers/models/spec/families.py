"""Model families as rows of data, and config.json to ArchSpec.

`load_spec` is called by the launcher, the coordinator, the gateway and the ranks, so nothing here imports torch. Both
the classic keys (rope_theta, rope_scaling, torch_dtype) and those of transformers 5 (rope_parameters, dtype,
layer_types) are read. What the decoder cannot compute is refused by name, never ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tandem.configs.errors import SettingsError, UnsupportedModelError
from tandem.workers.models.spec.arch import Activation, ArchSpec, AttentionParams, Gated, Gqa, LayerSpec, Norm
from tandem.workers.models.spec.parameters import ParameterNames, ParameterTable, parameters
from tandem.workers.models.spec.rope_config import context_length, rope_from_config


class Window(Enum):
    """The condition under which a family's `sliding_window` applies."""

    NEVER = "never"
    ALWAYS = "always"
    IF_USED = "if_used"  # with `use_sliding_window`, on the layers that `layer_types` or `max_window_layers` name


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. A bias is True, False, or the config key that sets it. defaults: the values of absent keys."""

    architecture: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: Window = Window.NEVER
    has_no_rope_layers: bool = False
    names: ParameterNames = field(default_factory=ParameterNames)
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: tuple[Family, ...] = (
    Family(
        "LlamaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    ),
    Family(
        "MistralForCausalLM",
        window=Window.ALWAYS,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Family(
        "Qwen2ForCausalLM",
        qkv_bias=True,
        window=Window.IF_USED,
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096},
    ),
    Family(
        "Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window=Window.IF_USED,
        defaults={"max_position_embeddings": 32768, "head_dim": 128, "sliding_window": 4096},
    ),
    Family(
        "SmolLM3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        window=Window.IF_USED,
        has_no_rope_layers=True,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
    ),
)

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


def supported_architectures() -> tuple[str, ...]:
    return tuple(family.architecture for family in FAMILIES)


def family_of(architecture: str) -> Family:
    """The row of an architecture. Raises UnsupportedModelError with the supported list."""
    for family in FAMILIES:
        if family.architecture == architecture:
            return family
    raise UnsupportedModelError(
        f"architecture {architecture!r} is not supported; supported: {', '.join(supported_architectures())}", "MODEL"
    )


def parameters_of(spec: ArchSpec) -> ParameterTable:
    """Returns the table of a model's parameters, under its family's names."""
    return parameters(spec, family_of(spec.architecture).names)


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
    reader = _Reader(config, family.defaults)
    for key, neutral in NEUTRAL_VALUES.items():
        if config.get(key) not in neutral:
            raise reader.unsupported(key, config[key])
    num_layers, num_heads = reader.positive("num_hidden_layers"), reader.positive("num_attention_heads")
    hidden_size = reader.positive("hidden_size")
    num_kv_heads = reader.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}", "MODEL"
        )
    head_dim = reader.positive("head_dim", hidden_size // num_heads)
    positions = reader.positive("max_position_embeddings")
    rope = rope_from_config(config, reader.get("rope_theta", 10000.0), positions, overridden)
    norm = Norm(float(reader.get("rms_norm_eps", 1e-6)))
    attention = Gqa(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv_bias=reader.flag(family.qkv_bias),
        o_bias=reader.flag(family.o_bias),
        qk_norm=family.qk_norm,
    )
    mlp = Gated(reader.positive("intermediate_size"), reader.activation(), reader.flag(family.mlp_bias))
    rotary, windows = _rotary_layers(reader, family, num_layers), _windows(reader, family, num_layers)
    layers = tuple(
        LayerSpec(
            attention=attention,
            params=AttentionParams(head_dim**-0.5, window),
            position=rope if rotates else None,
            norm=norm,
            mlp=mlp,
        )
        for rotates, window in zip(rotary, windows, strict=True)
    )
    return ArchSpec(
        architecture=family.architecture,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=layers,
        max_position_embeddings=context_length(rope, positions),
        final_norm=norm,
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", False)),
        torch_dtype=_dtype(config, overridden),
        bos_token_id=reader.get("bos_token_id", None),
        eos_token_ids=_ids(reader.get("eos_token_id", None)),
    )


class _Reader:
    """Reads config.json with a family's defaults, and makes the errors for invalid values."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._config = config
        self._defaults = defaults

    def get(self, key: str, default: Any) -> Any:
        """A key's value. An absent key means the family's default, if it has one; null means `default`."""
        if key in self._config:
            return default if self._config[key] is None else self._config[key]
        return self._defaults.get(key, default)

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise UnsupportedModelError(f"config.json has no {key}", "MODEL")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModelError(f"config.json: {key} is {value!r}, want a positive integer", "MODEL")
        return value

    def flag(self, rule: bool | str) -> bool:
        return bool(self.get(rule, False)) if isinstance(rule, str) else rule

    def activation(self) -> Activation:
        value = self.get("hidden_act", "silu")
        try:
            return Activation(value)
        except ValueError:
            raise self.unsupported("hidden_act", value, tuple(Activation)) from None

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
    used = family.window is Window.ALWAYS or (
        family.window is Window.IF_USED and bool(reader.get("use_sliding_window", False))
    )
    window = reader.get("sliding_window", None)
    if not used or window is None:
        return (None,) * num_layers
    layer_types = reader.get("layer_types", None)
    if family.window is Window.ALWAYS and layer_types is None:
        return (window,) * num_layers
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
