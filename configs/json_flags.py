"""Flags whose values are JSON objects with vLLM's keys: which key is wrong, and why. Called by load.py.

--lora-modules: an adapter is name=path, or JSON with the keys name and path. Several may follow one flag; all become
name=path, which is what AdapterSettings holds. --speculative-config: each method has keys of its own.
"""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from tandem.configs.errors import SettingsError
from tandem.configs.options import DRAFT_METHODS, MAX_DRAFTS
from tandem.configs.schema import SpeculativeSettings

LORA_MODULES = "--lora-modules"
MODULE_KEYS = ("name", "path", "base_model_name")
SPECULATIVE_CONFIG = "--speculative-config"
COMMON_KEYS = ("method", "num_speculative_tokens")
DRAFT_MODEL, OWN_LAYERS = "draft_model", "mtp"
SUFFIX_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "suffix_decoding_max_tree_depth": (lambda depth: 2 <= depth <= 256, "from 2 to 256"),
    "suffix_decoding_max_cached_requests": (lambda count: 0 <= count <= 1_000_000, "from 0 to 1000000"),
    "suffix_decoding_max_spec_factor": (lambda factor: 0 < factor <= MAX_DRAFTS, f"above 0, up to {MAX_DRAFTS}"),
    "suffix_decoding_min_token_prob": (lambda share: 0 <= share <= 1, "from 0 to 1"),
}


def looks_like_module(word: str) -> bool:
    """Returns whether a word of a command line is an adapter: name=path, or a JSON object."""
    return word.startswith("{") or ("=" in word and not word.startswith("-"))


def served_names(model: str, values: Mapping[str, Any]) -> Collection[str]:
    """Returns the names that `model` is served under, by the settings `values`, of which nothing is checked yet."""
    given = values.get("served_model_name") or values.get("served-model-name") or [model]
    return [given] if isinstance(given, str) else [name for name in given if isinstance(name, str)]


def module_text(item: Any, served: Collection[str]) -> Any:
    """Returns name=path of an adapter that is a mapping or a JSON object; name=path and what is no text, as it is.
    SettingsError for another text, for JSON that cannot be read, for an unknown or missing key, and for a
    base_model_name that is none of the `served` names."""
    if isinstance(item, str) and item.lstrip().startswith("{"):
        try:
            item = json.loads(item)
        except ValueError as error:
            raise SettingsError(f"{item!r} is not JSON: {error}", LORA_MODULES) from error
    if isinstance(item, str) and "=" not in item.strip("="):
        raise SettingsError(f"{item!r} must be name=path", LORA_MODULES)
    if not isinstance(item, Mapping):
        return item
    if unknown := [key for key in item if key not in MODULE_KEYS]:
        raise SettingsError(f"{dict(item)!r}: {unknown[0]} is not a key; known are name and path", LORA_MODULES)
    if (base := item.get("base_model_name")) is not None and base not in served:
        raise SettingsError(f"{dict(item)!r}: base_model_name: remove it or give {' or '.join(served)}", LORA_MODULES)
    for key in ("name", "path"):
        if not isinstance(item.get(key), str) or not item[key]:
            raise SettingsError(f"{dict(item)!r}: {key} must be a text", LORA_MODULES)
    if "=" in item["name"]:
        raise SettingsError(f"{item['name']!r} must be a name without =", LORA_MODULES)
    return f"{item['name']}={item['path']}"


def draft_settings(value: Any) -> SpeculativeSettings:
    """Converts the object and checks it; a model without a method is a draft model, as in vLLM. SettingsError names
    the key at fault, its value and what it may be."""
    if isinstance(value, Mapping):
        if value.get("method") is None and value.get("model") is not None:
            value = {**value, "method": DRAFT_MODEL}
        if value.get("method") == "deepseek_mtp":  # vLLM's older name
            value = {**value, "method": OWN_LAYERS}
        _check_keys(value)
    try:
        settings = msgspec.convert(value, SpeculativeSettings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{value!r}: {str(error)[0].lower()}{str(error)[1:]}", SPECULATIVE_CONFIG) from error
    _check_ranges(settings)
    return settings


def _check_keys(given: Mapping[str, Any]) -> None:
    """Checks the method and the keys' names."""
    method = given.get("method")
    if isinstance(method, str) and method not in DRAFT_METHODS:
        raise SettingsError(f"method {method!r}: one of {', '.join(DRAFT_METHODS)}", SPECULATIVE_CONFIG)
    for key, value in given.items():
        if key not in SpeculativeSettings.__struct_fields__:
            known = ", ".join(SpeculativeSettings.__struct_fields__)
            raise SettingsError(f"{key} {value!r}: not a key; known are {known}", SPECULATIVE_CONFIG)
        own = (*COMMON_KEYS, *DRAFT_METHODS.get(str(method), SpeculativeSettings.__struct_fields__))
        if value is not None and key not in own:
            raise SettingsError(f"{key} {value!r}: not a key of method {method!r}", SPECULATIVE_CONFIG)


def _check_ranges(settings: SpeculativeSettings) -> None:
    if not 1 <= (count := settings.num_speculative_tokens) <= MAX_DRAFTS:
        raise SettingsError(f"num_speculative_tokens {count}: from 1 to {MAX_DRAFTS}", SPECULATIVE_CONFIG)
    if "model" in DRAFT_METHODS[settings.method] and not settings.model:
        raise SettingsError(f"method {settings.method!r} needs the key model, a folder or a hub id", SPECULATIVE_CONFIG)
    if (ranks := settings.draft_tensor_parallel_size) not in (None, 1):
        words = f"draft_tensor_parallel_size {ranks}: the draft runs whole on the first rank of the group: 1"
        raise SettingsError(words, SPECULATIVE_CONFIG)
    for key in ("prompt_lookup_max", "prompt_lookup_min"):
        length = getattr(settings, key)
        if length is not None and length < 1:
            raise SettingsError(f"{key} {length}: at least 1", SPECULATIVE_CONFIG)
    for key, (is_in, words) in SUFFIX_RANGES.items():
        limit = getattr(settings, key)
        if limit is not None and not is_in(limit):
            raise SettingsError(f"{key} {limit}: {words}", SPECULATIVE_CONFIG)
    fewest, most = settings.lookup_range
    if fewest > most:
        raise SettingsError(f"prompt_lookup_min {fewest}: at most prompt_lookup_max {most}", SPECULATIVE_CONFIG)
