"""The object of --speculative-config: which of its keys is wrong, and why. Called by load.py.

The keys are vLLM's. Those that only a draft model has are refused by name, as there is none yet.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.configs.errors import SettingsError
from tandem.configs.options import DRAFT_METHODS, MAX_DRAFTS
from tandem.configs.schema import SpeculativeSettings

FLAG = "--speculative-config"
COMMON_KEYS = ("method", "num_speculative_tokens")
DRAFT_MODEL_KEYS = ("model", "draft_tensor_parallel_size")


def draft_settings(value: Any) -> SpeculativeSettings:
    """Converts the object and checks it. SettingsError names the key at fault, its value and what it may be."""
    if isinstance(value, Mapping):
        _check_keys(value)
    try:
        settings = msgspec.convert(value, SpeculativeSettings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{value!r}: {str(error)[0].lower()}{str(error)[1:]}", FLAG) from error
    _check_ranges(settings)
    return settings


def _check_keys(given: Mapping[str, Any]) -> None:
    """Checks the method and the keys' names."""
    method = given.get("method")
    if isinstance(method, str) and method not in DRAFT_METHODS:
        raise SettingsError(f"method {method!r}: one of {', '.join(DRAFT_METHODS)}", FLAG)
    for key, value in given.items():
        if key in DRAFT_MODEL_KEYS:
            raise SettingsError(f"{key} {value!r}: draft models are not supported yet; method ngram needs none", FLAG)
        if key not in SpeculativeSettings.__struct_fields__:
            known = ", ".join(SpeculativeSettings.__struct_fields__)
            raise SettingsError(f"{key} {value!r}: not a key; known are {known}", FLAG)
        own = (*COMMON_KEYS, *DRAFT_METHODS.get(str(method), SpeculativeSettings.__struct_fields__))
        if value is not None and key not in own:
            raise SettingsError(f"{key} {value!r}: not a key of method {method!r}", FLAG)


def _check_ranges(settings: SpeculativeSettings) -> None:
    if not 1 <= (count := settings.num_speculative_tokens) <= MAX_DRAFTS:
        raise SettingsError(f"num_speculative_tokens {count}: from 1 to {MAX_DRAFTS}", FLAG)
    for key in ("prompt_lookup_max", "prompt_lookup_min"):
        length = getattr(settings, key)
        if length is not None and length < 1:
            raise SettingsError(f"{key} {length}: at least 1", FLAG)
    fewest, most = settings.lookup_range
    if fewest > most:
        raise SettingsError(f"prompt_lookup_min {fewest}: at most prompt_lookup_max {most}", FLAG)
