"""Stored responses, in a real Redis: chains, lifetime, caps, privacy, losses."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.tasks import TaskOwner
from tandem.cluster.gateway.responses.response_items import MessageItem
from tandem.cluster.gateway.responses.response_store import ResponseStore, StoredResponse
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import RequestRefused
from tests.support.fake_backend import FakeBackend
from tests.support.private_redis import private_redis
from tests.unit.gateway.rig import Rig, error_of, gateway
from tests.unit.gateway.test_responses import PATH, ask, prompt_of, sse
from tests.unit.gateway.test_tool_calls import FORMATS, SETTINGS, TEMPLATE, saying

UNKNOWN = "resp_" + "0" * 32


class ByKey:
    """Each key is a tenant's name."""

    is_open = False

    def authenticate(self, authorization: str | None) -> Principal:
        return Principal((authorization or "").removeprefix("Bearer "), is_admin=False)

    def check_metrics(self, authorization: str | None) -> None:
        pass


def store_of(redis: Any, **limits: Any) -> Any:
    """What the rig takes."""
    return lambda tasks: ResponseStore(redis, tasks, **({"ttl_s": 60, "max_bytes": 10**6} | limits))


@asynccontextmanager
async def storing(redis: Any, backend: FakeBackend | None = None, **limits: Any) -> AsyncIterator[Rig]:
    async with gateway(backend or saying("yes"), auth=ByKey(), store=store_of(redis, **limits)) as rig:
        rig.client.headers["authorization"] = "Bearer acme"
        yield rig


async def test_a_conversation_goes_on_from_its_last_response(redis: BackgroundClient) -> None:
    async with storing(redis) as rig:
        first = (await ask(rig, input="one", instructions="Be kind.")).json()
        assert first["store"] is True
        second = sse((await ask(rig, input="two", previous_response_id=first["id"], stream=True)).text)[-1]["response"]
        assert prompt_of(rig) == "user:oneassistant:yesuser:two", "instructions are of one request"
        assert second["previous_response_id"] == first["id"]
        await ask(rig, input="three", previous_response_id=second["id"])
        assert prompt_of(rig) == "user:oneassistant:yesuser:twoassistant:yesuser:three"
        await ask(rig, input="other", previous_response_id=first["id"])
        assert prompt_of(rig) == "user:oneassistant:yesuser:other", "a response may be gone on from twice"


async def test_what_would_add_to_a_stored_response_is_ignored_and_named(redis: BackgroundClient) -> None:
    known = ("reasoning.encrypted_content", "message.output_text.logprobs", "file_search_call.results")
    async with storing(redis) as rig:
        stored = (await ask(rig, input="one")).json()
        for tail in ("", "/input_items"):
            place = f"{PATH}/{stored['id']}{tail}"
            plain = (await rig.client.get(place)).json()
            for name in ("include", "include[]", "include[0]"):
                for values in ([(name, one) for one in known], [(name, ",".join(known))]):
                    answer = await rig.client.get(place, params=values)
                    assert (answer.status_code, answer.json()) == (200, plain)
                    assert answer.headers["x-tandem-ignored"] == "include"
                refused = await rig.client.get(place, params=[(name, known[0]), (name, "everything")])
                assert (refused.status_code, error_of(refused)["param"]) == (400, "include")
                assert '"everything" is not one of message.output_text.logprobs, ' in error_of(refused)["message"]
            for value, named in (("true", "include_obfuscation"), ("false", None)):
                answer = await rig.client.get(place, params={"include_obfuscation": value})
                assert (answer.status_code, answer.headers.get("x-tandem-ignored")) == (200, named)
            wrong = await rig.client.get(place, params={"include_obfuscation": "x"})
            assert (wrong.status_code, error_of(wrong)["param"]) == (400, "include_obfuscation")
        streamed = await ask(rig, background=True, stream=True)
        first = sse(streamed.text)[0]["response"]["id"]
        again = await rig.client.get(f"{PATH}/{first}?stream=true&include[]={known[0]}")
        assert (again.text, again.headers["x-tandem-ignored"]) == (streamed.text, "include")
    async with gateway(auth=ByKey(), store=store_of(redis), settings=GatewaySettings(strict_fields=True)) as rig:
        strict = await rig.client.get(
            f"{PATH}/{stored['id']}?include={known[0]}", headers={"authorization": "Bearer acme"}
        )
        assert (strict.status_code, error_of(strict)["param"]) == (400, "include")


async def test_input_items_are_those_that_were_answered(redis: BackgroundClient) -> None:
    async with storing(redis) as rig:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c", "output": "3"}
        first = (await ask(rig, input=[{"role": "user", "content": "one"}, call, result])).json()
        second = (await ask(rig, input="two", previous_response_id=first["id"])).json()

        async def items(response_id: str, **query: Any) -> Any:
            return (await rig.client.get(f"{PATH}/{response_id}/input_items", params=query)).json()

        listed = await items(second["id"], order="asc")
        kinds = [item["type"] for item in listed["data"]]
        assert kinds == ["message", "function_call", "function_call_output", "message", "message"]
        assert listed["data"][0]["content"] == [{"type": "input_text", "text": "one"}]
        assert listed["data"][3]["id"] == first["output"][0]["id"] and listed["data"][3]["role"] == "assistant"
        assert (listed["object"], listed["has_more"]) == ("list", False)
        assert listed == await items(second["id"], order="asc"), "ids stay"
        newest = await items(second["id"], limit=2)
        assert newest["data"] == listed["data"][:2:-1] and newest["has_more"]
        rest = await items(second["id"], after=newest["last_id"])
        assert rest["data"] == listed["data"][2::-1] and not rest["has_more"]
        assert len((await items(first["id"]))["data"]) == 3
        for query, param in (({"limit": "0"}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after")):
            refused = await rig.client.get(f"{PATH}/{first['id']}/input_items", params=query)
            assert (refused.status_code, error_of(refused)["param"]) == (400, param)
        rig.client.headers["authorization"] = "Bearer other"
        hidden = await rig.client.get(f"{PATH}/{first['id']}/input_items")
        assert (hidden.status_code, error_of(hidden)["code"]) == (404, "response_not_found")


async def test_what_has_ended_cannot_be_cancelled(redis: BackgroundClient) -> None:
    async with storing(redis) as rig:
        first = (await ask(rig)).json()
        refused = await rig.client.post(f"{PATH}/{first['id']}/cancel")
        assert refused.status_code == 400 and "cannot be cancelled" in error_of(refused)["message"]
        unknown = await rig.client.post(f"{PATH}/{UNKNOWN}/cancel")
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "response_not_found")


async def test_a_call_that_was_cut_is_no_turn_of_the_next_request(redis: BackgroundClient) -> None:
    """The stored answer shows it; no template could render arguments that end in the middle."""
    text = '<call>weather {"city": "Par'
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    options = {"auth": ByKey(), "store": store_of(redis), "settings": SETTINGS, "template": TEMPLATE, "text": FORMATS}
    async with gateway(saying(text, ends=False), **options) as rig:
        rig.client.headers["authorization"] = "Bearer acme"
        cut = (await ask(rig, tools=[tool], max_output_tokens=len(text))).json()
        assert (cut["status"], cut["output"][-1]["arguments"]) == ("incomplete", '{"city": "Par')
        assert (await ask(rig, previous_response_id=cut["id"], max_output_tokens=5)).status_code == 200


async def test_a_deletion_whose_reply_is_lost_is_no_404(redis: BackgroundClient) -> None:
    """The client of Redis asks again then, as it does on a busy machine."""

    class Again:
        """Runs each script twice, and tells the second reply."""

        async def command(self, *parts: Any) -> object:
            if parts[0] == "EVAL":
                await redis.command(*parts)
            return await redis.command(*parts)

        async def pipeline(self, commands: Any) -> object:
            return await redis.pipeline(commands)

    async with storing(Again()) as rig:
        made = (await ask(rig, input="one")).json()
        assert (await rig.client.delete(f"{PATH}/{made['id']}")).json()["deleted"]
        assert (await rig.client.delete(f"{PATH}/{made['id']}")).status_code == 404
        assert (await rig.client.delete(f"{PATH}/resp_x")).status_code == 404


async def test_it_is_shown_and_deleted(redis: BackgroundClient) -> None:
    async with storing(redis) as rig:
        first = (await ask(rig)).json()
        second = (await ask(rig, previous_response_id=first["id"])).json()
        place = f"{PATH}/{first['id']}"
        assert (await rig.client.get(place)).json() == first
        assert error_of(await rig.client.get(f"{place}?include[]=x"))["param"] == "include"
        assert (await rig.client.delete(place)).json() == {"id": first["id"], "object": "response", "deleted": True}
        for method in ("GET", "DELETE"):
            gone = await rig.client.request(method, place)
            assert (gone.status_code, error_of(gone)["code"]) == (404, "response_not_found")
        assert (await ask(rig, previous_response_id=second["id"])).status_code == 200, "it has all of its conversation"


async def test_what_is_not_to_be_stored_is_not(redis: BackgroundClient) -> None:
    async with storing(redis) as rig:
        body = (await ask(rig, store=False)).json()
        assert body["store"] is False
        assert (await rig.client.get(f"{PATH}/{body['id']}")).status_code == 404
        rig.backend.lose_at_position = 1
        assert sse((await ask(rig, stream=True)).text)[-1]["type"] == "response.failed"
        assert await redis.command("KEYS", "tandem:responses:*") == []


async def test_another_tenants_response_is_unknown(redis: BackgroundClient) -> None:
    async with storing(redis) as rig:
        own = (await ask(rig)).json()["id"]
        rig.client.headers["authorization"] = "Bearer rival"
        seen = []
        for response_id in (own, UNKNOWN, "x", "resp_" + "*" * 32):
            answers = [
                await ask(rig, previous_response_id=response_id),
                await rig.client.get(f"{PATH}/{response_id}"),
                await rig.client.delete(f"{PATH}/{response_id}"),
            ]
            assert [answer.status_code for answer in answers] == [404] * 3
            assert error_of(answers[0])["param"] == "previous_response_id"
            seen.append([error_of(answer)["message"].replace(f"'{response_id}'", "ID") for answer in answers])
        assert all(messages == seen[0] for messages in seen)
        assert len(rig.backend.requests) == 1
        rig.client.headers["authorization"] = "Bearer acme"
        assert (await rig.client.get(f"{PATH}/{own}")).status_code == 200


async def test_each_has_a_lifetime_and_so_have_the_lists(redis: BackgroundClient) -> None:
    async with storing(redis, ttl_s=60) as rig:
        response_id = (await ask(rig)).json()["id"]
        for key in (keys.responses("acme"), keys.response_sizes("acme"), keys.response("acme", response_id)):
            assert 50 < await redis.command("TTL", key) <= 60
        await redis.command("ZADD", keys.responses("acme"), 1, response_id)
        await redis.command("DEL", keys.response("acme", response_id))
        assert (await ask(rig, previous_response_id=response_id)).status_code == 404
        await ask(rig)
        assert await redis.command("ZCARD", keys.responses("acme")) == 1, "what has expired leaves the lists"
        await check_sums(redis)


async def check_sums(redis: BackgroundClient) -> int:
    """The counted bytes are those of the values that are there; returns them."""
    names = [name.decode() for name in await redis.command("ZRANGE", keys.responses("acme"), 0, -1)]
    sizes = {name: await redis.command("STRLEN", keys.response("acme", name)) for name in names}
    for name in names:
        events = await redis.command("XRANGE", keys.response_events("acme", name), "-", "+")
        sizes[name] += sum(len(fields[b"batch"]) for _, fields in events)
    stored = await redis.command("HGETALL", keys.response_sizes("acme"))
    counted = {name.decode(): int(value) for name, value in stored.items()}
    assert counted == {**sizes, keys.RESPONSES_TOTAL: sum(sizes.values())}
    return sum(sizes.values())


async def test_beyond_a_cap_the_oldest_go(redis: BackgroundClient) -> None:
    tasks = TaskOwner()
    ids = [f"resp_{number:032x}" for number in range(12)]

    async def known(store: ResponseStore) -> list[str]:
        found = []
        for one in ids:
            with suppress(RequestRefused):
                await store.get("acme", one)
                found.append(one)
        return found

    few = ResponseStore(redis, tasks, ttl_s=60, max_bytes=10**6, max_responses=5)
    for number, one in enumerate(ids):
        await few.keep("acme", one, StoredResponse(b"{}", [MessageItem("user", f"text {number}")]))
    assert await known(few) == ids[-5:]
    small = ResponseStore(redis, tasks, ttl_s=60, max_bytes=200)
    for number, one in enumerate(ids):
        await small.keep("acme", one, StoredResponse(b"{}", [MessageItem("user", f"text {number}")]))
    kept = await known(small)
    assert 1 < len(kept) < 12 and kept == ids[-len(kept) :]
    assert await check_sums(redis) <= 200
    incompressible = bytes(range(256)).decode("latin-1") * 4
    await small.keep("acme", UNKNOWN[:-1] + "f", StoredResponse(b"{}", [MessageItem("user", incompressible)]))
    assert await known(small) == kept, "what is larger than the cap drives nobody out"
    await small.keep("acme", kept[0], StoredResponse(b"{}", []))
    await small.delete("acme", kept[0])
    assert await known(small) == kept[1:]
    await check_sums(redis)
    await tasks.close(30)


async def test_a_redis_that_lost_all_has_none(redis: BackgroundClient) -> None:
    async with storing(redis) as rig:
        lost = (await ask(rig)).json()["id"]
        await redis.command("FLUSHALL")
        assert error_of(await ask(rig, previous_response_id=lost))["code"] == "previous_response_not_found"
        again = (await ask(rig)).json()["id"]
        assert (await ask(rig, previous_response_id=again)).status_code == 200


async def test_what_cannot_be_read_is_not_there(redis: BackgroundClient) -> None:
    async with storing(redis) as rig:
        known = (await ask(rig)).json()["id"]
        for value in (b"x", zlib.compress(b"x"), zlib.compress(b"\x92\xc4\x02{}\x91\x01")):
            await redis.command("SET", keys.response("acme", known), value)
            assert (await ask(rig, previous_response_id=known)).status_code == 404


async def test_without_redis_answers_go_on() -> None:
    with private_redis() as server:
        redis = BackgroundClient(server.url, timeout_s=1.0, retries=1)
        async with storing(redis) as rig:
            known = (await ask(rig)).json()["id"]
            server.stop()
            for stream in (False, True):
                assert (await ask(rig, stream=stream)).status_code == 200
            for answer in (
                await ask(rig, previous_response_id=known),
                await rig.client.get(f"{PATH}/{known}"),
                await rig.client.delete(f"{PATH}/{known}"),
            ):
                assert (answer.status_code, error_of(answer)["code"]) == (503, "service_unavailable")
            assert (await rig.client.get(f"{PATH}/{known[:9]}")).status_code == 404
        await redis.close()


class SlowRedis:
    """Answers when told to."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.commands = 0

    async def command(self, *parts: Any) -> object:
        self.commands += 1
        await self.answers.wait()
        return None

    async def pipeline(self, commands: list[list[Any]]) -> list[object]:
        raise AssertionError


async def test_an_answer_does_not_wait_long_and_its_storing_goes_on() -> None:
    redis = SlowRedis()
    async with storing(redis) as rig:
        async with asyncio.timeout(20):
            assert (await ask(rig)).status_code == 200
        assert redis.commands == 1 and len(rig.context.tasks) >= 1
        redis.answers.set()


async def test_no_text_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with private_redis() as server:
        redis = BackgroundClient(server.url, timeout_s=1.0, retries=1)
        outcomes: list[str] = []
        async with storing(redis, max_bytes=10, count=outcomes.append) as rig:
            await ask(rig, input="a secret")
            server.stop()
        async with storing(redis, count=outcomes.append) as rig:
            await ask(rig, input="a secret")
        await redis.close()
    assert caplog.text.count("is not stored") == 2
    assert outcomes == ["too_large", "failed"]
    assert "secret" not in caplog.text
