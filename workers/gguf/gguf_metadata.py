"""Metadata: the keys of a GGUF file about its architecture, all of which are read or refused by name. Torch-free."""

from collections.abc import Mapping
from typing import Any, Final

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.gguf.gguf_rows import GgufRow

READ: Final = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "vocab_size", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.yarn_log_multiplier",
    "rope.scaling.attn_factor", "attention.sliding_window", "attention.sliding_window_pattern",
    "attn_logit_softcapping", "final_logit_softcapping", "rope.freq_base_swa", "attention.causal",
)  # fmt: skip
"""Keys behind the architecture's name that are read or change nothing."""


class Metadata:
    """The keys of one architecture."""

    def __init__(self, name: str, metadata: Mapping[str, Any], row: GgufRow) -> None:
        self.name = name
        read = (*READ, *row.numbers.values())
        self._given = {
            key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")
        }
        for key, value in self._given.items():
            if key not in read and value not in (0, False, None, "", []):
                raise UnsupportedModelError(f"GGUF: {name}.{key} is {value!r}, which is not read", "MODEL")

    def get(self, key: str, default: Any = None) -> Any:
        return self._given.get(key, default)

    def whole(self, key: str, default: int | None = None) -> int:
        """Returns an integer, of a list one that all layers share."""
        value = self._given.get(key, default)
        found = set(value) if isinstance(value, list) else {value}
        if len(found) != 1 or not isinstance(one := found.pop(), int) or one < 1:
            raise UnsupportedModelError(
                f"GGUF: {self.name}.{key} is {value!r}, want a positive integer for all layers", "MODEL"
            )
        return one

    def real(self, key: str, default: float) -> float:
        """Returns a number of float32 as one would write it."""
        return float(f"{self._given.get(key, default):.7g}")

    def number(self, key: str) -> int | float:
        """Returns a number that must be there."""
        value = self._given.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedModelError(f"GGUF: {self.name}.{key} is {value!r}, want a number", "MODEL")
        return value if isinstance(value, int) else self.real(key, value)
