"""Tenants through the gateway: keys, limits on the wire, isolation of caches, the admin routes, what is billed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tandem.cluster.gateway.http.auth import StaticKeys, TenantKeys
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state.redis_client import BackgroundClient, RequestClient
from tandem.cluster.tenants.directory import TenantDirectory
from tandem.cluster.tenants.quota import Quota
from tandem.cluster.tenants.store import TenantStore
from tandem.cluster.tenants.tenant_admin import StoreAdmin
from tandem.cluster.tenants.tenant_admission import Reservation
from tandem.workers.messages.errors import QueueFull
from tests.support.fake_backend import FakeBackend, fixed_script
from tests.unit.gateway.rig import CONTEXT, EOS, USER, Rig, error_of, events, gateway
from tests.unit.tenants.tenant_rig import patient

ROOT = {"authorization": "Bearer root"}


@dataclass
class Door:
    """A gateway with tenants over a real Redis, and its server."""

    rig: Rig
    server: RedisServer
    redis: BackgroundClient
    quota: Quota

    async def admin(self, method: str, path: str = "", **options: Any) -> httpx.Response:
        return await self.rig.client.request(method, f"/admin/tenants{path}", headers=ROOT, **options)

    async def add(self, name: str, **limits: Any) -> dict[str, str]:
        """A tenant; the headers that its requests send."""
        answer = await self.admin("POST", json={"name": name, **limits})
        assert answer.status_code == 201, answer.text
        return {"authorization": f"Bearer {answer.json()['key']}"}

    async def complete(self, headers: dict[str, str], **body: Any) -> httpx.Response:
        body = {"prompt": "hello", "max_tokens": 4} | body
        return await self.rig.client.post("/v1/completions", json=body, headers=headers)

    def metric(self, name: str, **labels: str) -> float:
        return self.rig.context.metrics.tenants.get_sample_value(f"tandem:{name}_total", labels) or 0.0


@contextlib.asynccontextmanager
async def open_door(server: RedisServer, **backend: Any) -> AsyncIterator[Door]:
    redis, requests = patient(server), RequestClient(lambda: server.url, timeout_s=20.0)
    store = TenantStore(redis)
    directory = TenantDirectory(store, clock=lambda: 0.0)
    await directory.refresh()
    quota = Quota(requests, directory, "g")
    async with gateway(
        FakeBackend(eos_token_ids=frozenset({EOS}), **backend),
        auth=TenantKeys(StaticKeys((), ["root"]), directory, may_be_open=True, open_admin=True),
        tenancy=quota,
        tenants=StoreAdmin(store, directory),
    ) as rig:
        yield Door(rig, server, redis, quota)
    await redis.close()
    await requests.close()


async def test_a_limited_tenant_sees_its_limits_on_every_answer(server: RedisServer) -> None:
    async with open_door(server) as door:
        acme = await door.add("acme", requests_per_minute=5, tokens_per_minute=1000)
        whole = await door.complete(acme)
        assert whole.headers["x-ratelimit-limit-requests"] == "5"
        assert whole.headers["x-ratelimit-remaining-requests"] == "4"
        assert whole.headers["x-ratelimit-limit-tokens"] == "1000"
        streamed = await door.complete(acme, stream=True)
        assert streamed.headers["x-ratelimit-remaining-requests"] == "3"
        assert events(streamed.text)[-1] == "[DONE]"
        wrong = await door.rig.client.post("/v1/completions", json={"prompt": 7}, headers=acme)
        assert wrong.status_code == 400
        listed = await door.rig.client.get("/v1/models", headers=acme)
        for answer in (wrong, listed):
            assert answer.headers["x-ratelimit-remaining-requests"] == "3", "what was refused before costs nothing"
        free = await door.complete(await door.add("free"))
        assert not [name for name in free.headers if name.startswith("x-ratelimit")]
        assert not [name for name in (await door.rig.client.get("/livez")).headers if name.startswith("x-ratelimit")]


async def test_over_a_rate_is_429_with_a_time_to_come_back(server: RedisServer) -> None:
    async with open_door(server) as door:
        acme = await door.add("acme", requests_per_minute=2)
        for stream in (False, True):
            assert (await door.complete(acme, stream=stream)).status_code == 200
        for stream in (False, True):
            answer = await door.complete(acme, stream=stream)
            error = error_of(answer)
            assert (answer.status_code, error["code"], error["type"]) == (
                429,
                "rate_limit_exceeded",
                "rate_limit_error",
            )
            assert 20 <= int(answer.headers["retry-after"]) <= 60
            said = f"2 a minute are allowed. Try again in {answer.headers['retry-after']} s."
            assert error["message"].endswith(said)
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert len(door.rig.backend.requests) == 2, "no group heard of the others"
        assert len(door.rig.ledger.rows) == 2, "and none of them owes a row"
        await door.rig.settle()
        assert door.metric("tenant_rejections", tenant="acme", reason="requests") == 2


async def test_retry_after_is_spread_and_bounded(server: RedisServer) -> None:
    async with open_door(server) as door:
        acme = await door.add("acme", requests_per_minute=1)
        await door.complete(acme)
        waits = [int((await door.complete(acme)).headers["retry-after"]) for _ in range(40)]
        assert max(waits) <= 60 and len(set(waits)) > 1


async def test_a_budget_that_is_gone_is_insufficient_quota(server: RedisServer) -> None:
    async with open_door(server) as door:
        acme = await door.add("acme", token_budget=10)
        assert (await door.complete(acme, max_tokens=8)).json()["usage"]["total_tokens"] == 14
        answer = await door.complete(acme)
        assert (answer.status_code, error_of(answer)["code"]) == (429, "insufficient_quota")
        assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers
        await door.admin("PATCH", "/acme", json={"token_budget": 100})
        assert (await door.complete(acme)).status_code == 200


async def test_a_client_that_leaves_gives_its_place_back_and_pays_what_it_got(server: RedisServer) -> None:
    async with open_door(server, manual=True) as door:
        acme = await door.add("acme", concurrency=1, tokens_per_minute=1000)
        leaving = asyncio.create_task(door.complete(acme, max_tokens=100, stream=True))
        await asyncio.wait_for(door.rig.backend.submitted.wait(), 30)
        assert (await door.complete(acme)).status_code == 429
        for _ in range(3):
            door.rig.backend.step()
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await door.rig.settle()
        (row,) = door.rig.ledger.rows
        assert (row.tenant, row.terminal, row.usage.completion_tokens) == ("acme", "abort", 3)
        again = asyncio.create_task(door.complete(acme, max_tokens=1))
        async with asyncio.timeout(30):
            while not again.done():
                door.rig.backend.step()
                await asyncio.sleep(0)
        assert again.result().status_code == 200
        left = int(again.result().headers["x-ratelimit-remaining-tokens"])
        assert 1000 - 9 - 7 <= left <= 1000 - 7, "100 were reserved, 9 were used; the minute fills meanwhile"
        await door.rig.settle()
        assert door.metric("tenant_tokens", tenant="acme", kind="completion") == 4


async def test_a_request_that_no_group_took_is_not_billed(server: RedisServer) -> None:
    async with open_door(server, refuse=QueueFull("full")) as door:
        acme = await door.add("acme", concurrency=1, tokens_per_minute=50)
        for _ in range(20):
            answer = await door.complete(acme, max_tokens=40)
            assert (answer.status_code, error_of(answer)["code"]) == (429, "slow_down")
        await door.rig.settle()
        assert {(row.terminal, row.usage.completion_tokens) for row in door.rig.ledger.rows} == {("rejected", 0)}
        assert door.metric("tenant_rejections", tenant="acme", reason="slow_down") == 20


async def test_n_and_prompts_are_reserved_together(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_door(server) as door:
        acme = await door.add("acme", token_budget=1000)
        granted: list[tuple[int, int]] = []
        admit = door.quota.admit

        async def noted(
            tenant: str, prompt_tokens: int, output_tokens: int, *, is_open_ended: bool = False
        ) -> Reservation:
            assert not is_open_ended, "completions have 16 tokens where they name none"
            granted.append((prompt_tokens, output_tokens))
            return await admit(tenant, prompt_tokens, output_tokens)

        monkeypatch.setattr(door.quota, "admit", noted)
        answer = await door.complete(acme, prompt=["hello"] * 2, n=3, max_tokens=10)
        assert answer.json()["usage"]["total_tokens"] == 2 * 6 + 2 * 3 * 10
        await door.rig.settle()
        assert granted == [(12, 60)]


async def test_chats_without_max_tokens_use_what_is_left_of_a_minute_below_the_context(server: RedisServer) -> None:
    async with open_door(server, script=fixed_script([100, 101, EOS])) as door:
        acme = await door.add("acme", tokens_per_minute=CONTEXT // 2)

        async def chat(**more: Any) -> int:
            answer = await door.rig.client.post("/v1/chat/completions", json={"messages": USER, **more}, headers=acme)
            await door.rig.settle()
            return answer.status_code

        assert [await chat() for _ in range(4)] == [200] * 4
        assert await chat(max_tokens=CONTEXT // 2) == 429, "who names a length must find it"
        assert await chat(max_tokens=5) == 200


async def test_tenants_share_no_cache_whatever_salt_they_send(server: RedisServer) -> None:
    async with open_door(server) as door:
        headers = [await door.add("acme"), await door.add("acme-b"), {}]
        for sent in headers[:2]:
            for salt in (None, "x", "b/x"):
                body = {} if salt is None else {"cache_salt": salt}
                assert (await door.complete(sent, **body)).status_code == 200
        salts = [request.cache_salt for request in door.rig.backend.requests]
        assert len(set(salts)) == 6
        assert salts[0] == "acme/"


async def test_a_tenants_priority_holds_where_a_request_names_none(server: RedisServer) -> None:
    async with open_door(server) as door:
        acme = await door.add("acme", priority=7)
        await door.complete(acme)
        await door.complete(acme, priority=0)
        assert [request.priority for request in door.rig.backend.requests] == [7, 0]
        assert {request.tenant for request in door.rig.backend.requests} == {"acme"}


async def test_the_admin_routes_do_what_the_command_does(server: RedisServer) -> None:
    async with open_door(server) as door:
        first = await door.add("acme", concurrency=2)
        await door.add("beta", weight=0.5)
        listed = (await door.admin("GET")).json()
        assert [entry["name"] for entry in listed["data"]] == ["acme", "beta"]
        assert "key" not in str(listed) and "digest" not in str(listed)
        changed = await door.admin("PATCH", "/acme", json={"concurrency": None, "requests_per_minute": 3})
        assert changed.json()["limits"]["concurrency"] is None
        assert (await door.admin("GET", "/acme")).json()["limits"]["requests_per_minute"] == 3
        rotated = await door.admin("POST", "/acme/rotate-key", json={})
        second = {"authorization": f"Bearer {rotated.json()['key']}"}
        assert (await door.complete(first)).status_code == 401
        assert (await door.complete(second)).status_code == 200
        assert (await door.admin("DELETE", "/acme")).json()["deleted"] is True
        assert (await door.complete(second)).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "", {"concurrency": 1}, 400, "name"),
        ("POST", "", {"name": "UPPER"}, 400, "name"),
        ("POST", "", {"name": "acme"}, 409, "name"),
        ("POST", "", {"name": "new", "limit": 3}, 400, "limit"),
        ("POST", "", {"name": "new", "store": False}, 400, "store"),
        ("POST", "", {"name": "new", "concurrency": "3"}, 400, "concurrency"),
        ("PATCH", "/acme", {"name": "other"}, 400, "name"),
        ("PATCH", "/nobody", {"concurrency": 1}, 404, "name"),
        ("GET", "/nobody", None, 404, "name"),
        ("DELETE", "/nobody", None, 404, "name"),
        ("POST", "/acme/rotate-key", {"grace_s": "9"}, 400, "grace_s"),
        ("POST", "/acme/rotate-key", {"grace_s": -1}, 400, "grace_s"),
        ("POST", "/acme/rotate-key", {"grace_s": 10**400}, 400, "grace_s"),
    ],
)
async def test_admin_requests_that_are_wrong(
    server: RedisServer, method: str, path: str, body: dict[str, Any] | None, status: int, param: str
) -> None:
    async with open_door(server) as door:
        await door.add("acme")
        answer = await door.admin(method, path, json=body)
        assert (answer.status_code, error_of(answer)["param"]) == (status, param)
        assert len((await door.admin("GET")).json()["data"]) == 1


async def test_admin_routes_are_for_admin_keys_only(server: RedisServer) -> None:
    async with open_door(server) as door:
        acme = await door.add("acme")
        for method, path in (("GET", ""), ("POST", ""), ("GET", "/acme"), ("PATCH", "/acme"), ("DELETE", "/acme")):
            answer = await door.rig.client.request(method, f"/admin/tenants{path}", headers=acme)
            assert (answer.status_code, error_of(answer)["code"]) == (403, "permission_denied")
            assert (await door.rig.client.request(method, f"/admin/tenants{path}")).status_code == 401


async def test_the_openapi_document_has_the_bodies_of_the_admin_routes() -> None:
    async with gateway() as rig:
        document = (await rig.client.get("/openapi.json")).json()
        made = document["paths"]["/admin/tenants"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert made == {"$ref": "#/components/schemas/TenantBody"}
        assert set(document["components"]["schemas"]["TenantBody"]["properties"]) >= {"name", "token_budget"}
        assert document["paths"]["/admin/tenants/{name}"]["patch"]["parameters"][0]["name"] == "name"


async def test_requests_go_on_when_redis_is_unavailable(server: RedisServer) -> None:
    async with open_door(server) as door:
        acme = await door.add("acme", requests_per_minute=4)  # the next one is there after 15 s
        assert (await door.complete(acme)).status_code == 200
        door.server.stop()
        answers = [(await door.complete(acme)).status_code for _ in range(6)]
        assert answers == [200] * 3 + [429] * 3, "bounded by what was left"
        refused = await door.complete({"authorization": "Bearer sk-unknown"})
        assert refused.status_code in (401, 503)
        changed = await door.admin("PATCH", "/acme", json={"concurrency": 1})
        assert (changed.status_code, error_of(changed)["code"]) == (503, "service_unavailable")
        assert (await door.complete({"authorization": "Bearer sk-unknown"})).status_code == 503
        door.server.start()
        assert (await door.admin("PATCH", "/acme", json={"concurrency": 1})).status_code == 200


async def test_with_an_admin_key_alone_nobody_else_passes(server: RedisServer) -> None:
    async with open_door(server) as door:
        assert (await door.complete({})).status_code == 401
        assert (await door.complete(ROOT)).status_code == 200
        await door.rig.settle()
        assert {row.tenant for row in door.rig.ledger.rows} == {"default"}
        assert (await door.complete(await door.add("acme"))).status_code == 200


async def test_only_admins_read_of_tenants_in_the_metrics(server: RedisServer) -> None:
    async with open_door(server) as door:
        acme = await door.add("acme")
        await door.complete(acme)
        await door.rig.settle()
        for headers, is_told in (({}, False), (acme, False), (ROOT, True)):
            answer = await door.rig.client.get("/metrics", headers=headers)
            assert answer.status_code == 200
            assert "tandem:http_requests_total" in answer.text
            assert ("acme" in answer.text) == is_told


async def test_an_open_service_hides_nothing_in_its_metrics() -> None:
    async with gateway() as rig:
        await rig.complete()
        await rig.settle()
        assert 'tenant="default"' in (await rig.client.get("/metrics")).text
