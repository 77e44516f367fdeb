"""The two ways to write an adapter of --lora-modules, as in vLLM: name=path, and JSON with the keys name and path.

Several may follow one flag. Both become name=path, which is what AdapterSettings holds.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from tandem.configs.errors import SettingsError

FLAG = "--lora-modules"
KEYS = ("name", "path", "base_model_name")


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
            raise SettingsError(f"{item!r} is not JSON: {error}", FLAG) from error
    if isinstance(item, str) and "=" not in item.strip("="):
        raise SettingsError(f"{item!r} must be name=path", FLAG)
    if not isinstance(item, Mapping):
        return item
    if unknown := [key for key in item if key not in KEYS]:
        raise SettingsError(f"{dict(item)!r}: {unknown[0]} is not a key; known are name and path", FLAG)
    if (base := item.get("base_model_name")) is not None and base not in served:
        raise SettingsError(f"{dict(item)!r}: base_model_name: remove it or give {' or '.join(served)}", FLAG)
    for key in ("name", "path"):
        if not isinstance(item.get(key), str) or not item[key]:
            raise SettingsError(f"{dict(item)!r}: {key} must be a text", FLAG)
    if "=" in item["name"]:
        raise SettingsError(f"{item['name']!r} must be a name without =", FLAG)
    return f"{item['name']}={item['path']}"
