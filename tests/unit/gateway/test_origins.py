"""Web pages and an open service: DNS rebinding, requests forged by foreign pages, CORS for those that are allowed."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tandem.cluster.gateway.http.auth import StaticKeys, TenantKeys
from tandem.cluster.gateway.http.origins import is_loopback
from tandem.configs.schema import GatewaySettings
from tests.unit.gateway.rig import COMPLETE, MINIMAL, Rig, error_of, gateway
from tests.unit.gateway.test_auth import NOBODY

PAGE = "https://chat.example"
BODY = b'{"name": "mallory"}'
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def open_gateway(*allowed: str, keys: tuple[str, ...] = ()) -> AsyncIterator[Rig]:
    auth = TenantKeys(StaticKeys(keys), NOBODY, may_be_open=True, open_admin=True)
    async with gateway(settings=GatewaySettings(allowed_origins=allowed), auth=auth) as rig:
        yield rig


async def status(rig: Rig, headers: Mapping[str, str], path: str = COMPLETE) -> int:
    body: dict[str, Any] = {**MINIMAL[COMPLETE], "max_tokens": 1}
    answer = await rig.client.post(path, json=body, headers=dict(headers))
    if answer.status_code == 403:
        assert error_of(answer)["code"] == "permission_denied" and answer.headers["x-request-id"]
    return answer.status_code


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "LOCALHOST"]
)
async def test_names_of_the_loopback_reach_an_open_service(host: str) -> None:
    assert is_loopback(host)
    async with open_gateway() as rig:
        assert await status(rig, {"host": host}) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "10.0.0.1", "127.0.0.1.evil.example", "[::2]", "", "[x"]
)
async def test_a_name_that_was_made_to_point_here_does_not(host: str) -> None:
    async with open_gateway() as rig:
        assert await status(rig, {"host": host}) == 403
        for path in ("/v1/models", "/metrics", "/admin/tenants"):
            assert (await rig.client.get(path, headers={"host": host})).status_code == 403
        assert not rig.backend.requests
    async with open_gateway(keys=("sk",)) as rig:
        assert await status(rig, {"host": host, "authorization": "Bearer sk"}) == 200, "a key is enough"


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:3000", "https://localhost", "http://127.0.0.1"])
async def test_a_foreign_page_cannot_use_an_open_service(origin: str) -> None:
    async with open_gateway() as rig:
        assert await status(rig, {"origin": origin}) == 403
        assert not rig.backend.requests
        assert await status(rig, {"origin": "http://localhost"}) == 200, "its own origin"


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}, {"origin": PAGE}, {"origin": PAGE, **JSON}])
async def test_a_web_page_cannot_create_the_first_tenant(headers: dict[str, str]) -> None:
    """A page may send bodies without a content type, or of a plain one, to any service (`no-cors`)."""
    async with open_gateway() as rig:
        answer = await rig.client.post("/admin/tenants", content=BODY, headers=headers)
        assert answer.status_code == (403 if "origin" in headers else 415)
        reached = await rig.client.post("/admin/tenants", content=BODY, headers=JSON)
        assert reached.status_code == 503, "it has no Redis: what was sent got to where tenants are made"


async def test_an_allowed_page_reads_answers_streams_and_errors() -> None:
    for keys in ((), ("sk",)):
        async with open_gateway(PAGE, keys=keys) as rig:
            headers = {"origin": PAGE} | ({"authorization": "Bearer sk"} if keys else {})
            for body, code in (({}, 200), ({"stream": True}, 200), ({"model": "none"}, 404)):
                body = {**MINIMAL[COMPLETE], "max_tokens": 1, **body}
                answer = await rig.client.post(COMPLETE, json=body, headers=headers)
                assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (code, PAGE)
                assert "origin" in answer.headers["vary"]
                assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_a_preflight_is_answered_for_allowed_pages_only() -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with open_gateway(PAGE, keys=("sk",)) as rig:
        answer = await rig.client.options(COMPLETE, headers={"origin": PAGE, **asked})
        assert answer.status_code == 204 and answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
        assert "POST" in answer.headers["access-control-allow-methods"]
        foreign = await rig.client.options(COMPLETE, headers={"origin": "https://evil.example", **asked})
        assert foreign.status_code == 405 and "access-control-allow-origin" not in foreign.headers
        assert "access-control-allow-origin" not in (await rig.client.options(COMPLETE, headers=asked)).headers


async def test_a_star_allows_every_page() -> None:
    async with open_gateway("*") as rig:
        answer = await rig.client.get("/v1/models", headers={"origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert await status(rig, {"origin": PAGE, "host": "evil.example"}) == 403, "not under any name"
