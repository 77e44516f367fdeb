"""Facts of JSON schemas that formats with an argument each in its own place need."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tandem.workers.text.output.formats import SchemaNotExpressible, Tool
from tandem.workers.text.output.json_schemas import asserting, target

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_DEFINITIONS = ("$defs", "definitions")
_PLAIN_OBJECT = {"type", "properties", "required", "additionalProperties", "$schema", "$id", *_DEFINITIONS}
_MOST_COPIED = 2**20
"""Bytes of definitions, one copy for each argument."""


class Argument(NamedTuple):
    """One argument of a call. schema: with the definitions that it refers to."""

    name: str
    schema: Any
    required: bool


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """Returns the JSON types that a schema allows, None if it allows any or if that is not plain to see. Each reference
    is followed once, so that schemas which refer to themselves take no longer than others."""
    found: set[str] = set()
    followed: set[str] = set()
    left = [schema]
    while left:
        one = left.pop()
        if not isinstance(one, Mapping):
            return None
        if (stated := _stated_types(one)) is not None:
            found |= stated
        elif isinstance(parts := one.get("anyOf", one.get("oneOf")), list):
            left += parts
        elif not isinstance(to := one.get("$ref"), str):
            return None
        elif to not in followed:
            followed.add(to)
            left.append(target(to, root))
    return frozenset(found) or None


def _stated_types(schema: Mapping[str, Any]) -> set[str] | None:
    """Returns the types that a schema itself lists, None if it lists none, or what is no JSON schema."""
    if "type" in schema:
        stated = schema["type"]
        kinds = stated if isinstance(stated, list) else [stated]
        return set(kinds) if all(isinstance(kind, str) for kind in kinds) else None
    values = listed_values(schema)
    if values is None:
        return None
    return {"null" if value is None else _TYPES.get(type(value), "object") for value in values}


def plain_text(schema: Any) -> bool:
    """Returns whether a schema, as asserting() has it, is of strings, any, of some length, or listed ones, which a
    format may write as they are."""
    if not isinstance(schema, Mapping) or types_of(schema, {}) != frozenset(["string"]):
        return False
    if lengths := {"minLength", "maxLength"} & set(schema):
        return set(schema) == {"type", *lengths} and all(type(schema[name]) is int for name in lengths)
    if not set(schema) <= {"type", "enum", "const"} or not isinstance(schema.get("enum", []), list):
        return False
    return all(isinstance(value, str) for value in listed_values(schema) or ())


def text_or_null(schema: Any) -> bool:
    """Returns whether a schema, as asserting() has it, is of any string and of null."""
    if not isinstance(schema, Mapping) or types_of(schema, {}) != frozenset(["string", "null"]):
        return False
    parts = schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
    return all(set(part) == {"type"} for part in parts)


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the values that a schema lists, None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return list(values) if isinstance(values, list) else None


def plain_arguments(tool: Tool) -> list[Argument] | None:
    """Returns the arguments of a tool whose schema only lists properties and says which are required; None for others,
    whose properties depend on each other or have any name. SchemaNotExpressible if they would take too much room."""
    schema = asserting(tool.parameters)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not set(schema) <= _PLAIN_OBJECT or not isinstance(properties, Mapping):
        return None
    if "properties" not in schema and schema.get("additionalProperties", True) is not False:
        return None
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    named = {
        **properties,
        **{name: schema.get("additionalProperties", True) for name in required if name not in properties},
    }
    if definitions and len(json.dumps(definitions)) * len(named) > _MOST_COPIED:
        raise not_expressible(tool, "its definitions are too large to be repeated for each of its properties.")
    arguments = []
    for name, one in named.items():
        if one is False and name not in required:
            continue
        if not _refers_only(one, definitions):
            return None
        whole = {**one, **definitions} if isinstance(one, Mapping) and definitions else one
        arguments.append(Argument(name, whole, name in required))
    return arguments


def _refers_only(schema: Any, definitions: Mapping[str, Any]) -> bool:
    """Returns whether all references in a schema go to definitions, which stay in place when it stands alone."""
    if isinstance(schema, Mapping):
        to = schema.get("$ref")
        if isinstance(to, str) and not any(to.startswith(f"#/{key}/") for key in definitions):
            return False
        if "$id" in schema or "$dynamicRef" in schema:
            return False
        return all(_refers_only(part, definitions) for part in schema.values())
    return not isinstance(schema, list) or all(_refers_only(part, definitions) for part in schema)


def as_typed(text: str, converted: str | None, types: frozenset[str] | None) -> str:
    """Returns the JSON of an argument that was written as `text`. converted: the text read as a literal, if it is one;
    it counts if its type is allowed, or if no string is."""
    if converted is not None and (types is None or _type_of(converted) & types or "string" not in types):
        return converted
    return json.dumps(text, ensure_ascii=False)


def _type_of(literal: str) -> set[str]:
    kinds = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
    kind = kinds.get(literal.lstrip()[0])
    return {kind} if kind is not None else {"integer", "number"}


def not_expressible(tool: Tool, reason: str) -> SchemaNotExpressible:
    return SchemaNotExpressible(f"The schema of tool '{tool.name}' cannot be forced in this model's format: {reason}")
