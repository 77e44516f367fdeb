"""Idempotency-Key where something goes wrong: clients that do not read, replies and gateways that are lost, and tenants
that ask for too much."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.cluster.gateway.generation.gateway_context import GatewayTimes
from tandem.cluster.gateway.idempotency import again_limits, keyed_requests
from tandem.cluster.gateway.idempotency.again_limits import AgainLimits
from tandem.cluster.gateway.idempotency.client_side import PIECE_BYTES, ClientSide
from tandem.cluster.gateway.idempotency.key_store import KEY_BYTES, Claim, KeyStore, StoredAnswer, key_place
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable
from tandem.cluster.tenants.tenant import Limits
from tandem.cluster.tenants.tenant_admission import OverLimit, Tenancy
from tandem.workers.messages.errors import RequestRefused
from tests.unit.gateway.batch_rig import BATCHES, SOON_S, batching, line
from tests.unit.gateway.rig import COMPLETE, DEADLINE_S, Rig, error_of, served
from tests.unit.gateway.test_idempotency import finished, keyed, post

ANSWER = StoredAnswer([("content-type", "text/plain")], b"0123456789")
PLACE = key_place("acme", "a")


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_requests, "LOOK_S", SOON_S)
    monkeypatch.setattr(keyed_requests, "RENEW_S", SOON_S)


class Twice:
    """A client whose first reply to each script is lost, so that its library runs it again."""

    def __init__(self, redis: BackgroundClient) -> None:
        self._redis = redis

    async def command(self, *parts: Any) -> Any:
        if parts[0] == "EVAL":
            await self._redis.command(*parts)
        return await self._redis.command(*parts)

    async def pipeline(self, commands: Any) -> Any:
        return await self._redis.pipeline(commands)


async def claimed(store: KeyStore, key: str = "a") -> Claim:
    claim = await store.claim(key_place("acme", key), b"digest")
    assert isinstance(claim, Claim), claim
    return claim


# ---- clients that do not read, and that leave ----


@dataclass
class RawClient:
    """A client of the app itself, that takes the head of an answer, and then nothing."""

    is_stuck: asyncio.Event = field(default_factory=asyncio.Event)
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self, rig: Rig, key: str, **body: Any) -> "asyncio.Task[None]":
        sent = json.dumps(body, separators=(",", ":")).encode()  # as httpx
        messages = [{"type": "http.request", "body": sent, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await self.is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                self.is_stuck.set()
                await asyncio.Event().wait()

        names = {"authorization": "Bearer acme", "content-type": "application/json", "idempotency-key": key}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": COMPLETE,
            "raw_path": COMPLETE.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in names.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        return asyncio.create_task(rig.app(scope, receive, send))  # type: ignore[arg-type]


async def test_an_answer_is_made_for_a_client_that_does_not_read(redis: BackgroundClient) -> None:
    """Its network is gone without a word: it is let go, its answer is not."""
    client, asked = RawClient(), {"prompt": "hello", "max_tokens": 5, "stream": True}
    times = GatewayTimes(keep_alive_s=0.01, stuck_send_s=0.02)
    async with keyed(redis, is_manual=True, times=times) as rig:
        first = client.ask(rig, "a", **asked)
        await asyncio.wait_for(rig.backend.submitted.wait(), DEADLINE_S)
        rig.backend.step()
        await asyncio.wait_for(client.is_stuck.wait(), DEADLINE_S)
        await asyncio.wait_for(first, DEADLINE_S)
        assert len(rig.backend.streams) == 1, "it is still made"
        again = asyncio.ensure_future(post(rig, "a", **asked))
        await finished(rig, again)
        assert again.result().headers["idempotent-replayed"] == "true"
        assert [row.completion_tokens for row in rig.ledger.rows] == [5]


async def test_a_long_answer_that_nobody_reads_is_given_up(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a socket: uvicorn tells nobody that a client has left, who does not ask."""
    monkeypatch.setattr(keyed_requests, "MAX_ANSWER_BYTES", 300)
    async with keyed(redis, is_manual=True) as rig, served(rig.app) as url:
        asked = {"prompt": "x" * 200, "max_tokens": 200, "stream": True}
        reader, writer = await _posted(url, "a", asked)
        await asyncio.wait_for(rig.backend.submitted.wait(), DEADLINE_S)
        beginning = asyncio.ensure_future(reader.readuntil(b"data: "))
        await finished(rig, beginning)
        writer.close()
        async with asyncio.timeout(DEADLINE_S):
            while rig.context.draining.in_flight > 1:  # its connection, and the making of its answer
                await asyncio.sleep(0.001)
            while not rig.backend.aborts:
                rig.backend.step()
                await asyncio.sleep(0.001)
        await rig.settle()
        (row,) = rig.ledger.rows
        assert row.completion_tokens < 200
        assert not await redis.command("EXISTS", keys.idempotency(*PLACE)), "sent again it is a new request"


async def _posted(url: str, key: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    sent = json.dumps(body, separators=(",", ":")).encode()  # as httpx
    head = (
        f"POST {COMPLETE} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer acme\r\nidempotency-key: {key}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(sent)}\r\n\r\n"
    )
    writer.write(head.encode() + sent)
    return reader, writer


async def test_a_client_that_reads_slowly_gets_all_and_slows_down_only_what_is_long() -> None:
    client, taken, may_read = ClientSide(3 * PIECE_BYTES, DEADLINE_S), list[Any](), asyncio.Semaphore(0)

    async def send(message: Any) -> None:
        await may_read.acquire()
        taken.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    body = bytes(range(256)) * (2 * PIECE_BYTES // 256) + b"end"
    serving = asyncio.create_task(client.serve(receive, send))
    await client.put({"type": "http.response.start", "status": 200})
    await client.put({"type": "http.response.body", "body": body, "more_body": True})
    late = asyncio.create_task(client.put({"type": "http.response.body", "body": body, "more_body": True}))
    may_read.release(), may_read.release(), may_read.release()
    while len(taken) < 3:
        await asyncio.sleep(0)
    assert not late.done() and not serving.done()
    may_read.release()
    await asyncio.wait_for(late, DEADLINE_S)
    await client.put({"type": "http.response.body", "body": body, "more_body": False})  # nothing waits for the end
    for _ in range(6):
        may_read.release()
    assert await asyncio.wait_for(serving, DEADLINE_S)
    pieces = taken[1:]
    assert b"".join(piece["body"] for piece in pieces) == 3 * body
    assert [piece["more_body"] for piece in pieces] == [True] * 8 + [False]
    assert max(len(piece["body"]) for piece in pieces) == PIECE_BYTES


# ---- replies and gateways that are lost ----


async def test_scripts_that_run_twice_do_what_they_do_once(redis: BackgroundClient) -> None:
    store = KeyStore(Twice(redis), 60)
    claim = await claimed(store)
    assert claim.run == 1
    assert await store.renew(claim)
    await store.store(claim, ANSWER)
    assert await KeyStore(redis, 60).answer(PLACE) == ANSWER
    size = await redis.command("HGET", keys.idempotency_sizes("acme"), PLACE.id)
    assert await redis.command("HGET", keys.idempotency_sizes("acme"), "@total") == size
    await store.forget(await claimed(store, "b"))
    assert await redis.command("ZCARD", keys.idempotency_keys("acme")) == 1
    async with keyed(Twice(redis)) as rig:
        assert (await post(rig, "c")).content == (await post(rig, "c")).content
        assert len(rig.backend.requests) == 1


async def test_a_key_lives_as_long_as_its_request_runs(redis: BackgroundClient) -> None:
    store = KeyStore(redis, 60)
    claim = await claimed(store)
    for key in (keys.idempotency(*PLACE), keys.idempotency_keys("acme"), keys.idempotency_sizes("acme")):
        await redis.command("PEXPIRE", key, 5_000)
    assert await store.renew(claim)
    assert await redis.command("PTTL", keys.idempotency(*PLACE)) > 50_000
    assert await redis.command("PTTL", keys.idempotency_keys("acme")) > 50_000
    await redis.command("FLUSHALL")
    assert not await store.renew(claim), "whoever runs it learns that others do not know it"


async def test_a_key_that_redis_has_lost_is_told_of_once(
    redis: BackgroundClient, caplog: pytest.LogCaptureFixture
) -> None:
    async with keyed(redis, is_manual=True) as rig:
        first = asyncio.ensure_future(post(rig, "a"))
        await asyncio.wait_for(rig.backend.submitted.wait(), DEADLINE_S)
        await redis.command("FLUSHALL")
        async with asyncio.timeout(DEADLINE_S):
            while "not held any more" not in caplog.text:
                await asyncio.sleep(0.001)
        await finished(rig, first)
        assert first.result().status_code == 200
        caplog.clear()
        second = asyncio.ensure_future(post(rig, "b"))
        await finished(rig, second)
        assert not caplog.text, "one that has ended is held no more, as it should be"


async def test_a_batch_is_made_once_by_two_gateways(redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first dies between the batch and its answer."""
    store = KeyStore(redis, 60)

    async def dies(*_: Any) -> None:
        raise RedisUnavailable("it dies here")

    async with batching(redis, keys=store) as batches:
        given = await batches.upload([line("a")])
        asked = {"input_file_id": given["id"], "endpoint": COMPLETE, "completion_window": "24h"}

        async def make() -> Any:
            answer = await batches.rig.client.post(BATCHES, json=asked, headers={"idempotency-key": "a"})
            assert "idempotent-replayed" not in answer.headers
            return answer.json()

        with monkeypatch.context() as lost:
            lost.setattr(store, "store", dies)
            first = await make()
        await batches.until(first)
        await redis.command("HSET", keys.idempotency(*PLACE), "until", 1)
        assert await make() == first
        assert len((await batches.rig.client.get(BATCHES)).json()["data"]) == 1


# ---- tenants that ask for too much ----


async def test_answers_of_a_tenant_have_a_number_of_bytes(redis: BackgroundClient) -> None:
    large = StoredAnswer(ANSWER.headers, random.Random(0).randbytes(2 * KEY_BYTES))
    store = KeyStore(redis, 60, max_bytes=5 * KEY_BYTES)
    sizes, ends = keys.idempotency_sizes("acme"), keys.idempotency_keys("acme")
    await store.store(await claimed(store), large)
    size = int(await redis.command("HGET", sizes, "@total"))
    assert 2 * KEY_BYTES < size < 2.5 * KEY_BYTES
    await store.store(await claimed(store, "b"), large)
    before = await claimed(store, "c")
    await store.store(before, large)
    after = await claimed(store, "c")
    assert (after.nonce, after.run) == (before.nonce, 2), "it is not kept, and runs again as the same"
    assert int(await redis.command("HGET", sizes, "@total")) == 2 * size
    await redis.command("ZADD", ends, 1, PLACE.id)  # its life is over
    await store.store(after, large)
    assert await store.claim(key_place("acme", "c"), b"digest") == "answer"
    assert int(await redis.command("HGET", sizes, "@total")) == 2 * size
    assert await redis.command("HLEN", sizes) == 3 and await redis.command("ZCARD", ends) == 2


async def test_a_tenant_has_a_number_of_keys(redis: BackgroundClient) -> None:
    store = KeyStore(redis, 60, max_bytes=2 * KEY_BYTES)
    first, _ = await claimed(store), await claimed(store, "b")
    with pytest.raises(RequestRefused, match="2 Idempotency-Keys") as refused:
        await claimed(store, "c")
    assert refused.value.status == 429
    assert await store.claim(key_place("acme", "b"), b"digest") == "wait", "those that are there go on"
    assert isinstance(await store.claim(key_place("other", "c"), b"digest"), Claim)
    await store.forget(first)
    await claimed(store, "c")


class Limited(Tenancy):
    """Gives acme two requests a minute."""

    def limits(self, tenant: str) -> Limits:
        return Limits(requests_per_minute=2 if tenant == "acme" else None)


async def test_what_is_sent_again_counts_against_a_limit(redis: BackgroundClient) -> None:
    now = [0.0]
    async with keyed(redis, tenancy=Limited(), clock=lambda: now[0]) as rig:
        first = await post(rig, "a")
        assert [(await post(rig, "a")).content for _ in range(2)] == [first.content] * 2
        refused = await post(rig, "a")
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 30
        now[0] = 30.0
        assert (await post(rig, "a")).content == first.content
        rig.client.headers["authorization"] = "Bearer other"
        assert len({(await post(rig, "a")).json()["id"] for _ in range(5)}) == 1


async def test_few_wait_at_a_time_and_look_ever_more_rarely(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(again_limits, "MOST_WAITING", 1)
    looks, is_waiting = _counted(redis)
    async with keyed(looks, is_manual=True) as rig:
        first = asyncio.ensure_future(post(rig, "a"))
        await asyncio.wait_for(rig.backend.submitted.wait(), DEADLINE_S)
        second = asyncio.ensure_future(post(rig, "a"))
        await asyncio.wait_for(is_waiting.wait(), DEADLINE_S)
        assert (await post(rig, "a")).status_code == 429
        await finished(rig, first, second)
        assert first.result().content == second.result().content
        assert (await post(rig, "a")).status_code == 200, "its place is free again"
    monkeypatch.undo()
    pauses = keyed_requests.look_pauses_s()
    assert [next(pauses) for _ in range(6)] == [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]


def _counted(redis: BackgroundClient) -> tuple[Any, asyncio.Event]:
    """A client that says when a request was told to wait."""
    is_waiting = asyncio.Event()

    class Watched:
        async def command(self, *parts: Any) -> Any:
            found = await redis.command(*parts)
            if found == [b"wait"]:
                is_waiting.set()
            return found

        pipeline = staticmethod(redis.pipeline)

    return Watched(), is_waiting


def test_limits_of_a_tenant_may_change() -> None:
    given: dict[str, Limits] = {}
    most: Callable[[str], Limits] = lambda tenant: given.get(tenant, Limits())  # noqa: E731
    again = AgainLimits(most, lambda: 0.0)
    for limits, allowed in ((Limits(requests_per_minute=1), 1), (Limits(requests_per_minute=3), 3)):
        given["acme"] = limits
        for _ in range(allowed):
            again.count("acme")
        with pytest.raises(OverLimit):
            again.count("acme")
    del given["acme"]
    again.count("acme")
