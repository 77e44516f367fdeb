"""JSON schemas before they are compiled: what asserts nothing is taken out, OpenAPI's nullable is spelled out.

Used by grammars.py, and by the formats of tool calls for the schemas of arguments. Schemas come from clients: nothing
here raises for what is no schema. What is refused is llguidance's to say, keyword by keyword.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

ENFORCED_FORMATS: Final = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"]
)
"""Values of `format` that llguidance holds strings to. All others are annotations (JSON Schema, 7.2.1)."""
_NOTES: Final = frozenset(
    [
        *("$comment", "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated", "description"),
        *("example", "examples", "externalDocs", "nullable", "readOnly", "title", "writeOnly", "xml"),
    ]
)
_ONE: Final = frozenset(
    [
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames"),
        *("then", "unevaluatedItems", "unevaluatedProperties"),
    ]
)
_MANY: Final = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
_NAMED: Final = frozenset(
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"]
)
_SHARED = ("$defs", "definitions", "components")
_NO_LIMIT: Final = 2**63
_MOST_TRIES = 500
"""Schemas that are compiled to find a fault."""
_NULL: Final = {"type": "null"}

Place = tuple[str | int, ...]
"""The keys that lead from a schema to one inside it."""


def asserting(schema: Any) -> Any:
    """Returns a schema that allows the same values, without keywords that ask for nothing. RecursionError if it is
    nested too deep."""
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: _inner(key, value) for key, value in schema.items() if not _is_note(key)}
    for mend in (_format, _array, _names, _conditions):
        mend(kept)
    return _nullable(kept) if schema.get("nullable") is True else kept


def inside(schema: Any) -> Iterator[tuple[Place, Any]]:
    """Yields the schemas directly inside a schema, each with its place."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from (((key, name), one) for name, one in value.items())
        elif key in _MANY and isinstance(value, list):
            yield from (((key, i), one) for i, one in enumerate(value))
        elif key in _ONE and isinstance(value, Mapping):
            yield (key,), value


def fault(schema: Mapping[str, Any], reason_of: Callable[[Any], str | None]) -> tuple[str, str] | None:
    """Returns where in a schema that cannot be compiled the fault is, as far inside as it is certain, and the reason;
    None if it can be. reason_of: why a schema alone cannot be, None if it can."""
    reason = reason_of(schema)
    if reason is None:
        return None
    shared = {key: schema[key] for key in _SHARED if key in schema}
    place: Place = ()
    at, tries, followed = schema, 0, set[str]()
    while tries < _MOST_TRIES:
        for step, one in inside(at):
            tries += 1
            if step[0] not in _SHARED and reason_of({**shared, **one} if isinstance(one, Mapping) else one) == reason:
                place, at = (*place, *step), one
                break
        else:
            to = at.get("$ref") if isinstance(at, Mapping) else None
            if not isinstance(to, str) or not to.startswith("#/") or to in followed:
                break
            followed.add(to)
            place, at = tuple(to[2:].split("/")), target(to, schema)
    return ".".join(map(str, place)), reason


def target(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns the schema that a reference such as #/$defs/a names, None if there is none."""
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _is_note(key: Any) -> bool:
    return key in _NOTES or (isinstance(key, str) and key.startswith("x-"))


def _inner(key: str, value: Any) -> Any:
    if key in _NAMED and isinstance(value, Mapping):
        return {name: asserting(one) for name, one in value.items()}
    if key in _MANY and isinstance(value, list):
        return [asserting(one) for one in value]
    if key == "components" and isinstance(value, Mapping):  # where OpenAPI has its definitions
        schemas = value.get("schemas")
        named = {name: asserting(one) for name, one in schemas.items()} if isinstance(schemas, Mapping) else schemas
        return {**value, "schemas": named}
    return asserting(value) if key in _ONE else value


def _format(kept: dict[str, Any]) -> None:
    if isinstance(form := kept.get("format"), str) and form not in ENFORCED_FORMATS:
        del kept["format"]


def _array(kept: dict[str, Any]) -> None:
    """Items of which there is one at most are unique."""
    for key in ("unevaluatedItems", "unevaluatedProperties"):
        if key in kept and _is_any(kept[key]):
            del kept[key]
    if "unevaluatedItems" not in kept:  # what `contains` names is evaluated: with it, the schema is refused
        _contains(kept)
    if kept.get("uniqueItems") is False or (kept.get("uniqueItems") is True and kept.get("maxItems") in (0, 1)):
        del kept["uniqueItems"]


def _contains(kept: dict[str, Any]) -> None:
    """`contains` of anything is a number of items; none need be contained if minContains is 0."""
    least, most = kept.get("minContains", 1), kept.get("maxContains", _NO_LIMIT)
    of_any = "contains" in kept and _is_any(kept["contains"])
    counts = (kept.get("minItems", 0), kept.get("maxItems", _NO_LIMIT))
    if "contains" in kept and not (of_any or (least == 0 and most == _NO_LIMIT)):
        return
    if not all(map(_is_count, (least, most, *counts))):
        return
    if of_any:
        kept.update({"minItems": max(counts[0], least), "maxItems": min(counts[1], most)})
    if kept.get("maxItems") == _NO_LIMIT:
        del kept["maxItems"]
    for key in ("contains", "minContains", "maxContains"):
        kept.pop(key, None)


def _names(kept: dict[str, Any]) -> None:
    """Names are texts; a dependency of nothing, or on nothing, is none."""
    if "propertyNames" in kept and (_is_any(kept["propertyNames"]) or kept["propertyNames"] == {"type": "string"}):
        del kept["propertyNames"]
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        needs = kept.get(key)
        if isinstance(needs, Mapping) and all(_is_any(one) or one == [] for one in needs.values()):
            del kept[key]


def _conditions(kept: dict[str, Any]) -> None:
    if "not" in kept and kept["not"] is False:
        del kept["not"]
    branches = [key for key in ("then", "else") if key in kept]
    if "if" not in kept or all(_is_any(kept[key]) for key in branches):
        for key in ("if", *branches):
            kept.pop(key, None)


def _nullable(kept: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI 3.0: null is allowed beside the schema's `type`; without one, beside what it refers to or combines. An
    `enum` or `const` that is written out says itself whether null is."""
    stated = kept.get("type")
    if isinstance(stated, str):
        return kept if stated == "null" else {**kept, "type": [stated, "null"]}
    if isinstance(stated, list) or not any(key in kept for key in ("$ref", "allOf", "anyOf", "oneOf")):
        return kept
    if "anyOf" in kept and not any(key in kept for key in ("$ref", "allOf", "oneOf", "enum", "const")):
        return {**kept, "anyOf": [*kept["anyOf"], _NULL]} if isinstance(kept["anyOf"], list) else kept
    apart = {key: kept.pop(key) for key in (*_SHARED, "$schema", "$id") if key in kept}
    return {**apart, "anyOf": [kept, _NULL]}


def _is_any(schema: Any) -> bool:
    return schema is True or schema == {}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
