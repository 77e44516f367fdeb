"""Streams of background responses, in a real Redis: first-hand, read again from any gateway, and what ends them."""

import asyncio
import json
import random
import zlib
from typing import Any

import msgspec
import pytest

from tandem.cluster.gateway.generation.gateway_context import GatewayTimes
from tandem.cluster.gateway.http.sse import KEEP_ALIVE
from tandem.cluster.gateway.http.tasks import TaskOwner
from tandem.cluster.gateway.responses import background
from tandem.cluster.gateway.responses.events import event_log, event_stream
from tandem.cluster.gateway.responses.events.event_batch import Batch
from tandem.cluster.gateway.responses.response_store import ResponseStore, StoredResponse
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient
from tests.support.private_redis import private_redis
from tests.unit.gateway.rig import DEADLINE_S, Rig, error_of, gateway
from tests.unit.gateway.test_response_store import UNKNOWN, ByKey, check_sums, store_of, storing
from tests.unit.gateway.test_responses import FORMATS, PATH, SETTINGS, THOUGHT, WEATHER, ask, sse
from tests.unit.gateway.test_tool_calls import CALL, TEMPLATE, saying

READERS = 256


class Reader:
    """Reads one stream, over raw ASGI."""

    def __init__(self, rig: Rig, *, response_id: str = "", after: int | None = None, **body: Any) -> None:
        """response_id: whose events are read; else a response is made of the body."""
        self.got = b""
        self.status: int | None = None
        self.reads = True
        self._changed = asyncio.Event()
        self._gone = asyncio.Event()
        sent = json.dumps({"input": "hi", "background": True, "stream": True, **body}).encode()
        self._body: dict[str, Any] | None = {"type": "http.request", "body": b"" if response_id else sent}
        query = "stream=true" + ("" if after is None else f"&starting_after={after}")
        path = f"{PATH}/{response_id}" if response_id else PATH
        scope = {
            "type": "http",
            "method": "GET" if response_id else "POST",
            "path": path,
            "query_string": query.encode() if response_id else b"",
            "headers": [(b"authorization", b"Bearer acme"), (b"content-type", b"application/json")],
        }
        self.call = asyncio.create_task(rig.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        message, self._body = self._body, None
        if message is not None:
            return message
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"] and not self.reads:
            await asyncio.Event().wait()
        else:
            self.got += message["body"]
        self._changed.set()

    async def whole(self) -> bytes:
        """All that came, once the stream has ended."""
        await asyncio.wait_for(self.call, DEADLINE_S)
        assert self.status == 200, self.got
        return self.got

    async def leave(self) -> bytes:
        """What came until the client left."""
        self._gone.set()
        return await self.whole()

    async def until(self, *kinds: str) -> str:
        """The id of the response, once these events have come."""
        async with asyncio.timeout(DEADLINE_S):
            while not all(f"event: response.{kind}\n".encode() in self.got for kind in kinds):
                self._changed.clear()
                await self._changed.wait()
        return str(self.events[0]["response"]["id"])

    @property
    def events(self) -> list[dict[str, Any]]:
        return [
            json.loads(one.partition(b"\ndata: ")[2]) for one in self.got.split(b"\n\n") if one.startswith(b"event")
        ]


async def read(rig: Rig, response_id: str, after: int | None = None) -> bytes:
    """The rest of a stream."""
    return await Reader(rig, response_id=response_id, after=after).whole()


async def test_it_goes_on_without_its_client_and_is_read_again(redis: BackgroundClient) -> None:
    async with storing(redis, saying("yes", manual=True)) as rig, storing(redis) as other:
        first = Reader(rig)
        response_id = await first.until("created", "queued")
        assert [event["response"]["status"] for event in first.events] == ["queued", "queued"]
        await rig.backend.submitted.wait()
        rig.backend.step()
        await first.until("in_progress", "output_text.delta")
        assert rig.context.draining.in_flight == 2, "a gateway that drains waits for the response and for its reader"
        seen = await first.leave()
        later = Reader(other, response_id=response_id)
        await later.until("output_text.delta")
        rig.backend.step(9)
        whole = await later.whole()
        assert not rig.backend.aborts and whole.startswith(seen) and whole != seen
        events = sse(whole.decode())
        stored = (await other.client.get(f"{PATH}/{response_id}")).json()
        assert (events[-1]["type"], events[-1]["response"]) == ("response.completed", stored)
        await check_sums(redis)
        assert 50 < await redis.command("TTL", keys.response_events("acme", response_id)) <= 60
        assert (await other.client.delete(f"{PATH}/{response_id}")).status_code == 200
        assert not await redis.command("KEYS", "*:value:*"), "its events go with it"


async def test_each_rest_of_a_stream_is_the_same_bytes(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "BATCH_BYTES", 600)
    options: Any = {"settings": SETTINGS, "template": TEMPLATE, "text": FORMATS, "auth": ByKey()}
    async with gateway(saying(f"{THOUGHT}Look: {CALL}"), store=store_of(redis), **options) as rig:
        rig.client.headers["authorization"] = "Bearer acme"
        streamed = Reader(rig, tools=[WEATHER])
        whole = await streamed.whole()
        response_id = await streamed.until()
        assert await redis.command("XLEN", keys.response_events("acme", response_id)) > 3
        events = whole.split(b"\n\n")[:-1]
        assert len(sse(whole.decode())) == len(events) > 20
        rests = await asyncio.gather(*(read(rig, response_id, after) for after in range(len(events))))
        for after, rest in enumerate(rests):
            assert b"".join(event + b"\n\n" for event in events[: after + 1]) + rest == whole
        assert await read(rig, response_id) == whole and rests[-1] == b""
        assert await read(rig, response_id, 10**400) == b""
        plain = sse((await ask(rig, tools=[WEATHER], stream=True)).text)
        kinds = [event["type"] for event in streamed.events]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        assert kinds[3:] == [event["type"] for event in plain[2:]], "as without background"


async def test_what_has_no_events_is_refused(redis: BackgroundClient) -> None:
    async with storing(redis) as rig:
        stored = (await ask(rig)).json()["id"]
        unstreamed = (await ask(rig, background=True)).json()["id"]
        streamed = await (made := Reader(rig)).until("completed")
        await made.whole()
        assert not await redis.command("EXISTS", keys.response_events("acme", unstreamed)), "others cost nothing more"
        cases = [(one, "stream=true", "stream") for one in (stored, unstreamed)]
        cases += [(streamed, "starting_after=1", "starting_after"), (streamed, "stream=1", "stream")]
        cases += [(streamed, f"stream=true&starting_after={x}", "starting_after") for x in ("-1", "x", "1.0", "", "²")]
        for response_id, query, param in cases:
            refused = await rig.client.get(f"{PATH}/{response_id}?{query}")
            assert (refused.status_code, error_of(refused)["param"]) == (400, param), query
        message = error_of(await rig.client.get(f"{PATH}/{stored}?stream=true"))["message"]
        assert "background and stream" in message
        assert (await rig.client.get(f"{PATH}/{streamed}?stream=false")).json()["id"] == streamed
        assert (await rig.client.get(f"{PATH}/{UNKNOWN}?stream=true")).status_code == 404
        rig.client.headers["authorization"] = "Bearer other"
        assert (await rig.client.get(f"{PATH}/{streamed}?stream=true")).status_code == 404


@pytest.mark.parametrize("end", ["cancelled", "lost", "deleted", "failed"])
async def test_all_readers_learn_how_it_has_ended(
    end: str, redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "RENEW_S", 3600.0 if end == "lost" else 0.0)
    async with storing(redis, saying("yes", manual=True)) as rig, storing(redis) as other:
        first = Reader(rig)
        response_id = await first.until("queued")
        await rig.backend.submitted.wait()
        rig.backend.step(2)
        await first.until("output_text.delta")
        second = Reader(other, response_id=response_id)
        await second.until("output_text.delta")
        if end == "cancelled":
            await other.client.post(f"{PATH}/{response_id}/cancel")
        elif end == "lost":  # its gateway says nothing any more
            await redis.command("HSET", keys.response_state("acme", response_id), "until", 1, "doubted", 1)
        elif end == "deleted":
            await other.client.delete(f"{PATH}/{response_id}")
        else:
            rig.backend.lose_at_position = 3
            rig.backend.step(9)
        whole, again = await first.whole(), await second.whole()
        last = sse(whole.decode())[-1]
        if end == "deleted":
            assert (last["type"], last["code"]) == ("error", "response_not_found")
        else:
            assert again == whole
            status = "cancelled" if end == "cancelled" else "failed"
            assert (last["type"], last["response"]["status"]) == (f"response.{status}", status)
            assert last["response"] == (await other.client.get(f"{PATH}/{response_id}")).json()
            assert await read(other, response_id) == whole
        if end == "lost":
            await rig.client.get(f"{PATH}/{response_id}")  # or within RENEW_S
        assert await rig.context.tasks.wait_idle(DEADLINE_S), "and is not made any more"


async def test_a_response_that_has_no_room_for_its_events_has_failed(redis: BackgroundClient) -> None:
    noise = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=400))
    outcomes: list[str] = []
    async with storing(redis, saying("ok"), max_bytes=10**6) as rig:
        old = (await ask(rig)).json()["id"]
    async with storing(redis, saying(noise, manual=True), max_bytes=4000, count=outcomes.append) as rig:
        streamed = Reader(rig)
        response_id = await streamed.until("queued")
        await rig.backend.submitted.wait()
        async with asyncio.timeout(DEADLINE_S):
            while not streamed.call.done():
                rig.backend.step()
                await asyncio.sleep(0.001)
        last = sse((await streamed.whole()).decode())[-1]
        assert last["type"] == "response.failed" and "--response-store-bytes" in last["response"]["error"]["message"]
        assert last["response"] == (await rig.client.get(f"{PATH}/{response_id}")).json()
        assert await rig.context.tasks.wait_idle(DEADLINE_S) and rig.backend.aborts
        assert outcomes == ["too_large"]
        assert (await rig.client.get(f"{PATH}/{old}")).status_code == 404, "older ones go for it"
        assert 3000 < await check_sums(redis) <= 4000
        assert await read(rig, response_id) == streamed.got


async def test_room_is_counted_to_the_byte(redis: BackgroundClient) -> None:
    tasks, one = TaskOwner(), UNKNOWN
    queued, final = StoredResponse(b"{}", [], False), StoredResponse(b'{"status": "completed"}', [])
    value, whole = (len(zlib.compress(msgspec.msgpack.encode(stored), 1)) for stored in (queued, final))
    for most, outcome in ((value + 100, None), (value + 99, "too_large")):
        store = ResponseStore(redis, tasks, ttl_s=60, max_bytes=most)
        await store.begin("acme", one, await store.packed(queued), 1000, Batch(2, b"x" * 10))
        assert await check_sums(redis) == value + 10
        assert await store.append("acme", one, Batch(3, b"x" * 90)) == outcome
        assert await check_sums(redis) == value + (10 if outcome else 100)
        assert (await store.events("acme", one, 0)).is_running == (outcome is None)
        await store.delete("acme", one)
    for most, state in ((whole + 40, None), (whole + 39, "too_large")):
        store = ResponseStore(redis, tasks, ttl_s=60, max_bytes=most)
        await store.begin("acme", one, await store.packed(queued), 1000, Batch(2, b"x" * 10))
        assert await store.append("acme", one, Batch(3, b"x" * 30)) is None
        await store.settle("acme", one, await store.packed(final))
        assert await store.state("acme", one, "look") == state
        assert (await store.get("acme", one)).is_over == (state is None)
        assert await check_sums(redis) == 40 + (value if state else whole)
        assert await store.append("acme", one, Batch(4, b"x")) == (state or "gone")
        assert (await store.events("acme", one, 3)).batches == [Batch(3, b"x" * 30)]
        await store.delete("acme", one)
    assert not await redis.command("EXISTS", keys.response("acme", one), keys.response_events("acme", one))


async def test_generation_does_not_wait_for_redis(redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((background, "RENEW_S"), (event_log, "RETRY_S")):
        monkeypatch.setattr(module, name, 0.0)
    async with storing(redis, saying("yes, and no", manual=True)) as rig:
        streamed = Reader(rig)
        response_id = await streamed.until("queued")
        await rig.backend.submitted.wait()
        rig.backend.step()
        await streamed.until("output_text.delta")
        sizes = keys.response_sizes("acme")
        held = await redis.command("DUMP", sizes)
        await redis.command("SET", sizes, "of another type")  # every script that writes fails
        rig.backend.step(20)
        async with asyncio.timeout(DEADLINE_S):
            while rig.backend.streams:
                await asyncio.sleep(0)
        assert b"response.completed" not in streamed.got
        await redis.command("RESTORE", sizes, 0, held, "REPLACE")
        whole = await streamed.whole()
        assert sse(whole.decode())[-1]["response"]["output"][0]["content"][0]["text"] == "yes, and no"
        assert await read(rig, response_id) == whole
        await check_sums(redis)


async def test_a_batch_whose_reply_was_lost_is_kept_once(redis: BackgroundClient) -> None:
    class Repeating:
        """Runs each script twice."""

        async def command(self, *parts: Any) -> object:
            if parts[0] == "EVAL":
                await redis.command(*parts)
            return await redis.command(*parts)

        pipeline = redis.pipeline

    async with storing(Repeating(), saying("some text")) as rig:
        streamed = Reader(rig)
        whole = await streamed.whole()
        assert sse(whole.decode())[-1]["type"] == "response.completed"
        assert await read(rig, await streamed.until()) == whole
        await check_sums(redis)


async def test_readers_end_when_redis_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "SETTLE_S", 0.0)
    with private_redis() as server:
        redis = BackgroundClient(server.url, timeout_s=1.0, retries=0)
        async with storing(redis, saying("yes", manual=True)) as rig:
            streamed = Reader(rig)
            await streamed.until("queued")
            await rig.backend.submitted.wait()
            server.stop()
            monkeypatch.setattr(event_stream, "AWAY_S", 0.0)
            last = sse((await streamed.whole()).decode())[-1]
            assert (last["type"], last["code"]) == ("error", "service_unavailable")
            rig.backend.step(9)
            assert await rig.context.tasks.wait_idle(DEADLINE_S), "it is given up, and its lease ends"
        await redis.close()


async def test_a_gateway_that_ends_ends_readers_but_not_what_it_makes(redis: BackgroundClient) -> None:
    async with storing(redis, saying("yes", manual=True)) as rig, storing(redis) as other:
        here = Reader(rig)
        response_id = await here.until("queued")
        elsewhere = Reader(other, response_id=response_id)
        await elsewhere.until("queued")
        for one in (rig, other):
            one.context.draining.begin()
            one.context.draining.cut_off()
        last = sse((await elsewhere.whole()).decode())[-1]
        assert (last["type"], last["code"]) == ("error", "service_unavailable")
        assert other.context.draining.in_flight == 0
        await rig.backend.submitted.wait()
        rig.backend.step(9)
        assert sse((await here.whole()).decode())[-1]["type"] == "response.completed"


class Counting:
    """Counts the commands that wait at once."""

    def __init__(self, redis: BackgroundClient) -> None:
        self._redis = redis
        self._waiting = self.most = 0

    async def command(self, *parts: Any) -> object:
        self._waiting += 1
        self.most = max(self.most, self._waiting)
        try:
            return await self._redis.command(*parts)
        finally:
            self._waiting -= 1

    async def pipeline(self, commands: list[list[Any]]) -> list[object]:
        raise AssertionError


async def test_many_readers_take_few_connections_and_leave_nothing(redis: BackgroundClient) -> None:
    counting = Counting(redis)
    async with storing(redis, saying("yes", manual=True)) as rig, storing(counting) as other:
        response_id = await (first := Reader(rig)).until("queued")
        await rig.backend.submitted.wait()
        readers = [Reader(other, response_id=response_id) for _ in range(READERS)]
        for reader in readers:
            await reader.until("queued")
        counting.most = 0
        for reader in readers[::2]:
            await reader.leave()
        assert other.context.draining.in_flight == READERS // 2
        rig.backend.step(9)
        whole = await first.whole()
        assert [await reader.whole() for reader in readers[1::2]] == [whole] * (READERS // 2)
        assert counting.most < 16, "of a pool of 64"
        assert await other.context.tasks.wait_idle(DEADLINE_S) and other.context.draining.in_flight == 0


async def test_a_silent_stream_is_kept_alive_and_a_stuck_reader_is_left(redis: BackgroundClient) -> None:
    times = GatewayTimes(keep_alive_s=0.0, stuck_send_s=0.05)
    async with gateway(saying("yes", manual=True), auth=ByKey(), store=store_of(redis), times=times) as rig:
        reader = Reader(rig)
        response_id = await reader.until("queued")
        await rig.backend.submitted.wait()
        rig.backend.step()
        await reader.until("output_text.delta")
        async with asyncio.timeout(DEADLINE_S):
            while KEEP_ALIVE not in reader.got:
                await asyncio.sleep(0)
        stuck = Reader(rig, response_id=response_id)
        stuck.reads = False
        assert await stuck.whole() == b""
        rig.backend.step(9)
        await reader.whole()
        async with storing(redis) as other:
            assert KEEP_ALIVE not in await read(other, response_id), "comments are no events"
