"""Responses of the background, in a real Redis: how far they are, their ends, and who may end them."""

import asyncio
from typing import Any

import pytest

from tandem.cluster.gateway.responses import background
from tandem.cluster.gateway.responses.events import event_log
from tandem.cluster.gateway.responses.response_store import ResponseStore, StoredResponse
from tandem.cluster.gateway.serving import answer
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable
from tandem.workers.messages.errors import QueueFull
from tests.support.private_redis import private_redis
from tests.unit.gateway.rig import DEADLINE_S, Rig, error_of
from tests.unit.gateway.test_response_store import check_sums, storing
from tests.unit.gateway.test_responses import PATH, ask, prompt_of
from tests.unit.gateway.test_tool_calls import saying


async def begin(rig: Rig, **body: Any) -> dict[str, Any]:
    """A response that is queued."""
    answer = await ask(rig, background=True, **body)
    assert answer.status_code == 200, answer.text
    queued: dict[str, Any] = answer.json()
    assert (queued["status"], queued["background"], queued["output"], queued["store"]) == ("queued", True, [], True)
    return queued


async def show(rig: Rig, response: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = (await rig.client.get(f"{PATH}/{response['id']}")).json()
    assert shown | {"status": 0} == response | {"status": 0} or shown["status"] not in background.RUNNING
    return shown


async def until(rig: Rig, response: dict[str, Any], *statuses: str) -> dict[str, Any]:
    """The response, once it has one of these statuses."""
    async with asyncio.timeout(DEADLINE_S):
        while (shown := await show(rig, response))["status"] not in statuses:
            await asyncio.sleep(0)
    return shown


async def cancel(rig: Rig, response: dict[str, Any]) -> dict[str, Any]:
    answer = await rig.client.post(f"{PATH}/{response['id']}/cancel")
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


async def test_it_is_queued_made_and_gone_on_from(redis: BackgroundClient) -> None:
    async with storing(redis, saying("yes", manual=True)) as rig:
        queued = await begin(rig, input="one")
        await rig.backend.submitted.wait()
        assert (await show(rig, queued))["status"] == "queued"
        early = await ask(rig, previous_response_id=queued["id"])
        assert (early.status_code, error_of(early)["param"]) == (400, "previous_response_id")
        rig.backend.step()
        assert (await until(rig, queued, "in_progress"))["output"] == []
        assert rig.context.draining.in_flight == 1, "a gateway that drains waits for it"
        rig.backend.step(9)
        final = await until(rig, queued, "completed")
        assert final["output"][0]["content"][0]["text"] == "yes" and final["usage"]["output_tokens"] == 4
        assert await rig.context.tasks.wait_idle(DEADLINE_S) and rig.context.draining.in_flight == 0
        assert await cancel(rig, queued) == final, "what has ended stays as it is"
        rig.backend.manual = False
        assert (await ask(rig, input="two", previous_response_id=queued["id"])).status_code == 200
        assert prompt_of(rig) == "user:oneassistant:yesuser:two"
        await check_sums(redis)
        assert not await redis.command("EXISTS", keys.response_state("acme", queued["id"]))


async def test_it_is_cancelled_through_any_gateway(redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RENEW_S", 0.0)
    for through_other in (False, True):
        async with storing(redis, saying("yes", manual=True)) as rig, storing(redis) as other:
            queued = await begin(rig)
            await rig.backend.submitted.wait()
            rig.backend.step(2)
            await until(rig, queued, "in_progress")
            assert (await cancel(other if through_other else rig, queued))["status"] == "cancelled"
            assert await rig.context.tasks.wait_idle(DEADLINE_S), "it has ended here too"
            assert rig.backend.aborts and rig.ledger.rows[0].completion_tokens == 2, "and was billed"
            for one in (rig, other):
                assert (await show(one, queued))["status"] == "cancelled"
                assert (await cancel(one, queued))["status"] == "cancelled"
            assert (await ask(rig, previous_response_id=queued["id"])).status_code == 400
            rig.client.headers["authorization"] = "Bearer other"
            hidden = await rig.client.post(f"{PATH}/{queued['id']}/cancel")
            assert hidden.status_code == 404
            rig.client.headers["authorization"] = "Bearer acme"
            assert (await rig.client.delete(f"{PATH}/{queued['id']}")).status_code == 200
            assert not await redis.command("KEYS", "*:value:*"), "its state goes with it"


async def test_one_that_is_deleted_ends(redis: BackgroundClient) -> None:
    async with storing(redis, saying("yes", manual=True)) as rig:
        queued = await begin(rig)
        await rig.backend.submitted.wait()
        assert (await rig.client.delete(f"{PATH}/{queued['id']}")).status_code == 200
        assert await rig.context.tasks.wait_idle(DEADLINE_S) and rig.backend.aborts
        assert (await rig.client.get(f"{PATH}/{queued['id']}")).status_code == 404


async def test_one_whose_gateway_has_died_has_failed_for_good(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway that seems to be dead ends its own, and does not store it, when it comes back."""
    async with storing(redis, saying("yes", manual=True)) as rig:
        queued = await begin(rig)
        await rig.backend.submitted.wait()
        await redis.command("HSET", keys.response_state("acme", queued["id"]), "until", 1, "doubted", 1)
        lost = await show(rig, queued)
        assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")
        assert await rig.context.tasks.wait_idle(DEADLINE_S) and rig.backend.aborts
        assert await show(rig, queued) == lost
    async with storing(redis, saying("yes", manual=True)) as rig:
        queued = await begin(rig)
        await rig.backend.submitted.wait()
        await redis.command("HSET", keys.response_state("acme", queued["id"]), "state", "lost")
        rig.backend.step(9)
        assert await rig.context.tasks.wait_idle(DEADLINE_S)
        assert (await show(rig, queued))["status"] == "failed", "another gateway has found it lost"


async def test_a_lease_is_renewed(redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RENEW_S", 0.0)
    async with storing(redis, saying("yes", manual=True)) as rig:
        queued = await begin(rig)
        state = keys.response_state("acme", queued["id"])
        first = await redis.command("HGET", state, "until")
        async with asyncio.timeout(DEADLINE_S):
            while await redis.command("HGET", state, "until") == first:
                await asyncio.sleep(0)
        rig.backend.step(9)
        await until(rig, queued, "completed")


async def test_what_fails_says_so(redis: BackgroundClient) -> None:
    async with storing(redis, saying("some text")) as rig:
        rig.backend.lose_at_position = 3
        failed = await until(rig, await begin(rig), "failed")
        assert failed["error"]["code"] == "server_error" and failed["error"]["message"]
    async with storing(redis) as rig:
        rig.backend.refuse = QueueFull("full")
        failed = await until(rig, await begin(rig), "failed")
        assert failed["error"]["code"] == "rate_limit_exceeded"
    async with storing(redis, saying("a long text", ends=False)) as rig:
        cut = await until(rig, await begin(rig, max_output_tokens=3), "incomplete")
        assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_what_cannot_be_made_is_refused(redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async with storing(redis) as rig:
        refused = await ask(rig, background=True, store=False)
        assert (refused.status_code, error_of(refused)["param"]) == (400, "background")
        monkeypatch.setattr(answer, "Generation", None)  # one that is made holds its adapter until it has run
        with monkeypatch.context() as patch:
            patch.setattr(background, "MOST", 0)
            assert (await ask(rig, background=True)).status_code == 429
    async with storing(redis, max_bytes=10) as rig:
        refused = await ask(rig, background=True)
        assert (refused.status_code, error_of(refused)["code"]) == (413, "content_too_large")
        assert not rig.backend.requests and not rig.context.draining.in_flight


class Noticing:
    """A client of a Redis that comes and goes. failed: is set by each command that found it away."""

    def __init__(self, url: str) -> None:
        self._redis = BackgroundClient(url, timeout_s=1.0, retries=0)
        self.failed = asyncio.Event()

    async def command(self, *parts: Any) -> object:
        try:
            return await self._redis.command(*parts)
        except RedisUnavailable:
            self.failed.set()
            raise

    async def pipeline(self, commands: list[list[Any]]) -> list[object]:
        raise AssertionError

    async def is_away(self) -> None:
        """Returns once a command has found it away."""
        self.failed.clear()
        await asyncio.wait_for(self.failed.wait(), DEADLINE_S)

    async def close(self) -> None:
        await self._redis.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_it_waits_for_redis_at_its_begin_and_end_and_between(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((background, "RENEW_S"), (event_log, "RETRY_S")):
        monkeypatch.setattr(module, name, 0.01)
    with private_redis() as server:
        redis = Noticing(server.url)
        async with storing(redis, saying("yes", manual=True)) as rig:
            server.stop()
            asked = asyncio.create_task(ask(rig, background=True, **({"stream": True} if stream else {})))
            await redis.is_away()
            server.start()
            await asyncio.wait_for(rig.backend.submitted.wait(), DEADLINE_S)
            (queued,) = [{"id": one.id} for one in rig.ledger.opened]
            path = f"{PATH}/{queued['id']}"

            server.stop()
            rig.backend.step()  # its first token
            await redis.is_away()
            server.start()
            async with asyncio.timeout(DEADLINE_S):
                while (await rig.client.get(path)).json().get("status") != "in_progress":
                    await asyncio.sleep(0)

            server.stop()
            rig.backend.step(9)
            async with asyncio.timeout(DEADLINE_S):
                while rig.backend.streams:
                    await asyncio.sleep(0)
            await redis.is_away()
            assert (await rig.client.get(path)).status_code == 503
            server.start()
            async with asyncio.timeout(DEADLINE_S):
                while (shown := (await rig.client.get(path)).json()).get("status") == "in_progress":
                    await asyncio.sleep(0)
            assert (shown["status"], shown["output"][0]["content"][0]["text"]) == ("completed", "yes")
            answer = await asyncio.wait_for(asked, DEADLINE_S)
            assert answer.status_code == 200
            assert not stream or answer.text.count("event: response.completed") == 1
        await redis.close()


async def test_a_lease_that_ended_while_redis_was_away_is_doubted_before_it_counts(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may look before its gateway is heard again."""
    monkeypatch.setattr(background, "RENEW_S", 3600.0)
    async with storing(redis, saying("yes", manual=True)) as rig, storing(redis) as other:
        queued = await begin(rig)
        await rig.backend.submitted.wait()
        state = keys.response_state("acme", queued["id"])
        await redis.command("HSET", state, "until", 1)
        for _ in range(2):
            assert (await show(other, queued))["status"] == "queued"
        assert await redis.command("HEXISTS", state, "doubted")
        rig.backend.step()
        await until(other, queued, "in_progress")
        assert not await redis.command("HEXISTS", state, "doubted"), "it was heard"
        rig.backend.step(9)
        await until(other, queued, "completed")


async def test_without_redis_none_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BEGIN_S", 0.0)
    with private_redis() as server:
        redis = BackgroundClient(server.url, timeout_s=1.0, retries=0)
        async with storing(redis) as rig:
            server.stop()
            assert (await ask(rig, background=True)).status_code == 503
            assert not rig.backend.requests and not rig.context.draining.in_flight
        await redis.close()


async def test_a_begin_waits_no_longer_than_it_may_and_says_why_it_failed(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answering:
        """A client of a Redis that never answers, or does."""

        def __init__(self, *, ever: bool) -> None:
            self._ever = ever
            self.asked = 0

        async def command(self, *parts: Any) -> object:
            self.asked += 1
            if not self._ever:
                await asyncio.Event().wait()
            return await redis.command(*parts)

        pipeline = redis.pipeline

    await redis.command("SET", keys.response_sizes("acme"), "of another type")  # every script fails
    for ever, patience_s, why in ((False, 0.01, "Redis is away"), (True, 3600.0, "Redis refuses it")):
        monkeypatch.setattr(background, "BEGIN_S", patience_s)
        client = Answering(ever=ever)
        async with storing(client) as rig:
            refused = await asyncio.wait_for(ask(rig, background=True), DEADLINE_S)
            error = error_of(refused)
            assert (refused.status_code, error["code"], client.asked) == (503, "service_unavailable", 1)
            assert f"cannot be stored now, because {why}," in error["message"] and "read" not in error["message"]
            assert not rig.backend.requests and not rig.context.draining.in_flight


async def test_one_that_cannot_be_stored_is_tried_again_until_it_is(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "RENEW_S", 0.0)
    packs: list[StoredResponse] = []
    packed = ResponseStore.packed

    async def pack(store: ResponseStore, stored: StoredResponse) -> bytes:
        packs.append(stored)
        return await packed(store, stored)

    monkeypatch.setattr(ResponseStore, "packed", pack)
    tries, settled = 0, ResponseStore.settle

    async def settle(store: ResponseStore, tenant: str, response_id: str, value: bytes) -> None:
        nonlocal tries
        tries += 1
        await settled(store, tenant, response_id, value)

    monkeypatch.setattr(ResponseStore, "settle", settle)
    async with storing(redis, saying("yes", manual=True)) as rig:
        queued = await begin(rig)
        await rig.backend.submitted.wait()
        value = await redis.command("GET", keys.response("acme", queued["id"]))
        sizes = keys.response_sizes("acme")
        held = await redis.command("DUMP", sizes)
        await redis.command("SET", sizes, "of another type")  # every script fails
        rig.backend.step(9)
        async with asyncio.timeout(DEADLINE_S):
            while tries < 3:
                await asyncio.sleep(0)
        assert await redis.command("GET", keys.response("acme", queued["id"])) == value
        await redis.command("RESTORE", sizes, 0, held, "REPLACE")
        await until(rig, queued, "completed")
        assert [stored.is_over for stored in packs] == [False, True], "once, however often it is tried"
