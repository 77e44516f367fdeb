"""`tandem routes explain`, POST /admin/routes/explain, and the header x-tandem-route, over a fake backend; sessions."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from tandem.cluster.cli.client.endpoint import EndpointError
from tandem.cluster.routing.route_hint import session_key
from tandem.cluster.routing.route_table import GroupCost, RouteTable
from tandem.cluster.tenants.tenant import NO_LIMITS, Tenant
from tandem.cluster.tenants.tenant_admin import TenantAdmin
from tandem.configs.errors import SettingsError
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.request import GenerationRequest
from tests.support.fake_backend import FakeBackend
from tests.unit.cluster.cli.test_talking import problem, service, tandem
from tests.unit.gateway.rig import CHAT, COMPLETE, EMBED, MINIMAL, error_of, gateway

KEYS = GatewaySettings(api_keys=("sk-one",), admin_keys=("sk-admin",))
ADMIN, CLIENT = {"authorization": "Bearer sk-admin"}, {"authorization": "Bearer sk-one"}
EXPLAIN = {"x-tandem-route": "explain"}
TABLE = RouteTable(
    policy="joint",
    cost_tokens=300,
    groups=[
        GroupCost(group="g2", cost=120.4, outstanding=0, device=128, below=64, is_home=True),
        GroupCost(group="g1", cost=900.0, outstanding=700, adapter="host", is_last=True),
    ],
)


class OneTenant(TenantAdmin):
    """There is acme."""

    async def all(self) -> Mapping[str, Tenant]:
        return {"acme": Tenant(name="acme", keys=(), limits=NO_LIMITS, created_s=0.0)}


async def test_the_command_prints_a_line_for_each_group() -> None:
    backend = FakeBackend(table=TABLE)
    async with service(backend, tenants=OneTenant()) as (_, url):
        done = await tandem("routes", "explain", "hello", "--url", url, "--session", "s", "--max-tokens", "7")
        raw = await tandem("routes", "explain", "hi", "--chat", "--tenant", "acme", "--url", url, "--json")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [
        "policy joint; prompt 6 tokens, 300 with the expected output",
        "group  cost  to come  on device  below  adapter",
        "g2     120   0        128        64     -        home",
        "g1     900   700      0          0      host     last",
    ]
    (asked, hint), (chat, other) = backend.explained
    assert asked.sampling.max_tokens == 7 and len(asked.prompt_token_ids) == 6
    assert hint.session == session_key("default", "s") != ""
    assert msgspec.json.decode(raw.stdout)["groups"][0]["group"] == "g2"
    assert chat.tenant == "acme" and chat.cache_salt != asked.cache_salt and other.session == ""
    assert not backend.requests, "nothing is sent"


async def test_what_groups_have_of_the_prompt_counts() -> None:
    async def found(request: GenerationRequest) -> Mapping[str, tuple[int, int]]:
        return {"g1": (len(request.prompt_token_ids), 7)}

    async with gateway(FakeBackend(table=TABLE), settings=KEYS) as rig:
        rig.context.find_overlaps = found
        answer = await rig.client.post("/admin/routes/explain", json={"prompt": "hello"}, headers=ADMIN)
        assert answer.status_code == 200
        ((_, hint),) = rig.backend.explained
        assert hint.overlaps == {"g1": (6, 7)}


async def test_what_is_asked_wrongly_is_refused_by_name() -> None:
    async with service(FakeBackend()) as (_, url):
        assert "There is no group" in problem(await tandem("routes", "explain", "x", "--url", url))
        wrong = await tandem("routes", "explain", "x", "--url", url, "--max-tokens", "0")
        assert isinstance(wrong.exception, SettingsError | EndpointError | SystemExit)
        assert "--max-tokens" in str(wrong.exception) or "--max-tokens" in wrong.stderr


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
        ({"prompt": "x", "colour": 1}, 400, "colour"),
        ({}, 400, "prompt"),
        ({"prompt": "x", "model": "nobody"}, 404, "model"),
        ({"prompt": "x", "tenant": ["a"]}, 400, "tenant"),
        ({"prompt": "x", "tenant": "nobody"}, 404, "tenant"),
    ],
)
async def test_bad_bodies_are_refused(body: dict[str, Any], status: int, param: str) -> None:
    async with gateway(FakeBackend(table=TABLE), settings=KEYS) as rig:
        answer = await rig.client.post("/admin/routes/explain", json=body, headers=ADMIN)
        assert answer.status_code == status and error_of(answer)["param"] == param, answer.text


async def test_explaining_needs_an_admin_key() -> None:
    async with gateway(FakeBackend(table=TABLE), settings=KEYS) as rig:
        for headers, status in ((CLIENT, 403), ({}, 401)):
            answer = await rig.client.post("/admin/routes/explain", json={"prompt": "x"}, headers=headers)
            assert answer.status_code == status
        refused = await rig.client.post(COMPLETE, json={"prompt": "x"}, headers=CLIENT | EXPLAIN)
        assert refused.status_code == 403 and "--admin-api-key" in error_of(refused)["message"]
        assert "x-tandem-route" not in refused.headers and not rig.backend.requests
        wrong = await rig.client.post(COMPLETE, json={"prompt": "x"}, headers=ADMIN | {"x-tandem-route": "why"})
        assert wrong.status_code == 400 and error_of(wrong)["param"] == "x-tandem-route"
        plain = await rig.client.post(COMPLETE, json={"prompt": "x"}, headers=ADMIN)
        assert plain.status_code == 200 and "x-tandem-route" not in plain.headers, "nobody has asked"


@pytest.mark.parametrize("more", [{}, {"stream": True}])
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_an_answer_says_where_it_was_made_and_why(path: str, more: dict[str, Any]) -> None:
    async with gateway(FakeBackend(table=TABLE, route="g1"), settings=KEYS) as rig:
        answer = await rig.client.post(path, json=MINIMAL[path] | {"max_tokens": 2} | more, headers=ADMIN | EXPLAIN)
        assert answer.headers["x-tandem-route"] == "g1 overlap=0+0 outstanding=700 adapter=host second=g2"


async def test_embeddings_say_so_too_and_many_prompts_of_the_first() -> None:
    backend = FakeBackend(table=TABLE, route="g2")
    async with gateway(backend, settings=KEYS) as rig:
        answer = await rig.client.post(EMBED, json={"input": ["x", "y"]}, headers=ADMIN | EXPLAIN)
        assert answer.headers["x-tandem-route"] == "g2 overlap=128+64 outstanding=0 adapter=- second=g1"
        assert len(backend.requests) == 2


async def test_a_session_is_named_by_header_or_field_and_belongs_to_its_tenant() -> None:
    async with gateway(settings=KEYS) as rig:
        named: list[tuple[dict[str, str], dict[str, Any]]] = [
            ({}, {}),
            ({"x-session-id": "a"}, {}),
            ({"x-session-id": "a"}, {"prompt_cache_key": "b"}),
            ({}, {"prompt_cache_key": "a"}),
            ({}, {"prompt_cache_key": ""}),
        ]
        for headers, more in named:
            answer = await rig.client.post(CHAT, json=MINIMAL[CHAT] | more, headers=CLIENT | headers)
            assert answer.status_code == 200 and "x-tandem-ignored" not in answer.headers, answer.text
        a = session_key("default", "a")
        assert [hint.session for hint in rig.backend.hints] == ["", a, a, a, ""]
        odd = await rig.client.post(CHAT, json=MINIMAL[CHAT] | {"prompt_cache_key": 5}, headers=CLIENT)
        assert odd.headers["x-tandem-ignored"] == "prompt_cache_key" and rig.backend.hints[-1].session == ""
    assert session_key("t1", "a") != session_key("t2", "a") and len(a) == 16


async def test_a_response_names_its_session_too() -> None:
    async with gateway(settings=KEYS) as rig:
        body = {"input": "hi", "prompt_cache_key": "a", "max_output_tokens": 1, "store": False}
        answer = await rig.client.post("/v1/responses", json=body, headers=CLIENT)
        assert answer.status_code == 200, answer.text
        assert rig.backend.hints[-1].session == session_key("default", "a")


def test_a_line_says_what_the_chosen_group_has() -> None:
    assert TABLE.line("g2") == "g2 overlap=128+64 outstanding=0 adapter=- second=g1"
    assert TABLE.line("gone") == "gone second=g2", "Serve chose one that the router had not seen"
    alone = RouteTable(policy="joint", cost_tokens=1, groups=TABLE.groups[:1])
    assert alone.line("g2").endswith("second=-")
