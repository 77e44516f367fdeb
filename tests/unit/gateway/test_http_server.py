"""What one connection may cost: raw sockets against the server that `tandem serve` opens, with short deadlines."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from tandem.cluster.gateway.http.http_server import HttpLimits, make_server
from tests.support.passing_time import pass_time

DEADLINE_S = 30.0
SHORT_S = 0.15
"""A limit that is to be reached."""
PATIENT_S = 2.5
"""One that is to be kept, on a machine that is slow or stands still for a moment, and outlasted by what has another:
then it is the loop's time that passes."""
LIMIT = HttpLimits().head_bytes


class Echo:
    """Answers with the method, the path, the number of headers and the size of the body; /slow waits to be told."""

    def __init__(self) -> None:
        self.calls = 0
        self.left = 0
        self.received = 0
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls += 1
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            size += len(message["body"])
            self.received += len(message["body"])
            if not message["more_body"]:
                break
        if scope["path"] == "/slow":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first,", "more_body": True})
            await self.go_on.wait()
            await send({"type": "http.response.body", "body": b"last", "more_body": False})
            return
        body = json.dumps([scope["method"], scope["path"][:32], len(scope["headers"]), size]).encode()
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


@contextlib.asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[tuple[Echo, int]]:
    """The server on a free port in this loop."""
    app = Echo()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)
    server = make_server(app, shutdown_timeout_s=2, limits=HttpLimits(**limits))  # type: ignore[arg-type]
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield app, listener.getsockname()[1]
    finally:
        app.go_on.set()
        server.should_exit = True
        await asyncio.wait_for(running, DEADLINE_S)
        listener.close()


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await asyncio.wait_for(self.writer.drain(), DEADLINE_S)

    async def flood(self, data: bytes, pause_s: float = 0.0) -> int:
        """Sends until the connection is gone; how many bytes that took."""
        sent = 0
        with contextlib.suppress(OSError):
            async with asyncio.timeout(DEADLINE_S) as deadline:
                while True:
                    await self.send(data)
                    sent += len(data)
                    await asyncio.sleep(pause_s)
        assert not deadline.expired(), "still open"
        return sent

    async def until_closed(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), DEADLINE_S)

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """One answer with a content-length: status, headers, JSON body."""
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)).decode()
        lines = head.strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        body = await asyncio.wait_for(self.reader.readexactly(int(headers["content-length"])), DEADLINE_S)
        return int(lines[0].split()[1]), headers, json.loads(body)

    async def refused(self, status: int, code: str) -> None:
        """The contract's body, then the end of the connection."""
        got, headers, body = await self.answer()
        assert got == status
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
        assert (body["error"]["code"], body["error"]["param"]) == (code, None)
        assert headers["connection"] == "close" and headers["x-request-id"]
        assert headers["content-type"] == "application/json"
        assert await self.until_closed() == b""


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def outlast(limit_s: float) -> None:
    """Every timer of that limit has run, and what it does is done."""
    for _ in range(12):
        pass_time(limit_s / 10)
        await asyncio.sleep(0.001)


GET = b"GET /x HTTP/1.1\r\nhost: h\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(GET + b"a: " + b"v" * LIMIT, id="one value"),
        pytest.param(GET + b"n" * LIMIT, id="one name"),
        pytest.param(GET + b"a: b\r\n" * (LIMIT // 6), id="many headers"),
        pytest.param(b"GET /" + b"p" * LIMIT, id="path"),
        pytest.param(b"\r\n" * LIMIT, id="empty lines"),
    ],
)
async def test_a_head_beyond_the_limit_gets_431(head: bytes) -> None:
    async with serving() as (app, port), connected(port) as client:
        for start in range(0, len(head), 5000):
            await client.send(head[start : start + 5000])
        await client.refused(431, "content_too_large")
        assert app.calls == 0


async def test_a_complete_head_in_one_read_may_not_exceed_the_limit_either() -> None:
    async with serving() as (app, port), connected(port) as client:
        await client.send(GET + b"a: " + b"v" * LIMIT + b"\r\n\r\n")
        await client.refused(431, "content_too_large")
        assert app.calls == 0


async def test_the_largest_head_is_served() -> None:
    async with serving() as (_, port), connected(port) as client:
        start = GET + b"a: "
        await client.send(start + b"v" * (LIMIT - len(start) - 4) + b"\r\n\r\n")
        status, _, body = await client.answer()
        assert (status, body) == (200, ["GET", "/x", 2, 0])


async def test_a_client_that_only_sends_is_cut_off() -> None:
    async with serving(linger_s=DEADLINE_S) as (app, port), connected(port) as client:
        assert await client.flood(b"a" * 65536) < 60 * 2**20
        assert app.calls == 0


async def test_a_refused_client_that_stays_is_cut_off() -> None:
    async with serving(linger_s=SHORT_S) as (_, port), connected(port) as client:
        await client.send(GET + b"a: " + b"v" * LIMIT)
        assert (await client.until_closed()).startswith(b"HTTP/1.1 431 ")
        await client.flood(b"v", pause_s=SHORT_S / 10)


@pytest.mark.parametrize("sent", [b"", b"GET /x HTTP/1.1\r\n", GET + b"a: b", b"\r\n"])
async def test_a_head_that_does_not_end_closes_the_connection(sent: bytes) -> None:
    began_s = time.monotonic()
    async with serving(head_s=SHORT_S) as (app, port), connected(port) as client:
        await client.send(sent)
        assert await client.until_closed() == b""
        assert time.monotonic() - began_s >= SHORT_S * 0.9
        assert app.calls == 0


async def test_single_bytes_do_not_buy_time() -> None:
    async with serving(head_s=SHORT_S) as (_, port), connected(port) as client:
        closed = asyncio.create_task(client.until_closed())
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(OSError):
                while not closed.done():
                    await client.send(b"\r\n")
                    await asyncio.sleep(SHORT_S / 20)
        with contextlib.suppress(OSError):
            assert await closed == b""


async def test_the_second_head_of_a_connection_has_the_same_limits() -> None:
    async with serving(head_s=PATIENT_S) as (app, port), connected(port) as client:
        await client.send(GET + b"\r\n")
        assert (await client.answer())[0] == 200
        await client.send(GET + b"a: " + b"v" * LIMIT)
        await client.refused(431, "content_too_large")
        assert app.calls == 1
        async with connected(port) as other:
            await other.send(GET + b"\r\n")
            assert (await other.answer())[0] == 200
            await other.send(GET)
            closed = asyncio.create_task(other.until_closed())
            while not closed.done():
                pass_time(PATIENT_S / 10)
                await asyncio.sleep(0.001)
            assert await closed == b""


async def test_a_running_answer_is_not_cut_by_the_start_of_a_next_request() -> None:
    async with serving(head_s=PATIENT_S) as (app, port), connected(port) as client:
        await client.send(b"GET /slow HTTP/1.1\r\nhost: h\r\n\r\n")
        await asyncio.wait_for(client.reader.readuntil(b"first,"), DEADLINE_S)
        await client.send(b"\r\n")
        await outlast(PATIENT_S)  # whenever it was read
        await outlast(PATIENT_S)
        app.go_on.set()
        await asyncio.wait_for(client.reader.readuntil(b"last\r\n0\r\n\r\n"), DEADLINE_S)


async def test_no_answer_is_written_into_a_running_one() -> None:
    async with serving() as (app, port), connected(port) as client:
        await client.send(b"GET /slow HTTP/1.1\r\nhost: h\r\n\r\n" + GET + b"a: " + b"v" * (2 * LIMIT))
        text = await client.until_closed()
        assert b"431" not in text and b"0\r\n\r\n" not in text
        assert app.calls == 1


async def test_what_is_not_http_gets_the_contracts_400() -> None:
    async with serving() as (_, port), connected(port) as client:
        await client.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        await client.refused(400, "invalid_value")


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param(b"0\r\n" + b"a: b\r\n" * (LIMIT // 3), id="trailers"),
        pytest.param(b"0\r\na: " + b"b" * (2 * LIMIT), id="one trailer"),
        pytest.param(b"1;" + b"e" * (2 * LIMIT), id="chunk extension"),
    ],
)
async def test_framing_without_content_is_bounded(rest: bytes) -> None:
    async with serving() as (app, port), connected(port) as client:
        await client.send(CHUNKED + b"3\r\nabc\r\n" + rest)
        await client.refused(431, "content_too_large")
        async with asyncio.timeout(DEADLINE_S):
            while app.left < app.calls:
                await asyncio.sleep(0)


async def test_trailers_are_dropped() -> None:
    async with serving() as (_, port), connected(port) as client:
        await client.send(CHUNKED + b"3\r\nabc\r\n0\r\na: b\r\n\r\n")
        assert (await client.answer())[2] == ["POST", "/x", 2, 3]


async def test_large_bodies_pass_whole_and_in_many_chunks() -> None:
    size = 3 * 2**20
    async with serving() as (_, port), connected(port) as client:
        await client.send(b"POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        assert (await client.answer())[2] == ["POST", "/x", 2, size]
        await client.send(CHUNKED + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
        assert (await client.answer())[2] == ["POST", "/x", 2, 50_000]


@pytest.mark.parametrize("limits", [{"body_s": SHORT_S}, {"body_total_s": SHORT_S}])
async def test_a_body_that_stops_closes_the_connection(limits: dict[str, float]) -> None:
    async with serving(**limits) as (app, port), connected(port) as client:
        await client.send(b"POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\nabc")
        assert await client.until_closed() == b""
        assert (app.calls, app.left) == (1, 1)


async def test_a_slow_body_is_served_while_it_moves_and_not_for_ever() -> None:
    head = b"POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: 20\r\n\r\n"
    async with serving(body_s=PATIENT_S) as (app, port), connected(port) as client:
        await client.send(head)
        for sent in range(1, 21):
            await client.send(b"x")
            async with asyncio.timeout(DEADLINE_S):
                while app.received < sent:
                    await asyncio.sleep(0)
            pass_time(PATIENT_S / 16)
        assert (await client.answer())[2][3] == 20
    async with serving(body_total_s=SHORT_S) as (app, port), connected(port) as client:
        await client.send(head)
        closed = asyncio.create_task(client.until_closed())
        with contextlib.suppress(OSError):
            for _ in range(19):
                await client.send(b"x")
                await asyncio.sleep(SHORT_S / 5)
                if closed.done():
                    break
        await asyncio.wait({closed}, timeout=DEADLINE_S)
        assert closed.done() and app.left == 1
        await asyncio.gather(closed, return_exceptions=True)


async def test_ordinary_clients_notice_nothing() -> None:
    """Pauses between requests are longer than the limits of each."""
    async with serving(head_s=PATIENT_S, body_s=PATIENT_S) as (app, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for _ in range(2):
                assert (await client.post("/x", content=b"abc")).json()[3] == 3
                await outlast(PATIENT_S)
            answers = await asyncio.gather(*(client.get(f"/{i}") for i in range(20)))
        assert [answer.json()[1] for answer in answers] == [f"/{i}" for i in range(20)]
        assert app.calls == 22


async def test_nothing_is_upgraded() -> None:
    async with serving() as (_, port), connected(port) as client:
        key = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n"
        await client.send(GET + b"connection: upgrade\r\nupgrade: websocket\r\n" + key + b"\r\n")
        assert (await client.answer())[0] == 200
