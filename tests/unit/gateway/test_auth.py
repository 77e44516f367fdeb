"""Keys, and the auth level of every route."""

from dataclasses import dataclass
from unittest.mock import Mock

import pytest
from starlette.routing import Route

from tandem.cluster.gateway.app.routes import route_table
from tandem.cluster.gateway.app.wiring import tenant_keys
from tandem.cluster.gateway.http.auth import (
    AuthLevel,
    Principal,
    StaticKeys,
    TenantKeys,
    check_level,
    may_see_tenants,
)
from tandem.cluster.tenants.tenant import digest_of
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import RequestRefused
from tests.unit.gateway.rig import USER, error_of, gateway

KEYS = GatewaySettings(api_keys=("sk-one", "sk-two"))
OPEN_PATHS = {"/livez", "/readyz", "/health", "/ping", "/version", "/load", "/metrics", "/openapi.json", "/", "/docs"}
OPEN_PATHS |= {"/ui/LICENSES.txt"}
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
            path = route.path.replace("{model:path}", "echo").replace("/ui/{name}", "/ui/LICENSES.txt")
            (method,) = (route.methods or set()) - {"HEAD"}
            answer = await rig.client.request(method, path, content=b"not json")
            assert (answer.status_code == 401) == (level in (AuthLevel.API_KEY, AuthLevel.ADMIN)), path
            is_free = level in (AuthLevel.OPEN, AuthLevel.METRICS)
            assert is_free == (path in OPEN_PATHS) and (level is AuthLevel.METRICS) == (path == "/metrics"), path
            if is_free:
                assert answer.status_code == 200
            seen.add(route.path)
        assert seen == {spec.path for spec in route_table(rig.text, rig.accounts, rig.context)} | {"/openapi.json"}


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
    assert "the key that was sent is none of those" in str(refusal.value)
    proxied = TenantKeys(StaticKeys(), Mock(is_known=True, is_closed=False), may_be_open=True, open_admin=False)
    with pytest.raises(RequestRefused, match="start it with --admin-api-key KEY") as refusal:
        check_level(AuthLevel.ADMIN, proxied, None)
    with pytest.raises(RequestRefused) as refusal:
        check_level(AuthLevel.ADMIN, StaticKeys(["user"]), None)
    assert refusal.value.status == 401


def test_on_an_open_route_nobody_is_anybody() -> None:
    for keys in (StaticKeys(), StaticKeys([], ["root"])):
        assert check_level(AuthLevel.OPEN, keys, "Bearer root") == Principal("default", is_admin=False)


def test_keys_are_not_kept() -> None:
    assert "sk-secret" not in repr(vars(StaticKeys(["sk-secret"])))


# ---- the keys of tenants, by what is known of them ----


@dataclass
class Known:
    """Tenants as a gateway knows them; one of them, acme, has a key."""

    is_known: bool = True
    is_certain: bool = True
    is_closed: bool = True

    def tenant_of(self, digest: bytes) -> str | None:
        return "acme" if digest == digest_of("sk-acme") else None


def status_of(keys: TenantKeys, header: str | None) -> int:
    try:
        keys.authenticate(header)
    except RequestRefused as refused:
        return refused.status
    return 200


NEVER_READ, OLD, FRESH = Known(False, False, False), Known(True, False), Known()
NOBODY, NOBODY_OF_OLD = Known(is_closed=False), Known(True, False, False)


@pytest.mark.parametrize(
    ("known", "static", "without", "unknown"),
    [
        (NEVER_READ, (), 503, 503),
        (NEVER_READ, ("sk-static",), 401, 503),
        (OLD, (), 401, 503),
        (OLD, ("sk-static",), 401, 503),
        (FRESH, (), 401, 401),
        (FRESH, ("sk-static",), 401, 401),
        (NOBODY, (), 200, 200),
        (NOBODY, ("sk-static",), 401, 401),
        (NOBODY_OF_OLD, (), 200, 200),
        (NOBODY_OF_OLD, ("sk-static",), 401, 503),
    ],
)
def test_a_key_is_refused_for_good_only_when_nobody_could_have_it(
    known: Known, static: tuple[str, ...], without: int, unknown: int
) -> None:
    """503 for what Redis may know, and for no key at all while the service may be open; 401 for the rest."""
    keys = TenantKeys(StaticKeys(static), known, may_be_open=True, open_admin=True)
    assert status_of(keys, None) == without
    assert status_of(keys, "Bearer sk-nobody") == unknown
    assert keys.authenticate("Bearer sk-acme") == Principal("acme", is_admin=False)
    if static:
        assert keys.authenticate("Bearer sk-static") == Principal("default", is_admin=False)


@pytest.mark.parametrize("known", [NEVER_READ, OLD, FRESH, NOBODY, NOBODY_OF_OLD])
@pytest.mark.parametrize("static", [(), ("sk-static",)])
def test_with_auth_required_nobody_passes_without_a_key(known: Known, static: tuple[str, ...]) -> None:
    keys = TenantKeys(StaticKeys(static), known, may_be_open=False, open_admin=True)
    assert status_of(keys, None) == 401 and not keys.is_open
    assert status_of(keys, "Bearer sk-nobody") == (401 if known.is_certain else 503)
    assert status_of(keys, "Bearer sk-acme") == 200


@pytest.mark.parametrize("open_admin", [True, False])
def test_an_open_service_gives_admin_routes_only_where_it_listens_itself(open_admin: bool) -> None:
    keys = TenantKeys(StaticKeys(), NOBODY, may_be_open=True, open_admin=open_admin)
    assert keys.authenticate(None) == Principal("default", is_admin=open_admin)


@pytest.mark.parametrize(
    ("known", "static", "is_open"),
    [(NOBODY, (), True), (FRESH, (), False), (NEVER_READ, (), False), (NOBODY, ("sk-static",), False)],
)
def test_tenants_are_shown_to_anybody_only_while_the_service_is_open(
    known: Known, static: tuple[str, ...], is_open: bool
) -> None:
    keys = TenantKeys(StaticKeys(static), known, may_be_open=True, open_admin=False)
    assert keys.is_open is is_open
    assert may_see_tenants(keys, None) is is_open
    assert may_see_tenants(keys, "Bearer sk-acme") is is_open


@pytest.mark.parametrize(
    ("settings", "itself", "proxied"),
    [
        (GatewaySettings(), True, False),
        (GatewaySettings(host="0.0.0.0"), False, False),
        (GatewaySettings(auth="open"), True, True),
        (GatewaySettings(auth="required"), False, False),
        (GatewaySettings(api_keys=("sk",)), False, False),
        (GatewaySettings(admin_keys=("root",)), False, False),
    ],
)
def test_a_service_is_open_on_loopback_or_where_it_is_told_to(
    settings: GatewaySettings, itself: bool, proxied: bool
) -> None:
    """Under `serve run` it is Serve's proxy that listens, wherever Serve's configuration says."""
    found = [settings.is_open(listens_itself=listens_itself) for listens_itself in (True, False)]
    assert found == [itself, proxied]
    keys = [tenant_keys(settings, NOBODY, open_port=open_port).is_open for open_port in (True, False)]
    assert keys == found


def test_an_admin_sees_tenants_and_a_user_does_not() -> None:
    keys = StaticKeys(["user"], ["root"])
    assert may_see_tenants(keys, "Bearer root")
    assert not may_see_tenants(keys, "Bearer user") and not may_see_tenants(keys, None)
    assert may_see_tenants(StaticKeys(), None)
    assert not StaticKeys([], ["root"]).is_open and not StaticKeys(["user"]).is_open


async def test_metrics_may_need_a_key_of_their_own() -> None:
    settings = GatewaySettings(admin_keys=("root",), api_keys=("sk",), metrics_keys=("scrape",))
    async with gateway(settings=settings) as rig:
        for key, status, is_told in (("scrape", 200, False), ("root", 200, True), ("sk", 401, False), ("", 401, False)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answer = await rig.client.get("/metrics", headers=headers)
            assert answer.status_code == status, key
            assert may_see_tenants(rig.accounts.auth, headers.get("authorization")) is is_told
        answer = await rig.client.get("/v1/models", headers={"authorization": "Bearer scrape"})
        assert answer.status_code == 401, "it opens nothing else"
    async with gateway(settings=GatewaySettings(metrics_keys=("scrape",))) as rig:
        assert (await rig.client.get("/v1/models")).status_code == 200
        assert (await rig.client.get("/metrics")).status_code == 401


def test_a_key_may_be_any_of_several_and_both_kinds_at_once() -> None:
    keys = StaticKeys(["one", "two", "both"], ["root", "both", "other"])
    users = [keys.authenticate(f"Bearer {key}").is_admin for key in ("one", "two", "both", "root", "other")]
    assert users == [False, False, True, True, True]


def test_a_key_for_the_metrics_holds_beside_tenants_too() -> None:
    keys = TenantKeys(StaticKeys(metrics_keys=("scrape",)), FRESH, may_be_open=True, open_admin=True)
    keys.check_metrics("Bearer scrape")
    for header in (None, "Bearer sk-acme"):
        with pytest.raises(RequestRefused) as refused:
            keys.check_metrics(header)
        assert refused.value.status == 401
