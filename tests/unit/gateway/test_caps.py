"""What all clients together may cost a gateway: bodies in flight, connections, answers that are held whole."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send

from tandem.cluster.gateway.http.draining import Draining
from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics
from tandem.cluster.gateway.http.http_server import HttpLimits, make_server
from tandem.cluster.gateway.http.middleware import SMALL_BYTES, Bodies, RequestMiddleware
from tandem.cluster.tenants.tenant_admission import Tenancy
from tandem.configs.schema import GatewaySettings
from tests.unit.gateway.rig import CHAT, COMPLETE, USER, Rig, error_of, gateway

DEADLINE_S = 30.0
JSON = {"content-type": "application/json"}


class Slow:
    """A body that comes in two pieces, the second when it is told to."""

    def __init__(self, first: bytes, rest: bytes) -> None:
        self._pieces = (first, rest)
        self.began, self.go_on = asyncio.Event(), asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._pieces[0]
        self.began.set()
        await self.go_on.wait()
        yield self._pieces[1]


def held(rig: Rig) -> Bodies:
    """The bodies that the app's middleware holds."""
    layer: Any = rig.app.middleware_stack
    while not hasattr(layer, "_bodies"):
        layer = layer.app
    bodies: Bodies = layer._bodies
    return bodies


async def test_large_bodies_leave_room_for_small_ones() -> None:
    limit = 8 * SMALL_BYTES
    async with gateway(settings=GatewaySettings(max_bodies_bytes=limit)) as rig:
        slow = Slow(b'{"prompt": "' + b"x" * (limit - SMALL_BYTES - 1000), b'", "max_tokens": 1}')
        first = asyncio.create_task(rig.client.post(COMPLETE, content=slow, headers=JSON))
        await asyncio.wait_for(slow.began.wait(), DEADLINE_S)
        large = await rig.complete(prompt="y" * (SMALL_BYTES + 1))
        assert (large.status_code, error_of(large)["code"]) == (503, "service_unavailable")
        assert (await rig.complete(prompt="y", max_tokens=1)).status_code == 200
        slow.go_on.set()
        await first
    assert held(rig).held == 0


async def test_bodies_in_flight_are_bounded_together() -> None:
    async with gateway(settings=GatewaySettings(max_bodies_bytes=1000)) as rig:
        assert (await rig.complete(max_tokens=1)).status_code == 200
        assert held(rig).held == 0
        slow = Slow(b'{"prompt": "' + b"x" * 700, b'", "max_tokens": 1}')
        first = asyncio.create_task(rig.client.post(COMPLETE, content=slow, headers=JSON))
        await asyncio.wait_for(slow.began.wait(), DEADLINE_S)
        assert 700 < held(rig).held < 1000
        refused = await rig.complete(prompt="y" * 400)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "service_unavailable")
        assert "1000 bytes" in error_of(refused)["message"] and int(refused.headers["retry-after"]) > 0
        assert (await rig.complete(prompt="y", max_tokens=1)).status_code == 200, "there is room for a small one"
        slow.go_on.set()
        assert (await first).status_code in (200, 400)
        assert held(rig).held == 0
        assert (await rig.complete(prompt="y" * 400, max_tokens=1)).status_code == 200


async def test_an_answer_that_has_begun_holds_no_body() -> None:
    seen: list[int] = []

    async def answer(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        seen.append(middleware._bodies.held)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append(middleware._bodies.held)

    async def body() -> Message:
        return {"type": "http.request", "body": b"x" * 700, "more_body": False}

    async def sent(_: Message) -> None:
        """Nobody reads it."""

    metrics = GatewayMetrics(CollectorRegistry(), "tandem", "m")
    middleware = RequestMiddleware(answer, metrics, Draining(), Tenancy(), max_bodies_bytes=1000)
    await middleware({"type": "http", "headers": []}, body, sent)
    assert seen == [700, 0] and middleware._bodies.held == 0


async def test_a_client_that_leaves_gives_its_body_back() -> None:
    async with gateway(settings=GatewaySettings(max_bodies_bytes=1000)) as rig:
        slow = Slow(b'{"prompt": "' + b"x" * 700, b"")
        asked = asyncio.create_task(rig.client.post(COMPLETE, content=slow, headers=JSON))
        await asyncio.wait_for(slow.began.wait(), DEADLINE_S)
        asked.cancel()
        await asyncio.wait({asked})
        assert held(rig).held == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_an_answer_that_is_held_whole_is_bounded(path: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 20, "n": 4, "logprobs": True, "top_logprobs": 5, "messages": USER}
    if path == COMPLETE:
        asked = {"max_tokens": 20, "n": 4, "logprobs": 5, "prompt": "x"}
    async with gateway(settings=GatewaySettings(max_answer_bytes=6_000)) as rig:
        answer = await rig.client.post(path, json=asked)
        assert (answer.status_code, error_of(answer)["code"]) == (413, "content_too_large")
        assert "6000 bytes" in error_of(answer)["message"] and "Stream it" in error_of(answer)["message"]
        await rig.settle()
        streamed = await rig.client.post(path, json={**asked, "stream": True})
        assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
        assert (await rig.client.post(path, json={**asked, "n": 1, "max_tokens": 2})).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETE, {"prompt_logprobs": 5}),
        (CHAT, {"prompt_logprobs": 5}),
        (COMPLETE, {"echo": True, "logprobs": 5}),
        (COMPLETE, {"best_of": 4, "logprobs": 5}),
        (COMPLETE, {"use_beam_search": True, "n": 4, "temperature": 0, "logprobs": 5}),
    ],
)
async def test_streaming_is_no_advice_where_it_is_refused(path: str, fields: dict[str, Any]) -> None:
    asked = {**({"messages": USER} if path == CHAT else {"prompt": "x" * 20}), "max_tokens": 20, **fields}
    async with gateway(settings=GatewaySettings(max_answer_bytes=1_000)) as rig:
        answer = await rig.client.post(path, json=asked)
        assert (answer.status_code, error_of(answer)["code"]) == (413, "content_too_large")
        assert "(--max-answer-bytes). Ask for fewer" in error_of(answer)["message"]
        assert (await rig.client.post(path, json={**asked, "stream": True})).status_code == 400


@contextlib.asynccontextmanager
async def serving(connections: int) -> AsyncIterator[int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)
    async with gateway() as rig:
        server = make_server(rig.app, shutdown_timeout_s=2, limits=HttpLimits(connections=connections))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await asyncio.wait_for(running, DEADLINE_S)
            listener.close()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
    return await asyncio.wait_for(reader.readuntil(b"\r\n"), DEADLINE_S)


async def test_connections_beyond_the_limit_are_told_so_and_closed() -> None:
    async with serving(connections=2) as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in opened:
            assert b"200" in await ask(reader, writer)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        said = await asyncio.wait_for(reader.read(), DEADLINE_S)
        assert said.startswith(b"HTTP/1.1 503 ") and b"2 connections" in said and b"connection: close" in said
        writer.close()
        opened[0][1].close()
        async with asyncio.timeout(DEADLINE_S):
            while True:  # until the server has seen that one has left
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                answer = await ask(reader, writer)
                writer.close()
                if b"200" in answer:
                    break
        opened[1][1].close()
