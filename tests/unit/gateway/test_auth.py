"""Keys, and the auth level of every route."""

import pytest
from starlette.routing import Route

from cluster.gateway.auth import AuthLevel, Principal, StaticKeys, check_level
from cluster.gateway.routes import ROUTES
from configs.schema import GatewaySettings
from tests.unit.gateway.rig import USER, error_of, gateway
from workers.errors import RequestRefused

KEYS = GatewaySettings(api_keys=("sk-one", "sk-two"))
OPEN_PATHS = {"/livez", "/readyz", "/health", "/ping", "/version", "/load", "/metrics", "/openapi.json"}
WRONG = [
    None,
    "",
    "Bearer",
    "Bearer ",
    "Bearer sk-three",
    "Bearer sk-one sk-two",
    "Basic sk-one",
    "sk-one",
    "Bearer sk-on",
]


async def test_every_route_declares_its_level_and_holds_it() -> None:
    async with gateway(settings=KEYS) as rig:
        seen = set()
        for route in rig.app.routes:
            assert isinstance(route, Route)
            level = route.endpoint.__dict__["auth_level"]
            assert isinstance(level, AuthLevel)
            path = route.path.replace("{model:path}", "echo")
            (method,) = (route.methods or set()) - {"HEAD"}
            answer = await rig.client.request(method, path, content=b"not json")
            assert (answer.status_code == 401) == (level is not AuthLevel.OPEN), path
            assert (level is AuthLevel.OPEN) == (path in OPEN_PATHS), path
            if level is AuthLevel.OPEN:
                assert answer.status_code == 200
            seen.add(route.path)
        assert seen == {spec.path for spec in ROUTES} | {"/openapi.json"}


@pytest.mark.parametrize("header", WRONG)
async def test_wrong_keys_are_refused(header: str | None) -> None:
    async with gateway(settings=KEYS) as rig:
        headers = {} if header is None else {"authorization": header}
        answer = await rig.client.post("/v1/chat/completions", json={"messages": USER}, headers=headers)
        assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert not rig.backend.requests


@pytest.mark.parametrize("header", ["Bearer sk-one", "bearer sk-two", "BEARER  sk-two "])
async def test_right_keys_pass(header: str) -> None:
    async with gateway(settings=KEYS) as rig:
        body = {"messages": USER, "max_tokens": 1}
        answer = await rig.client.post("/v1/chat/completions", json=body, headers={"authorization": header})
        assert answer.status_code == 200


def test_without_keys_all_is_open_as_tenant_default() -> None:
    assert StaticKeys().authenticate(None) == Principal("default", is_admin=True)
    assert check_level(AuthLevel.ADMIN, StaticKeys(), None).tenant == "default"


def test_admin_routes_need_an_admin_key() -> None:
    keys = StaticKeys(["user"], ["root"])
    assert check_level(AuthLevel.ADMIN, keys, "Bearer root").is_admin
    assert not check_level(AuthLevel.API_KEY, keys, "Bearer user").is_admin
    with pytest.raises(RequestRefused) as refusal:
        check_level(AuthLevel.ADMIN, keys, "Bearer user")
    assert (refusal.value.status, refusal.value.code) == (403, "permission_denied")
    with pytest.raises(RequestRefused) as refusal:
        check_level(AuthLevel.ADMIN, StaticKeys(["user"]), None)
    assert refusal.value.status == 401


def test_keys_are_not_kept() -> None:
    assert "sk-secret" not in repr(vars(StaticKeys(["sk-secret"])))
