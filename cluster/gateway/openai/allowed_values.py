"""The values that a field takes, for the text of a refusal: read from the body's type, so that no list is kept twice.

Called by schemas.py for requests that are refused anyway; never on the way of a good one.
"""

import re
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
