"""The OpenAPI document has every route, and what each takes."""

import re
from typing import Any

import pytest
from starlette.routing import Route

from tandem.cluster.gateway.http.auth import AuthLevel
from tests.unit.gateway.rig import Rig

PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")


def routes(rig: Rig) -> list[tuple[Route, str, str]]:
    """Every route of the app, its method and its path as the document writes it."""
    found = [route for route in rig.app.routes if isinstance(route, Route)]
    assert len(found) == len(rig.app.routes), "what else is there?"
    return [
        (route, method.lower(), PARAMETER.sub(r"{\1}", route.path))
        for route in found
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]


PAGES = ("/", "/docs", "/ui/{name}", "/openapi.json")
WITHOUT_BODY = (
    "/v1/responses/{response_id}/cancel",
    "/v1/batches/{batch_id}/cancel",
    "/reset_prefix_cache",
    "/admin/groups/{group}/record",
    "/ping",
)


@pytest.fixture
async def document(rig: Rig) -> dict[str, Any]:
    document: dict[str, Any] = (await rig.client.get("/openapi.json")).json()
    return document


async def test_the_document_has_every_route_and_no_other(rig: Rig, document: dict[str, Any]) -> None:
    documented = {(method, path) for path, operations in document["paths"].items() for method in operations}
    assert documented == {(method, path) for _, method, path in routes(rig)}


async def test_every_route_says_what_it_takes_and_which_key(rig: Rig, document: dict[str, Any]) -> None:
    for route, method, path in routes(rig):
        operation = document["paths"][path][method]
        named = [parameter["name"] for parameter in operation.get("parameters", ())]
        assert named == PARAMETER.findall(route.path), path
        takes_body = method in ("post", "patch", "put") and path not in WITHOUT_BODY
        assert ("requestBody" in operation) == takes_body, (method, path)
        level = route.endpoint.__dict__["auth_level"]
        assert ("security" in operation) == (level in (AuthLevel.API_KEY, AuthLevel.ADMIN)), path
        assert operation["summary"], path
        (tag,) = operation["tags"]
        assert {"name": tag} in document["tags"] and (tag == "Pages") == (path in PAGES), path


async def test_every_reference_in_the_document_is_there(document: dict[str, Any]) -> None:
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            found.extend(value[key] for key in value.keys() & {"$ref"})
            list(map(walk, value.values()))
        elif isinstance(value, list):
            list(map(walk, value))

    walk(document)
    schemas = document["components"]["schemas"]
    assert {"ChatBody", "ErrorBody"} <= schemas.keys()
    assert {name.removeprefix("#/components/schemas/") for name in found} <= schemas.keys()


@pytest.mark.parametrize("method", ["get", "post", "delete", "patch", "put"])
async def test_a_method_that_the_document_lacks_is_refused(rig: Rig, document: dict[str, Any], method: str) -> None:
    for path, operations in document["paths"].items():
        if method not in operations and "{" not in path and path != "/v1/responses/input_tokens":  # or an id
            answer = await rig.client.request(method, path)
            assert answer.status_code == 405, (method, path)
