"""Facts of JSON schemas that formats with an argument each in its own place need."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tandem.workers.text.output.formats import SchemaNotExpressible, Tool

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_DEFINITIONS = ("$defs", "definitions")
_PLAIN_OBJECT = {"type", "properties", "required", "additionalProperties", "$schema", "$id", *_DEFINITIONS, *_NOTES}
_DEEPEST = 32


class Argument(NamedTuple):
    """One argument of a call. schema: with the definitions that it refers to."""

    name: str
    schema: Any
    required: bool


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """Returns the JSON types that a schema allows, None if it allows any or if that is not plain to see."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None
    if "type" in schema:
        stated = schema["type"]
        return frozenset([stated] if isinstance(stated, str) else stated)
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return frozenset("null" if value is None else _TYPES.get(type(value), "object") for value in values)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            parts = [types_of(part, root, depth + 1) for part in schema[key]]
            return None if None in parts else frozenset().union(*(part for part in parts if part is not None))
    if "$ref" in schema:
        return types_of(_target(schema["$ref"], root), root, depth + 1)
    return None


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in str(reference).removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def plain_text(schema: Any) -> bool:
    """Returns whether a schema is of strings, any or listed ones: a format may write these as they are."""
    if not isinstance(schema, Mapping) or types_of(schema, {}) != frozenset(["string"]):
        return False
    if not set(schema) <= {"type", "enum", "const", *_NOTES}:
        return False
    return all(isinstance(value, str) for value in listed_values(schema) or ())


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the values that a schema lists, None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if "enum" in schema else None


def plain_arguments(tool: Tool) -> list[Argument] | None:
    """Returns the arguments of a tool whose schema only lists properties and says which are required; None for others,
    whose properties depend on each other or have any name."""
    schema = tool.parameters
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
