"""Requests that are refused before their fields are read: bodies, headers, routes, models; the service lives on."""

import gzip
import json
from collections.abc import AsyncIterator

import pytest

from tandem.configs.schema import GatewaySettings
from tests.unit.gateway.rig import ALL, BOTH, COMPLETE, MINIMAL, Rig, error_of, gateway

RAW_BODIES: list[tuple[bytes, str]] = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b"nul", "invalid_json"),
    (b"[]", "invalid_json"),
    (b'"text"', "invalid_json"),
    (b"5", "invalid_json"),
    (b"{'a': 1}", "invalid_json"),
    (b'{"a": 1, "a": 2}', "invalid_json"),
    (b'{"metadata": {"a": 1, "a": 2}}', "invalid_json"),
    (b'{"a": NaN}', "invalid_json"),
    (b'{"a": -Infinity}', "invalid_json"),
    (b'{"a": 1e999}', "invalid_value"),
    (b'{"metadata": [1e400]}', "invalid_value"),
    (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json"),
    (b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}", "invalid_json"),
    (b'{"a": ' + b"[" * 100_000, "invalid_json"),
    (b'{"a":' * 100_000, "invalid_json"),
    (b'{"prompt": "\\ud800"}', "invalid_json"),
    (b'{"\\udfff": 1}', "invalid_json"),
    (b'{"prompt": "\xff"}', "invalid_json"),
    (b'{"prompt": "\xed\xa0\x80"}', "invalid_json"),
    (b'\xef\xbb\xbf{"prompt": "x"}', "invalid_json"),
    ('{"prompt": "x"}'.encode("utf-16"), "invalid_json"),
    (b'{"prompt": "a\nb"}', "invalid_json"),
]


@pytest.mark.parametrize("path", ALL)
async def test_bodies_that_are_no_json_objects(rig: Rig, path: str) -> None:
    for body, code in RAW_BODIES:
        answer = await rig.client.post(path, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, error_of(answer)["code"]) == (400, code), body[:60]
    assert not rig.backend.requests


@pytest.mark.parametrize("path", BOTH)
async def test_unknown_models(rig: Rig, path: str) -> None:
    for name in ("nobody", "", "x" * 1000):
        answer = await rig.client.post(path, json={**MINIMAL[path], "model": name})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")
        assert "GET /v1/models lists" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": ""}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json; charset=UTF-8"}, 200),
        ({"content-type": "application/vnd.x+json"}, 200),
        ({}, 415),
    ],
)
async def test_content_types(rig: Rig, headers: dict[str, str], status: int) -> None:
    body = json.dumps({**MINIMAL[COMPLETE], "max_tokens": 1}).encode()
    if headers.get("content-encoding") == "gzip":
        body = gzip.compress(body)
    answer = await rig.client.post(COMPLETE, content=body, headers=headers)
    assert answer.status_code == status
    if status != 200:
        error_of(answer)


async def test_bodies_have_a_size_limit(rig: Rig) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 500_000

    for content in (b" " * 1_000_001, chunks()):
        answer = await rig.client.post(COMPLETE, content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, error_of(answer)["code"]) == (413, "content_too_large")


async def test_headers_have_a_size_limit(rig: Rig) -> None:
    answer = await rig.client.get("/livez", headers={"x-much": "x" * 40_000})
    assert answer.status_code == 431
    error_of(answer)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/redoc", 404),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/completions", 405),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/echo/", 404),
        ("POST", "/v1/responses/", 404),
        ("GET", "/v1/responses/resp_1/", 404),
        ("DELETE", "/admin/tenants/", 404),
        ("GET", "/metrics/", 404),
        ("POST", "/livez", 405),
        ("OPTIONS", "/v1/models", 405),
        ("PUT", "/admin/tenants", 405),
        ("OPTIONS", "/admin/tenants/x", 405),
        ("PUT", "/tokenize", 405),
    ],
)
async def test_routes_and_methods_that_are_not_there(rig: Rig, method: str, path: str, status: int) -> None:
    answer = await rig.client.request(method, path)
    assert answer.status_code == status
    message = error_of(answer)["message"]
    allowed = {
        "/admin/tenants": "GET, HEAD, POST",
        "/admin/tenants/x": "DELETE, GET, HEAD, PATCH",
        "/v1/models": "GET, HEAD",
        "/livez": "GET, HEAD",
    }
    if status == 405:
        assert answer.headers["allow"] == allowed.get(path, "POST")
    assert ("allow" in answer.headers) == (status == 405)
    assert ("end with a slash" in message) == (path.endswith("/") and path != "/")
    if path != "/v1/models/nobody":
        named = f'route "{path}" does not allow {method}.' if status == 405 else f'no route {method} "{path}".'
        assert named in message and "GET /openapi.json" in message


async def test_the_document_may_be_left_out(rig: Rig) -> None:
    async with gateway(settings=GatewaySettings(disable_fastapi_docs=True)) as hidden:
        for path in ("/openapi.json", "/docs", "/redoc", "/docs/oauth2-redirect"):
            answer = await hidden.client.get(path)
            assert answer.status_code == 404 and "lists the routes" not in error_of(answer)["message"]
        assert "lists the routes" not in error_of(await hidden.client.get("/v1/completions"))["message"]
    assert (await rig.client.get("/openapi.json")).status_code == 200


async def test_heads_and_sagemakers_pings_are_answered(rig: Rig) -> None:
    for method, path in (("HEAD", "/v1/models"), ("HEAD", "/health"), ("HEAD", "/ping"), ("POST", "/ping")):
        assert (await rig.client.request(method, path)).status_code == 200, (method, path)
    assert (await rig.client.head("/v1/models/")).status_code == 404


async def test_the_path_of_an_unknown_route_is_made_safe(rig: Rig) -> None:
    answer = await rig.client.get("/v2/%0A%1b%5B1m%22" + "x" * 1000)
    message = error_of(answer)["message"]
    assert '"/v2/\\n\\u001b[1m\\"x' in message and "..." in message and len(message) < 250


async def test_chat_without_a_template() -> None:
    async with gateway(template=None) as rig:
        answer = await rig.chat()
        assert (answer.status_code, error_of(answer)["param"]) == (400, "messages")


async def test_request_ids_are_echoed_made_safe_or_made_up(rig: Rig) -> None:
    async def sent(request_id: bytes | None) -> str:
        headers = [(b"x-request-id", request_id)] if request_id is not None else []
        answer = await rig.client.get("/nowhere", headers=headers)
        found: str = answer.headers["x-request-id"]
        return found

    assert await sent(b"mine-1.2:3/4_5") == "mine-1.2:3/4_5"
    assert await sent(b"a b\xffc<script>\t") == "abcscript"
    assert await sent(b"x" * 300) == "x" * 128
    assert len({await sent(None), await sent(None), await sent(b"\xff \t")}) == 3
