"""Reads values of config.json by a family's row, and makes the errors for what is invalid. Torch-free."""

import math
import sys
from collections.abc import Mapping
from typing import Any, Final

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
LARGEST: Final = sys.float_info.max
MOST_WHOLE: Final = 2**53
"""Integers from there on are no sizes, and floats do not tell them apart."""
_ABSENT = object()


def wrong(key: str, value: Any, want: str) -> UnsupportedModelError:
    """Returns the error for a value that is not of its key's type."""
    return UnsupportedModelError(f"config.json: {key} is {value!r}, want {want}", "MODEL")


def number(key: str, value: Any, above: float = -math.inf) -> float:
    """Returns a finite number greater than `above`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -LARGEST <= value <= LARGEST or value <= above:
        raise wrong(key, value, "a number" if above == -math.inf else f"a number above {above:g}")
    return float(value)


def whole(key: str, value: Any, least: int = 1) -> int:
    """Returns an integer that is not less than `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < MOST_WHOLE:
        raise wrong(key, value, "a positive integer" if least == 1 else f"an integer from {least} on")
    return value


def flag(key: str, value: Any) -> bool:
    """Returns true or false; no other value counts as one of them."""
    if not isinstance(value, bool):
        raise wrong(key, value, "true or false")
    return value


def text(key: str, value: Any) -> str:
    """Returns a string."""
    if not isinstance(value, str):
        raise wrong(key, value, "a string")
    return value


def items(key: str, value: Any) -> list[Any]:
    """Returns a list."""
    if not isinstance(value, list | tuple):
        raise wrong(key, value, "a list")
    return list(value)


def entries(key: str, value: Any) -> Mapping[str, Any]:
    """Returns an object."""
    if not isinstance(value, Mapping):
        raise wrong(key, value, "an object")
    return value


class ConfigValues:
    """Reads config.json by a family's row, and makes the errors for invalid values. overridden: the keys that the user
    gave, which win over other spellings. asked: the keys that were asked for, whether they are there or not."""

    def __init__(self, config: Mapping[str, Any], family: Family, overridden: frozenset[str] = frozenset()) -> None:
        self._config = config
        self._family = family
        self._overridden = overridden
        self.asked: set[str] = set()

    def key(self, what: str) -> str:
        """Returns config.json's key of one of LLAMA_KEYS; other keys are called the same everywhere."""
        return self._family.keys.get(what) or LLAMA_KEYS.get(what, what)

    def get(self, key: str, default: Any) -> Any:
        """A key's value. An absent key means the family's default, if it has one; null means `default`."""
        found = [value for value in map(self._at, self._spellings(key)) if value is not _ABSENT]
        if not found:
            return self._family.defaults.get(key, default)
        return next((value for value in found if value is not None), default)

    def has(self, key: str) -> bool:
        """True if config.json itself has a value."""
        return self._at(self.spelled(key)) not in (_ABSENT, None)

    def overrides(self, key: str) -> bool:
        """True if the user gave the value."""
        return any(spelling.partition(".")[0] in self._overridden for spelling in self._spellings(key))

    def spelled(self, key: str) -> str:
        """Returns the spelling whose value counts."""
        spellings = self._spellings(key)
        return next((each for each in spellings if self._at(each) not in (_ABSENT, None)), key)

    def _spellings(self, key: str) -> tuple[str, ...]:
        """A key's spellings, those that win first."""
        spellings = (*self._family.also.get(key, ()), key)
        return tuple(sorted(spellings, key=lambda spelling: spelling not in self._overridden))

    def _at(self, spelling: str) -> Any:
        self.asked.add(spelling)
        holder, _, name = spelling.rpartition(".")
        values = entries(holder, self._config.get(holder) or {}) if holder else self._config
        return values.get(name, _ABSENT)

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
        return whole(self.spelled(key), value)

    def number(self, key: str, default: float, above: float = -math.inf) -> float:
        return number(self.spelled(key), self.get(key, default), above)

    def number_or_none(self, key: str | None, above: float = -math.inf) -> float | None:
        """The number at a key, None where it is null or the family has no such key."""
        value = None if key is None else self.get(key, None)
        return None if key is None or value is None else number(self.spelled(key), value, above)

    def items_or_none(self, key: str) -> list[Any] | None:
        value = self.get(key, None)
        return None if value is None else items(key, value)

    def holds(self, condition: Condition) -> bool:
        key, wanted = condition
        value = self.get(key, None)
        if value is not None and isinstance(wanted, bool):
            value = flag(key, value)
        elif value is not None and isinstance(wanted, int):
            value = whole(key, value)
        return bool(value == wanted)

    def flag(self, rule: bool | str) -> bool:
        return flag(rule, self.get(rule, False)) if isinstance(rule, str) else rule

    def activation(self) -> Activation:
        key = self.key("activation")
        value = text(key, self.get(key, "silu"))
        try:
            return Activation({**ACTIVATIONS, **self._family.activations}.get(value, value))
        except ValueError:
            raise self.unsupported(key, value, tuple(Activation)) from None

    def unsupported(self, key: str, value: Any, supported: tuple[str, ...] = ()) -> UnsupportedModelError:
        words = f"; supported: {', '.join(supported)}" if supported else ""
        return UnsupportedModelError(f"config.json: {key} {value!r} is not supported{words}", "MODEL")
