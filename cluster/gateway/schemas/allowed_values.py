"""The values that a field takes, for the text of a refusal: read from the body's type, so that no list is kept twice;
and the value that it was given.

Called by reading.py for requests that are refused anyway; never on the way of a good one.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

_STEP = re.compile(r"\w+|\[[^]]*\]")


def allowed_values(body_type: type[msgspec.Struct], path: str) -> tuple[Any, ...]:
    """The values of the enumerated field at `path` (msgspec's spelling: messages[0].role); () for any other field."""
    kinds = [inspect.type_info(body_type)]
    for step in _STEP.findall(path):
        kinds = [below for kind in _members(kinds) for below in _below(kind, step)]
    return tuple(value for kind in _members(kinds) if isinstance(kind, inspect.LiteralType) for value in kind.values)


def given_value(fields: Mapping[str, Any], path: str) -> str | None:
    """The value at `path` of a body as short JSON; None where it is an object or a list that holds something, or where
    the path does not say which value it is."""
    found: Any = fields
    for step in _STEP.findall(path):
        try:
            found = found[int(step[1:-1])] if step.startswith("[") else found[step]
        except (LookupError, TypeError, ValueError):
            return None
    if isinstance(found, Mapping | list) and (found or not path):
        return None
    return json.dumps(found[:80] if isinstance(found, str) else found)[:80]


def _members(kinds: list[inspect.Type]) -> list[inspect.Type]:
    """Unions as their members, annotations as what they annotate."""
    found: list[inspect.Type] = []
    for kind in kinds:
        if isinstance(kind, inspect.UnionType):
            found += _members(list(kind.types))
        elif isinstance(kind, inspect.Metadata):
            found += _members([kind.type])
        else:
            found.append(kind)
    return found


def _below(kind: inspect.Type, step: str) -> list[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        return [field.type for field in kind.fields if field.encode_name == step]
    if isinstance(kind, inspect.ListType) and step.startswith("["):
        return [kind.item_type]
    return []
