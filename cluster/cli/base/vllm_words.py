"""Words of a command line as people write them for vLLM, turned into those that typer reads.

    --served-model-name a b    --max_model_len 4k    --enable-prefix-caching=true    --model M    -O.mode 3

Called by GroupedHelp for verbs that take the settings of a service. It checks no values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tandem.configs.errors import SettingsError
from tandem.configs.lora_modules import FLAG as LORA_MODULES
from tandem.configs.lora_modules import looks_like_module

MODEL = "--model"
"""vLLM's flag for what is the argument MODEL here."""


def _is_no_flag(word: str) -> bool:
    return not word.startswith("-")


SEVERAL: Mapping[str, Callable[[str], bool]] = {
    LORA_MODULES: looks_like_module,
    "--served-model-name": _is_no_flag,
    "--api-key": _is_no_flag,
    "--cuda-graph-sizes": str.isdigit,
    "--cudagraph-capture-sizes": str.isdigit,
}
"""Flags that several values may follow, and which words are such values, beyond the first."""


class _Item(NamedTuple):
    """A flag and its values, or an argument: no flag, one value. joined: they were written as FLAG=VALUE."""

    flag: str
    values: list[str]
    joined: bool = False


def respelled(words: Sequence[str], takes_value: Mapping[str, bool]) -> list[str]:
    """Returns the words that mean the same in typer's spelling. takes_value: each flag of the verb, True if a value
    follows it. SettingsError for a model that is given twice. Words behind "--" stay as they are."""
    end = words.index("--") if "--" in words else len(words)
    items = _with_model(list(_items(words[:end], takes_value)))
    return [word for item in items for word in _written(item, takes_value)] + list(words[end:])


def _items(words: Sequence[str], takes_value: Mapping[str, bool]) -> Iterator[_Item]:
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if _is_no_flag(word) or word == "-":
            yield _Item("", [word])
            continue
        name, joined, value = word.partition("=")
        flag = _known(name, takes_value)
        values = [value] if joined else []
        if not joined and takes_value.get(flag, flag == MODEL) and at < len(words):
            values.append(words[at])
            at += 1
        while values and flag in SEVERAL and at < len(words) and SEVERAL[flag](words[at]):
            values.append(words[at])
            at += 1
        yield _Item(flag, values, bool(joined))


def _known(name: str, takes_value: Mapping[str, bool]) -> str:
    """The flag with dashes, and without the key of a JSON object behind a dot; a name of no flag as it is."""
    spelled = name.replace("_", "-") if name.startswith("--") else name
    for flag in (name, spelled, spelled.partition(".")[0]):
        if flag in takes_value or flag == MODEL:
            return flag
    return name


def _with_model(items: list[_Item]) -> list[_Item]:
    """The items with MODEL as an argument. Without a model elsewhere the last value of a flag that takes several is
    one, as typer reads it: `--served-model-name a demo`."""
    named = [item.values[0] for item in items if item.flag == MODEL and item.values]
    arguments = [item.values[0] for item in items if not item.flag]
    if named and (arguments or len(named) > 1):
        both = f"{(arguments or named[1:])[0]} and {MODEL} {named[0]}"
        raise SettingsError(f"{both}: there is one model, so leave one of the two out", "MODEL")
    items = [_Item("", item.values) if item.flag == MODEL and item.values else item for item in items]
    if named or arguments or any(item.flag == "--config" for item in items):
        return items
    for at in reversed(range(len(items))):
        flag, values, joined = items[at]
        if len(values) > 1 and SEVERAL[flag] is _is_no_flag:
            return [*items[:at], _Item(flag, values[:-1], joined), _Item("", values[-1:]), *items[at + 1 :]]
    return items


def _written(item: _Item, takes_value: Mapping[str, bool]) -> list[str]:
    flag, values, joined = item
    if not flag:
        return values
    if takes_value.get(flag) is False and values and values[0].lower() in ("true", "false"):
        opposite = f"--no-{flag.removeprefix('--')}"
        return [flag] if values[0].lower() == "true" else [opposite] if opposite in takes_value else []
    if joined and len(values) == 1:
        return [f"{flag}={values[0]}"]
    return [word for value in values for word in (flag, value)] or [flag]
