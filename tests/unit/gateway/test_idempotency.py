"""Idempotency-Key in a real Redis: one answer and one bill, whoever asks again and whenever."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tandem.cluster.gateway.idempotency import key_store, keyed_requests
from tandem.cluster.gateway.idempotency.key_store import KeyStore
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.workers.messages.errors import QueueFull
from tests.support.fake_backend import FakeBackend
from tests.unit.gateway.batch_rig import BATCHES, SOON_S, batching, line
from tests.unit.gateway.rig import CHAT, COMPLETE, DEADLINE_S, EMBED, EOS, MODEL, USER, Rig, error_of, events, gateway
from tests.unit.gateway.test_files import Away
from tests.unit.gateway.test_response_store import ByKey

ASKED = {"prompt": "hello", "max_tokens": 5}


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_requests, "LOOK_S", SOON_S)
    monkeypatch.setattr(keyed_requests, "RENEW_S", SOON_S)


@asynccontextmanager
async def keyed(redis: Any, *, is_manual: bool = False, **more: Any) -> AsyncIterator[Rig]:
    backend = FakeBackend(eos_token_ids=frozenset({EOS}), manual=is_manual)
    async with gateway(backend, auth=ByKey(), keys=KeyStore(redis, 60), **more) as rig:
        rig.client.headers["authorization"] = "Bearer acme"
        yield rig


async def post(rig: Rig, key: str | None, path: str = COMPLETE, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"idempotency-key": key}
    return await rig.client.post(path, json={**({} if path != COMPLETE else ASKED), **body}, headers=headers)


async def finished(rig: Rig, *tasks: "asyncio.Future[Any]") -> None:
    """Steps a manual backend until these are done."""
    async with asyncio.timeout(DEADLINE_S):
        while not all(task.done() for task in tasks):
            rig.backend.step()
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_request_gets_the_same_bytes(redis: BackgroundClient, stream: bool) -> None:
    bodies: dict[str, dict[str, Any]] = {
        COMPLETE: {"stream": stream, "n": 2},
        CHAT: {"stream": stream, "messages": USER, "max_tokens": 5},
        "/v1/responses": {"stream": stream, "input": "x", "max_output_tokens": 5},
        "/v1/messages": {"stream": stream, "messages": USER, "max_tokens": 5, "model": MODEL},
        EMBED: {"input": "x"},
    }
    async with keyed(redis) as rig, keyed(redis) as other:
        for number, (path, body) in enumerate(bodies.items(), 1):
            first = await post(rig, "k" + path, path, **body)
            assert first.status_code == 200 and "idempotent-replayed" not in first.headers, first.text
            for through in (rig, other):
                again = await post(through, "k" + path, path, **body)
                assert (again.status_code, again.content) == (200, first.content)
                assert again.headers["content-type"] == first.headers["content-type"]
                assert again.headers["idempotent-replayed"] == "true"
                assert again.headers["x-request-id"] != first.headers["x-request-id"]
            assert len(rig.backend.requests) == len(rig.ledger.rows) == number and not other.backend.requests
        assert (await post(rig, None)).json()["id"] != (await post(rig, None)).json()["id"]


async def test_a_key_is_of_one_request_and_one_tenant(redis: BackgroundClient) -> None:
    async with keyed(redis) as rig:
        first = (await post(rig, "a")).json()
        for path, body in ((COMPLETE, {"max_tokens": 6}), (EMBED, {"input": "x"})):
            refused = await post(rig, "a", path, **body)
            assert (refused.status_code, error_of(refused)["code"]) == (409, "idempotency_key_reused")
        rig.client.headers["authorization"] = "Bearer other"
        assert (await post(rig, "a", max_tokens=6)).json()["id"] != first["id"]
        assert {row.tenant for row in rig.ledger.rows} == {"acme", "other"}


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_comes_while_the_first_runs_waits(redis: BackgroundClient, stream: bool) -> None:
    async with keyed(redis, is_manual=True) as rig, keyed(redis) as other:
        first = asyncio.ensure_future(post(rig, "a", stream=stream))
        await rig.backend.submitted.wait()
        waiting = [asyncio.ensure_future(post(one, "a", stream=stream)) for one in (rig, other)]
        refused = await post(other, "a", stream=stream, max_tokens=6)
        assert refused.status_code == 409
        await asyncio.sleep(3 * SOON_S)  # looks
        assert not any(one.done() for one in waiting)
        await finished(rig, first, *waiting)
        assert len({one.result().content for one in (first, *waiting)}) == 1
        assert len(rig.backend.requests) == 1 and not other.backend.requests


async def test_what_was_begun_is_made_without_its_client(redis: BackgroundClient) -> None:
    async with keyed(redis, is_manual=True) as rig:
        first = asyncio.ensure_future(post(rig, "a"))
        await rig.backend.submitted.wait()
        first.cancel()
        again = asyncio.ensure_future(post(rig, "a"))
        await finished(rig, again)
        assert again.result().json()["usage"]["completion_tokens"] == 5
        assert len(rig.backend.requests) == 1 and [row.completion_tokens for row in rig.ledger.rows] == [5]
        assert await rig.context.tasks.wait_idle(DEADLINE_S) and not rig.context.draining.in_flight


async def test_what_fails_may_be_tried_again(redis: BackgroundClient) -> None:
    async with keyed(redis) as rig:
        assert (await post(rig, "bad", temperature=-1)).status_code == 400
        assert (await post(rig, "bad")).status_code == 200, "nothing was done for the key"
        rig.backend.refuse = QueueFull("full")
        assert (await post(rig, "busy")).status_code == 429
        rig.backend.refuse = None
        assert "idempotent-replayed" not in (await post(rig, "busy")).headers
        rig.backend.lose_at_position = 2
        lost = events((await post(rig, "lost", stream=True)).text)
        assert "error" in lost[-2]
        rig.backend.lose_at_position = None
        whole = await post(rig, "lost", stream=True)
        assert "error" not in events(whole.text)[-2] and "idempotent-replayed" not in whole.headers
        for key in ("", "x" * 256, "größe".encode("latin-1")):
            refused = await rig.client.post(COMPLETE, json=ASKED, headers={"idempotency-key": key})
            assert (refused.status_code, error_of(refused)["param"]) == (400, "Idempotency-Key")


async def test_an_answer_that_is_not_kept_runs_again_as_the_same(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_requests, "MAX_ANSWER_BYTES", 100)
    async with keyed(redis) as rig:
        body = {"n": 2, "temperature": 1.0}
        first, again = await post(rig, "a", **body), await post(rig, "a", **body)
        assert first.json()["id"] == again.json()["id"] and "idempotent-replayed" not in again.headers
        one, two = rig.backend.requests
        assert one.request_id == two.request_id and one.sampling.seed == two.sampling.seed
        assert two.attempt >= keyed_requests.ATTEMPTS > one.attempt
        rig.ledger.rows.pop(), rig.ledger.opened.pop()  # Redis would have the row once: its id is its place


async def test_one_whose_gateway_is_lost_runs_again_as_the_same(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who seems to be lost answers its client, and stores nothing."""
    async with keyed(redis, is_manual=True) as rig, keyed(redis) as other:
        monkeypatch.setattr(keyed_requests, "RENEW_S", 100.0)
        first = asyncio.ensure_future(post(rig, "a"))
        await rig.backend.submitted.wait()
        (place,) = await redis.command("KEYS", "tandem:idempotency:{acme}:[0-9a-f]*")
        await redis.command("HSET", place, "until", 1)
        again = await post(other, "a")
        one, two = rig.backend.requests[0], other.backend.requests[0]
        assert (one.request_id, one.sampling.seed) == (two.request_id, two.sampling.seed)
        await finished(rig, first)
        assert first.result().json()["choices"] == again.json()["choices"]
        assert (await post(rig, "a")).content == again.content
        assert key_store.LEASE_MS > 1000 * 2


async def test_without_redis_a_key_is_refused() -> None:
    async with keyed(Away()) as rig:
        assert (await post(rig, "a")).status_code == 503
        assert (await post(rig, None)).status_code == 200
    async with gateway() as rig:
        refused = await post(rig, "a")
        assert (refused.status_code, error_of(refused)["param"]) == (400, "Idempotency-Key")
        assert "--idempotency-ttl" in error_of(refused)["message"]


async def test_a_batch_is_made_once(redis: BackgroundClient) -> None:
    async with batching(redis, keys=KeyStore(redis, 60)) as batches:
        given = await batches.upload([line("a")])
        asked = {"input_file_id": given["id"], "endpoint": COMPLETE, "completion_window": "24h"}
        made = [
            (await batches.rig.client.post(BATCHES, json=asked, headers={"idempotency-key": "b"})).json()["id"]
            for _ in range(2)
        ]
        assert made[0] == made[1]
        await batches.until({"id": made[0]})
