"""The OpenAPI document, built once from the same structs that parse the bodies and from the route table."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tandem.cluster.gateway.admin.adapter_routes import LoadBody, UnloadBody
from tandem.cluster.gateway.admin.drain_routes import DrainBody
from tandem.cluster.gateway.admin.route_explain import RouteBody
from tandem.cluster.gateway.admin.tenant_routes import RotateBody, TenantBody
from tandem.cluster.gateway.http.auth import AuthLevel
from tandem.cluster.gateway.http.error_answers import ErrorBody
from tandem.cluster.gateway.openai.embeddings import EmbeddingBody
from tandem.cluster.gateway.openai.tokenize import DetokenizeBody
from tandem.cluster.gateway.schemas.chat_body import ChatBody, TokenizeBody
from tandem.cluster.gateway.schemas.generation_body import CompletionBody
from tandem.cluster.tenants.tenant import Limits

ABOUT = "The API of this service. A key is sent as `Authorization: Bearer KEY`, if the service asks for one."
BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/admin/drain": DrainBody,
    "/admin/routes/explain": RouteBody,
    "/admin/tenants": TenantBody,
    "/admin/tenants/{name}": Limits,
    "/admin/tenants/{name}/rotate-key": RotateBody,
    "/v1/load_lora_adapter": LoadBody,
    "/v1/unload_lora_adapter": UnloadBody,
}
TAGS = {
    "Text generation": ("/v1/chat/", "/v1/completions", "/v1/responses", "/v1/messages"),
    "Embeddings and scores": ("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
    "Files and batches": ("/v1/files", "/v1/batches"),
    "Models and tokens": ("/v1/models", "/tokenize", "/detokenize", "/tokenizer_info"),
    "Administration": ("/admin/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache"),
    "State of the service": ("/livez", "/ping", "/health", "/readyz", "/version", "/load", "/metrics"),
    "Pages": ("/",),
}
"""Headings of the reference, and beginnings of the paths below each; the first that fits counts."""
FORMS: dict[str, dict[str, Any]] = {
    "/v1/files": {
        "type": "object",
        "required": ["purpose", "file"],
        "properties": {
            "purpose": {"const": "batch"},
            "file": {"type": "string", "format": "binary"},
            "expires_after[anchor]": {"const": "created_at"},
            "expires_after[seconds]": {"type": "integer"},
        },
    }
}
"""Schemas of bodies that are forms."""
CREATES = {("POST", "/admin/tenants")}
"""Routes that answer 201 in place of 200."""
REFUSALS = {
    "400": "Bad JSON, schema, range, unsupported field, or context too long",
    "401": "Missing or unknown API key",
    "403": "Key valid, action not permitted",
    "404": "Unknown route or model",
    "405": "Method not allowed",
    "409": "It exists already",
    "408": "The body did not arrive in time",
    "413": "Body too large",
    "415": "Content type or encoding not supported",
    "431": "Headers too large",
    "429": "Over a limit, or the queue is full",
    "500": "Our fault",
    "503": "No group is ready",
}


def openapi_document(
    routes: Iterable[tuple[str, str, AuthLevel, str]],
    bodies: Mapping[str, type[msgspec.Struct]],
    errors: Mapping[str, type[msgspec.Struct]],
) -> dict[str, Any]:
    """The document for (path, method, level, summary) of every route. bodies, errors: by path, those of other APIs
    than OpenAI's oldest; without an entry the error's is ErrorBody."""
    known = BODIES | dict(bodies)
    kinds = {*known.values(), *errors.values(), ErrorBody}
    _, components = msgspec.json.schema_components(
        sorted(kinds, key=lambda kind: kind.__name__), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for path, method, level, summary in routes:
        shown = path.replace(":path}", "}")
        operation = _operation(path, method, level, summary, errors.get(path, ErrorBody))
        if (body := known.get(path)) is not None and method in ("POST", "PATCH"):
            operation["requestBody"] = {"required": True, "content": _json_of(body)}
        if path in FORMS and method == "POST":
            form = {"multipart/form-data": {"schema": FORMS[path]}}
            operation["requestBody"] = {"required": True, "content": form}
        paths.setdefault(shown, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": "1", "description": ABOUT},
        "tags": [{"name": name} for name in TAGS],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _json_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def _operation(
    path: str, method: str, level: AuthLevel, summary: str, error_body: type[msgspec.Struct]
) -> dict[str, Any]:
    error = _json_of(error_body)
    operation: dict[str, Any] = {
        "summary": summary,
        "tags": [next(tag for tag, begins in TAGS.items() if path.startswith(begins))],
        "responses": {
            "201" if (method, path) in CREATES else "200": {"description": "OK"},
            **{status: {"description": text, "content": error} for status, text in REFUSALS.items()},
        },
    }
    if level in (AuthLevel.API_KEY, AuthLevel.ADMIN):
        operation["security"] = [{"key": []}]
    if names := re.findall(r"{(\w+)", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation
