"""The page of all routes: methods, keys, bodies and statuses, as /openapi.json has them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import Mock

from tandem.cluster.gateway.app.openapi import REFUSALS, openapi_document
from tandem.cluster.gateway.app.routes import BODIES, ERRORS, RouteSpec, route_table
from tandem.cluster.gateway.http.auth import AuthLevel
from tandem.cluster.gateway.http.error_answers import ROUTE_LIST
from tools.reference_cli import cell

HEAD = f"""# Routes

<!-- Written by tools/reference.py (make reference). -->

All routes, and the fields of their bodies, as `{ROUTE_LIST}` of a running service has them.
[OpenAI-compatible server](../serving/openai.md) says what they do, which fields are refused or ignored, and what errors
look like; [security](../serving/security.md#keys) says which keys there are.

| route | key | does | body |
|---|---|---|---|
"""
KEYS = {
    AuthLevel.OPEN: "none",
    AuthLevel.METRICS: "metrics or admin, where there is a metrics key",
    AuthLevel.API_KEY: "of a client",
    AuthLevel.ADMIN: "admin",
}
STATUSES = """
## Statuses

A route answers 200, or 201 where it makes a tenant. Each refusal has a body with `error`: `message`, `type`, `param`
and `code`; those of Anthropic's routes have Anthropic's.

| status | when |
|---|---|
"""
FIELDS = "| field | type | default |\n|---|---|---|\n"
REF = "#/components/schemas/"


def rest_page() -> str:
    """Return the text of docs/reference/rest.md."""
    specs = route_table(Mock(), Mock(), Mock())
    routes = [(spec.path, spec.method, spec.level, spec.summary) for spec in specs]
    document = openapi_document(routes, BODIES, ERRORS)
    rows = "".join(_route_row(spec, document) for spec in specs)
    statuses = "".join(f"| {status} | {cell(text)} |\n" for status, text in sorted(REFUSALS.items()))
    schemas = document["components"]["schemas"]
    bodies = "".join(part for name in sorted(schemas) for part in _section(name, schemas[name]))
    rows += f"| `GET {ROUTE_LIST}` | none | The OpenAPI document of all routes. |  |\n"
    return f"{HEAD}{rows}{STATUSES}{statuses}\n## Bodies\n\nA field without a default is required.\n{bodies}"


def _route_row(spec: RouteSpec, document: Mapping[str, Any]) -> str:
    path = spec.path.replace(":path}", "}")
    body = document["paths"][path][spec.method.lower()].get("requestBody")
    shown = "" if body is None else _body_words(body["content"])
    return f"| `{spec.method} {path}` | {KEYS[spec.level]} | {cell(spec.summary)} | {shown} |\n"


def _body_words(content: Mapping[str, Any]) -> str:
    """Words for a body: its type, or the fields of a form."""
    if (form := content.get("multipart/form-data")) is not None:
        return f"form: {', '.join(f'`{name}`' for name in form['schema']['properties'])}"
    return type_words(content["application/json"]["schema"])


def _section(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n### {name}\n\n"
    if "properties" not in schema:
        yield f"{type_words(schema)}\n"
        return
    yield FIELDS
    for field, shape in schema["properties"].items():
        default = f"`{_json_word(shape['default'])}`" if "default" in shape else ""
        yield f"| `{field}` | {type_words(shape)} | {default} |\n"


def type_words(schema: Mapping[str, Any]) -> str:
    """Words for what a schema takes, null left out."""
    if (ref := schema.get("$ref")) is not None:
        name = ref.removeprefix(REF)
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_words(one) for one in schema["anyOf"] if one != {"type": "null"}))
    if "const" in schema:
        return f"`{_json_word(schema['const'])}`"
    if "enum" in schema:
        return " or ".join(f"`{_json_word(one)}`" for one in schema["enum"] if one is not None)
    kind = schema.get("type", "anything")
    if kind == "array":
        items = schema.get("items")
        words = "list" if items in (None, {}) else f"list of ({type_words(items)})"
    else:
        words = str(kind)
    return words + _range_words(schema)


def _range_words(schema: Mapping[str, Any]) -> str:
    """Bounds other than those of numbers of 32 and 64 bits."""
    bounds = (
        ("minimum", "at least {}"),
        ("exclusiveMinimum", "above {}"),
        ("maximum", "at most {}"),
        ("exclusiveMaximum", "below {}"),
        ("minLength", "at least {} characters"),
        ("maxLength", "at most {} characters"),
        ("minItems", "at least {} items"),
        ("maxItems", "at most {} items"),
    )
    found = [
        words.format(f"{schema[key]:,}")
        for key, words in bounds
        if key in schema and not (abs(schema[key]) >= 2**31 and "aximum" in key) and schema[key] != -(2**63)
    ]
    return f", {', '.join(found)}" if found else ""


def _json_word(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
