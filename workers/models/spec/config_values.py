"""Reads values of config.json by a family's row, and makes the errors for what is invalid. Torch-free."""

from collections.abc import Mapping
from typing import Any

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.models.spec.arch import Activation
from tandem.workers.models.spec.family import Condition, Family

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


ACTIVATIONS: Mapping[str, str] = {
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "swish": "silu",
}
"""Other spellings of activations."""


class ConfigValues:
    """Reads config.json by a family's row, and makes the errors for invalid values."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        self._config = config
        self._family = family

    def key(self, what: str) -> str:
        """Returns config.json's key of one of LLAMA_KEYS; other keys are called the same everywhere."""
        return self._family.keys.get(what) or LLAMA_KEYS.get(what, what)

    def get(self, key: str, default: Any) -> Any:
        """A key's value. An absent key means the family's default, if it has one; null means `default`."""
        spelled = key if key in self._config else self._family.also.get(key, key)
        holder, _, name = spelled.rpartition(".")
        values = self._config if not holder else self._config.get(holder) or {}
        if name in values:
            return default if values[name] is None else values[name]
        return self._family.defaults.get(key, default)

    def check_neutral(self) -> None:
        """UnsupportedModelError for a key that would change what is computed, but for the family's own."""
        for key, neutral in {**NEUTRAL_VALUES, **self._family.neutral}.items():
            value = self.get(key, None)
            if key not in self._family.own_keys and value not in neutral:
                raise self.unsupported(key, value)
        for key, other in self._family.equal.items():
            value = self.get(key, None)
            if value is not None and value != self.get(other, None):
                raise self.unsupported(f"{key} beside {other} {self.get(other, None)!r}:", value)

    def positive(self, what: str, default: int | None = None) -> int:
        key = self.key(what)
        value = self.get(key, default)
        if value is None:
            raise UnsupportedModelError(f"config.json has no {key}", "MODEL")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModelError(f"config.json: {key} is {value!r}, want a positive integer", "MODEL")
        return value

    def number(self, key: str | None) -> float | None:
        """The number at a key, None where it is null or the family has no such key."""
        value = None if key is None else self.get(key, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UnsupportedModelError(f"config.json: {key} is {value!r}, want a number", "MODEL")
        return None if value is None else float(value)

    def holds(self, condition: Condition) -> bool:
        key, value = condition
        return bool(self.get(key, None) == value)

    def flag(self, rule: bool | str) -> bool:
        return bool(self.get(rule, False)) if isinstance(rule, str) else rule

    def activation(self) -> Activation:
        key = self.key("activation")
        value = self.get(key, "silu")
        try:
            return Activation({**ACTIVATIONS, **self._family.activations}.get(value, value))
        except ValueError:
            raise self.unsupported(key, value, tuple(Activation)) from None

    def unsupported(self, key: str, value: Any, supported: tuple[str, ...] = ()) -> UnsupportedModelError:
        words = f"; supported: {', '.join(supported)}" if supported else ""
        return UnsupportedModelError(f"config.json: {key} {value!r} is not supported{words}", "MODEL")
