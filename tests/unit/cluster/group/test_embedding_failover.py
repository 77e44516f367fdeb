"""An embedding request that loses its group is tried again in another, and is billed once."""

import asyncio
import struct
from typing import Any

import msgspec
import pytest

from tandem.cluster.gateway.generation import generation as generation_module
from tandem.cluster.wire.version import with_version
from tandem.workers.messages.request import NO_TOKENS, Ended, GenerationRequest, Pool, TokenDelta, Usage
from tests.support.plain_generation import Reading
from tests.unit.cluster.group.test_failover import FULL, LOST, Service, SlowEngine, Told, settled, until

PROMPT = [5, 6, 7]
EMBEDDING = struct.pack("<2f", 0.25, 4.0)


def asked(name: str = "r", **more: Any) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=PROMPT, sampling=NO_TOKENS, pool=Pool(), **more)


def embed(told: Told, number: int) -> None:
    """The group of that attempt sends the last delta."""
    request = told.groups.requests[number]
    delta = TokenDelta(
        request_id=request.request_id,
        attempt=request.attempt,
        choice=0,
        first_position=0,
        token_ids=[],
        finish_reason="stop",
        usage=Usage(3, 0),
        embedding=EMBEDDING,
    )
    told.client._on_deltas(f"g{number}:1".encode(), [delta])


async def embeddings_of(stream: Reading) -> list[bytes | None]:
    async with asyncio.timeout(60):
        return [delta.embedding for deltas in [step async for step in stream] for delta in deltas]


async def test_a_lost_group_changes_nothing_but_the_attempt() -> None:
    told = Told()
    stream = await told.client.submit(asked())
    first = await told.attempt(0)
    told.say(begun=True)
    told.end(*LOST, loss="suspect", group="g0")
    second = await told.attempt(1)
    assert second == msgspec.structs.replace(
        first, attempt=1, resume_token_ids=[[]], begun=True, suspect=True, reply_to=second.reply_to
    )
    embed(told, 1)
    assert await embeddings_of(stream) == [EMBEDDING]
    await stream.aclose()
    await settled(told.client)
    assert [(row.terminal, row.usage) for row in told.client.books.rows] == [("stop", Usage(3, 0, cached_tokens=5))]
    await told.client.close()


async def test_a_full_group_is_not_the_last_word() -> None:
    told = Told()
    stream = await told.client.submit(asked())
    await told.attempt(0)
    told.end(*FULL, group="g0")
    await told.attempt(1)
    embed(told, 1)
    assert await embeddings_of(stream) == [EMBEDDING]
    await stream.aclose()
    await told.client.close()


async def test_an_end_without_the_embedding_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's answer can come although its last delta was lost."""
    monkeypatch.setattr(generation_module, "GAP_S", 0.05)
    told = Told()
    stream = await told.client.submit(asked())
    request = await told.attempt(0)
    ended = Ended(request_id=request.request_id, attempt=0, positions=[0], finish_reasons=["stop"], usage=Usage(3, 0))
    told.groups.calls[0].set_result(with_version(msgspec.msgpack.encode(ended)))
    again = await told.attempt(1)
    assert (again.attempt, again.suspect, again.pool) == (1, False, Pool())
    embed(told, 1)
    assert await embeddings_of(stream) == [EMBEDDING]
    await stream.aclose()
    await told.client.close()


async def test_an_end_that_is_ahead_of_the_embedding_waits_for_it() -> None:
    told = Told()
    stream = await told.client.submit(asked())
    request = await told.attempt(0)
    ended = Ended(request_id=request.request_id, attempt=0, positions=[0], finish_reasons=["stop"], usage=Usage(3, 0))
    told.groups.calls[0].set_result(with_version(msgspec.msgpack.encode(ended)))
    await asyncio.sleep(0)
    embed(told, 0)
    assert await embeddings_of(stream) == [EMBEDDING] and len(told.groups.requests) == 1
    await stream.aclose()
    await told.client.close()


async def test_over_real_channels_the_embedding_comes_from_the_group_that_lives() -> None:
    async with Service() as service:
        dying = service.groups[0]
        SlowEngine.most = 0
        try:
            stream = await service.client.submit(asked())
            await until(lambda: dying.requests)
        finally:
            dying.die()
            SlowEngine.most = 10**9
        assert await embeddings_of(stream) == [struct.pack("<2f", 7, 3)]
        assert [request.pool for group in service.groups for request in group.requests] == [Pool()] * 2
        await stream.aclose()
        await settled(service.client)
        assert service.client.books.rows[0].usage == Usage(3, 0)


async def test_a_deadline_in_the_queue_ends_it_as_any_other() -> None:
    told = Told()
    stream = await told.client.submit(asked(deadline_s=30.0))
    assert (await told.attempt(0)).deadline_s == 30.0
    told.end(503, "service_unavailable", None, "the request waited 30 s without being served", group="g0")
    await told.attempt(1)
    told.end(503, "service_unavailable", None, "the request waited 30 s without being served", group="g1")
    with pytest.raises(Exception, match="waited 30 s"):
        await embeddings_of(stream)
    await stream.aclose()
    await told.client.close()
