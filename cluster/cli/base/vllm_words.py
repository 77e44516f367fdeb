"""Words of a command line as people write them for vLLM, turned into those that typer reads.

    --served-model-name a b    --max_model_len 4k    --enable-prefix-caching=true    --model M    -O.mode 3

Called by GroupedHelp for verbs that take the settings of a service. It checks no values.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tandem.configs.errors import SettingsError
from tandem.configs.json_flags import LORA_MODULES, looks_like_module

MODEL = "--model"
"""vLLM's flag for what is the argument MODEL here."""


def _is_no_flag(word: str) -> bool:
    return not word.startswith("-")


SEVERAL: Mapping[str, Callable[[str], bool]] = {
    LORA_MODULES: looks_like_module,
    **dict.fromkeys(("--served-model-name", "--api-key"), _is_no_flag),
    **dict.fromkeys(("--logits-processors", "--ignore-patterns", "--allowed-media-domains"), _is_no_flag),
    **dict.fromkeys(("--cuda-graph-sizes", "--cudagraph-capture-sizes"), str.isdigit),
}
"""Flags that several values may follow, and which words are such values, beyond the first."""


OPTIONAL = "--hf-token"  # may stand without a value: the token of `hf auth login` counts anyway


def with_lists(words: Sequence[str], lists: Collection[str]) -> list[str]:
    """Returns the words of a verb without arguments with each value behind a flag of its own: `--goodput a b` becomes
    `--goodput a --goodput b`. lists: flags that several values may follow."""
    written: list[str] = []
    flag: str | None = None  # which the next value belongs to, beyond its first
    for word in words:
        if _is_no_flag(word) and flag is not None:
            written += [word] if written[-1] == flag else [flag, word]
        else:
            name = word.partition("=")[0]
            flag = name if name in lists else None
            written.append(word)
    return written


class _Item(NamedTuple):
    """A flag and its values, or an argument: no flag, one value. joined: they were written as FLAG=VALUE. keys: behind
    the flag and a dot, of the place of the value in a JSON object."""

    flag: str
    values: list[str]
    joined: bool = False
    keys: tuple[str, ...] = ()


def respelled(words: Sequence[str], takes_value: Mapping[str, bool]) -> list[str]:
    """Returns the words that mean the same in typer's spelling. takes_value: each flag of the verb, True if a value
    follows it. SettingsError for a model that is given twice. Words behind "--" stay as they are."""
    end = words.index("--") if "--" in words else len(words)
    items = _with_model(_with_objects(_items(words[:end], takes_value)))
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
        flag, *keys = _known(name, takes_value)
        values = [value] if joined else []
        takes = takes_value.get(flag, flag == MODEL) and at < len(words)
        if not joined and takes and (flag != OPTIONAL or _is_no_flag(words[at])):
            values.append(words[at])
            at += 1
        while values and flag in SEVERAL and at < len(words) and SEVERAL[flag](words[at]):
            values.append(words[at])
            at += 1
        yield _Item(flag, values, bool(joined), tuple(keys) if values else ())


def _known(name: str, takes_value: Mapping[str, bool]) -> list[str]:
    """The flag with dashes, and the keys of a JSON object behind dots; a name of no flag as it is."""
    head, *keys = name.split(".")
    flag = head.replace("_", "-") if head.startswith("--") else head
    return [flag, *keys] if flag in takes_value or flag == MODEL else [name]


def _with_objects(items: Iterable[_Item]) -> list[_Item]:
    """The items with one JSON object for each flag that has keys, where it was first given: all keys, and what was
    given whole. SettingsError for a whole value beside keys that is no object."""
    items = list(items)
    objects: dict[str, dict[str, Any]] = {item.flag: {} for item in items if item.keys}
    kept: dict[str | int, _Item] = {}
    for at, item in enumerate(items):
        if item.flag not in objects or not item.values:
            kept[at] = item
            continue
        kept.setdefault(item.flag, item)
        for value in item.values:
            _merge(objects[item.flag], _object(item, value), item.flag)
    made = {flag: [json.dumps(found, separators=(",", ":"))] for flag, found in objects.items()}
    return [item if isinstance(at, int) else item._replace(values=made[at]) for at, item in kept.items()]


def _object(item: _Item, text: str) -> dict[str, Any]:
    """The JSON object that a value is a part of, or is."""
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    for key in reversed(item.keys):
        found = {key: found}
    if not isinstance(found, dict) or (not item.keys and item.flag in SEVERAL):
        what = "a value" if item.flag in SEVERAL else "a value that is no JSON object"  # which may be a secret
        raise SettingsError(f"{what} does not go with keys behind a dot: give it or them", item.flag)
    return found


def _merge(into: dict[str, Any], more: Mapping[str, Any], flag: str) -> None:
    """Adds what another value of a flag has; a value that both have is the later one's."""
    for key, value in more.items():
        before = into.get(key, value)
        if isinstance(before, dict) != isinstance(value, dict):
            raise SettingsError(f"{key} is an object and a value", flag)
        if isinstance(before, dict) and before is not value:
            _merge(before, value, flag)
        else:
            into[key] = value


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
        flag, values, joined, _ = items[at]
        if len(values) > 1 and SEVERAL[flag] is _is_no_flag:
            return [*items[:at], _Item(flag, values[:-1], joined), _Item("", values[-1:]), *items[at + 1 :]]
    return items


def _written(item: _Item, takes_value: Mapping[str, bool]) -> list[str]:
    flag, values, joined, _ = item
    if not flag or (flag == OPTIONAL and not values):
        return values
    if takes_value.get(flag) is False and values and values[0].lower() in ("true", "false"):
        opposite = f"--no-{flag.removeprefix('--')}"
        return [flag] if values[0].lower() == "true" else [opposite] if opposite in takes_value else []
    if joined and len(values) == 1:
        return [f"{flag}={values[0]}"]
    return [word for value in values for word in (flag, value)] or [flag]
