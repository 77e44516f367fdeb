"""Parses a LoRA adapter's adapter_config.json in PEFT's format; refuses unsupported fields by name. Torch-free.

Used by workers/lora/peft/peft_folder.py. Fields by which an adapter computes something else are refused unless they are
empty (null, false, "", [], {}), as are unknown ones that may be such switches; other unknown ones, of tools that write
their own settings there, are not read, which LoraConfig.unread says. An adapter of any task is taken: its tensors
decide. Regular expressions from files are never run: patterns are names, as PEFT itself writes them.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tandem.workers.messages.errors import AdapterRefused

CONFIG_FILE: Final = "adapter_config.json"
MOST_CONFIG_BYTES: Final = 2**20
REQUIRED: Final[Mapping[str, Any]] = {"peft_type": "LORA", "bias": "none"}
"""Fields that must have this value if they are present; peft_type must be present."""
NO_EFFECT: Final = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",  # how the base stores its weights, which the base knows
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
        "velora_config",
    }
)
"""Fields about training or bookkeeping, which do not change what the weights compute."""
READ: Final = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
CHANGES: Final[Mapping[str, str]] = {
    "alora_invocation_tokens": "activated LoRA, which is in force behind certain tokens only",
    "arrow_config": "routing between adapters (Arrow)",
    "ensure_weight_tying": "weights that embedding and head share",
    "kasa_config": "KaSA",
    "layer_replication": "layers that are there several times",
    "lora_bias": "a bias of B",
    "modules_to_save": "whole modules beside the low-rank ones",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "parameters that are no layers, such as those of experts",
    "trainable_token_indices": "trained rows of the embedding",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
}
"""Fields by which an adapter computes something else, and what that is."""
SWITCH: Final = re.compile(r"use_.*|.*_config")
"""Names of fields of PEFT that switch on another computation."""
EMPTY: Final[tuple[Any, ...]] = (None, False, "", [], {})
HARMLESS_INITS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model's weights unchanged."""
PATTERN: Final = re.compile(r"\^?(?:\.\*)?(?:[A-Za-z0-9_]|\\?\.)+")
LAYER: Final = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Fields that decide what an adapter computes."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]  # by module; the first match is used
    alpha_pattern: Mapping[str, float]  # likewise
    rslora: bool
    # suffixes of the names of modules that must have weights; None: a regular expression gives the modules
    targets: tuple[str, ...] | None
    excluded: tuple[str, ...]  # no targets
    layers: frozenset[int] | None  # outside of them there are no targets; None: all layers
    base_model: str | None  # its name, not checked
    unread: tuple[str, ...] = ()  # unknown fields, which are not empty

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module."""
        return next((rank for key, rank in self.rank_pattern.items() if matches(key, module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Returns alpha / r, or alpha / sqrt(r) with rank-stabilized LoRA (Kalajdzievski 2023)."""
        alpha = next((a for key, a in self.alpha_pattern.items() if matches(key, module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def is_target(self, module: str) -> bool | None:
        """Returns whether the adapter must have weights for the module; None: it may."""
        if self.targets is None:
            return None
        if any(_ends_with(module, name) for name in self.excluded):
            return False
        if self.layers is not None and module not in self.targets:
            layer = LAYER.search(module)
            if layer is None or int(layer[1]) not in self.layers:
                return False
        return any(_ends_with(module, name) for name in self.targets)

    def canonical(self) -> bytes:
        """Returns bytes that are equal for configs that compute the same with equal weights; part of the digest."""
        fields = (self.rank, self.alpha, dict(self.rank_pattern), dict(self.alpha_pattern), self.rslora)
        return json.dumps(fields).encode()


def parse_config(data: bytes) -> LoraConfig:
    """Parses a configuration; AdapterRefused for anything but a LoRA that is computed here as in PEFT."""
    fields = parse_json(data, CONFIG_FILE)
    _refuse_unsupported(fields)
    base, rslora = fields.get("base_model_name_or_path") or None, fields.get("use_rslora") or False
    if not isinstance(base, str | None) or not isinstance(rslora, bool):
        raise AdapterRefused(f"{CONFIG_FILE}: base_model_name_or_path or use_rslora is of the wrong type")
    modules, excluded = fields.get("target_modules"), fields.get("exclude_modules")
    evident = isinstance(modules, list) and not isinstance(excluded, str) and not fields.get("layers_pattern")
    return LoraConfig(
        rank=_rank(fields.get("r", 8), "r"),
        alpha=_number(fields.get("lora_alpha", 8), "lora_alpha"),
        rank_pattern={_pattern(k): _rank(v, f"rank_pattern {k}") for k, v in _pairs(fields, "rank_pattern")},
        alpha_pattern={_pattern(k): _number(v, f"alpha_pattern {k}") for k, v in _pairs(fields, "alpha_pattern")},
        rslora=rslora,
        targets=_names(modules, "target_modules") if evident else None,
        excluded=_names(excluded or [], "exclude_modules") if evident else (),
        layers=_layers(fields.get("layers_to_transform")),
        base_model=base,
        unread=tuple(sorted(name for name, value in fields.items() if not _is_known(name) and value not in EMPTY)),
    )


def matches(pattern: str, module: str) -> bool:
    """Returns whether a key of rank_pattern matches, as in PEFT: the whole name, or without ^ its end after a dot."""
    text = pattern.removeprefix("^")
    if text.startswith(".*"):
        return module.endswith(text.removeprefix(".*").replace("\\.", "."))
    text = text.replace("\\.", ".")
    return module == text if pattern.startswith("^") else _ends_with(module, text)


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object; AdapterRefused for duplicate keys, NaN and infinities."""
    try:
        fields = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"{what} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterRefused(f"{what} is not a JSON object")
    return fields


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if "peft_type" not in fields:
        raise AdapterRefused(f"{CONFIG_FILE} names no peft_type")
    for name, wanted in REQUIRED.items():
        if fields.get(name, wanted) != wanted:
            raise AdapterRefused(f"{CONFIG_FILE}: {name} {fields[name]!r} is not supported, only {wanted!r}")
    start = fields.get("init_lora_weights")
    if not isinstance(start, bool | str | None) or start not in HARMLESS_INITS:
        raise AdapterRefused(f"{CONFIG_FILE}: init_lora_weights {start!r} changes the base model: not supported")
    for name, value in fields.items():
        if value in EMPTY:
            continue
        if name in CHANGES:
            raise AdapterRefused(f"{CONFIG_FILE}: {name}: not supported: {CHANGES[name]}")
        if not _is_known(name) and SWITCH.fullmatch(name):
            raise AdapterRefused(f"{CONFIG_FILE}: {name} is not known: it may change what the adapter computes")


def _is_known(name: str) -> bool:
    return name in READ or name in NO_EFFECT or name in CHANGES


def _rank(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterRefused(f"{CONFIG_FILE}: {name} is {value!r}, not a whole number above 0")
    return value


def _number(value: Any, name: str) -> float:
    try:
        number = float("nan") if isinstance(value, bool | str) else float(value)
    except (TypeError, OverflowError):
        number = float("nan")
    if not math.isfinite(number):
        raise AdapterRefused(f"{CONFIG_FILE}: {name} is {value!r}, not a finite number")
    return number


def _pairs(fields: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise AdapterRefused(f"{CONFIG_FILE}: {name} is not an object")
    return list(value.items())


def _pattern(key: str) -> str:
    if not PATTERN.fullmatch(key):
        raise AdapterRefused(f"{CONFIG_FILE}: the pattern {key!r} is not a module's name: not supported")
    return key


def _names(value: Any, field: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise AdapterRefused(f"{CONFIG_FILE}: {field} is not a list of names")
    return tuple(value)


def _layers(value: Any) -> frozenset[int] | None:
    numbers = [value] if isinstance(value, int) else value or []
    if not isinstance(numbers, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise AdapterRefused(f"{CONFIG_FILE}: layers_to_transform is not a list of layers")
    return frozenset(numbers) or None


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key is there twice")
    return fields


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")
