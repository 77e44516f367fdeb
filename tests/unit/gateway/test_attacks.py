"""Attacks on a gateway's port: bad requests by the thousand, slow clients, very many, very large bodies.

All the while and after each one the same process gives a known prompt its known tokens, and its memory is bounded.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tandem.configs.schema import GatewaySettings
from tests.support.bad_requests import check_error, send_bad_requests
from tests.support.plain_http import plain_http
from tests.support.service import wait_for
from tests.unit.gateway.listener import (
    ADMIN_HEADERS,
    API_KEY,
    KNOWN_ANSWER,
    USER_HEADERS,
    gateway_process,
    known_tokens,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3000)]
MIB = 2**20
BODY = GatewaySettings().max_body_bytes
BODIES = GatewaySettings().max_bodies_bytes
DEADLINE_S = 120.0
PARSED = 24
"""Bytes of Python objects that a byte of JSON becomes, at most: a list of empty lists or objects."""


class Attacked:
    """A gateway in a process of its own."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self.url, self.process = url, process
        self.port = urlsplit(url).port


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """One gateway for all attacks; at the end nothing of them is left in it, and it has logged nothing."""
    with gateway_process(tmp_path_factory.mktemp("adapters")) as (url, process):
        yield Attacked(url, process)


class Memory:
    """Resident bytes of the gateway, sampled while it is entered: at the beginning, at most, at the end."""

    def __init__(self, attacked: Attacked) -> None:
        self._gateway = attacked.process
        self._ends = threading.Event()

    def __enter__(self) -> "Memory":
        self.before = self.most = self._gateway.memory_info().rss
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.after = self._gateway.memory_info().rss

    def _run(self) -> None:
        while not self._ends.wait(0.02):
            self.most = max(self.most, self._gateway.memory_info().rss)

    def __str__(self) -> str:
        return f"{self.before / MIB:.0f} MiB, at most {self.most / MIB:.0f}, then {self.after / MIB:.0f}"


@contextlib.contextmanager
def alive(attacked: Attacked) -> Iterator[list[float]]:
    """Asks for the known tokens before, all the while and after; yields how long each answer took, in seconds."""
    took: list[float] = []
    wrong: list[str] = []
    assert known_tokens(attacked.url) == KNOWN_ANSWER
    ends = threading.Event()

    def ask() -> None:
        is_over = False
        while not is_over:  # at least once: some attacks are over at once
            began_s = time.monotonic()
            try:
                if known_tokens(attacked.url, timeout_s=DEADLINE_S) != KNOWN_ANSWER:
                    wrong.append("other tokens")
            except (httpx.HTTPError, AssertionError) as error:
                wrong.append(repr(error))
            took.append(time.monotonic() - began_s)
            is_over = ends.wait(0.2)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield took
    finally:
        ends.set()
        thread.join()
    assert known_tokens(attacked.url) == KNOWN_ANSWER
    assert not wrong and took, wrong[:3]


def test_five_thousand_bad_requests(attacked: Attacked) -> None:
    assert known_tokens(attacked.url) == KNOWN_ANSWER
    document = plain_http.get(f"{attacked.url}/openapi.json").json()
    with Memory(attacked) as memory:
        seen, broken = send_bad_requests(attacked.url, document, [ADMIN_HEADERS] * 6 + [USER_HEADERS] * 2 + [{}], 5000)
    assert not broken, "\n".join(broken)
    assert sum(seen.values()) >= 5000
    assert known_tokens(attacked.url) == KNOWN_ANSWER
    print(f"{seen}\ngateway: {memory}")
    assert memory.after < memory.before + 64 * MIB, memory


async def trickle(port: int, start: bytes, period_s: float) -> tuple[float, bytes]:
    """Sends `start` and then a byte every period_s until the server ends it: after how many seconds, what it said."""
    began_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = asyncio.create_task(reader.read(65536))
    with contextlib.suppress(OSError):
        writer.write(start)
        while not heard.done():
            writer.write(b"x")
            await writer.drain()
            await asyncio.wait({heard}, timeout=period_s)
    said = b""
    with contextlib.suppress(OSError):
        said = await asyncio.wait_for(heard, DEADLINE_S)
    writer.close()
    return time.monotonic() - began_s, said


HEAD = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {API_KEY}\r\n".encode()
SLOW_BODY = HEAD + b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n"


@pytest.mark.parametrize(
    ("start", "said"), [(HEAD + b"x-slow: ", b""), (SLOW_BODY, b"HTTP/1.1 408 ")], ids=["head", "body"]
)
def test_slow_clients_end_in_bounded_time(attacked: Attacked, start: bytes, said: bytes) -> None:
    """Slowloris: 500 clients that send a byte a second each. The limits are 10 s of a head and 60 s of a body."""

    async def attack() -> list[tuple[float, bytes]]:
        return await asyncio.gather(*(trickle(attacked.port, start, 1.0) for _ in range(500)))

    with alive(attacked) as took, Memory(attacked) as memory:
        ended = asyncio.run(attack())
    longest_s = max(after_s for after_s, _ in ended)
    print(f"slow: ended after {longest_s:.1f} s at most; gateway {memory}; others {max(took):.2f} s at most")
    assert longest_s < DEADLINE_S
    assert all(words.startswith(said) if said else words == b"" for _, words in ended)
    assert memory.most < memory.before + 64 * MIB, memory


def test_two_thousand_connections_that_say_nothing(attacked: Attacked) -> None:
    """They take little memory, and are closed after the 10 s of a head."""

    async def attack() -> int:
        opened = [await asyncio.open_connection("127.0.0.1", attacked.port) for _ in range(2000)]
        ended = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in opened)), DEADLINE_S)
        for _, writer in opened:
            writer.close()
        return sum(words == b"" for words in ended)

    with alive(attacked) as took, Memory(attacked) as memory:
        assert asyncio.run(attack()) == 2000
    print(f"2000 connections: gateway {memory}; others {max(took):.2f} s at most")
    assert memory.most < memory.before + 128 * MIB, memory
    wait_for(lambda: len(attacked.process.net_connections(kind="tcp")) < 100, 60, "their sockets are closed")


def padded(head: bytes, unit: bytes, tail: bytes) -> bytes:
    """A body of nearly the largest size, mostly of `unit`."""
    return head + unit * ((BODY - len(head) - len(tail)) // len(unit)) + tail


LARGE = {
    "text": padded(b'{"prompt": "', b"x", b'"}'),
    "ids": padded(b'{"prompt": [1', b",1", b"]}"),
    "lists": padded(b'{"prompt": [[]', b",[]", b"]}"),
    "objects": padded(b'{"messages": [{}', b",{}", b"]}"),
    "escapes": padded(b'{"prompt": "', b"\\u0041", b'"}'),
    "no JSON": padded(b"", b"\xff", b""),
}


@pytest.mark.parametrize("kind", LARGE)
def test_fifty_clients_with_the_largest_bodies(attacked: Attacked, kind: str) -> None:
    """400 MB at once, of which 256 MiB are held. Each is refused for what it is, for its size together with others',
    or because its turn to be parsed did not come in time."""
    body = LARGE[kind]
    assert BODY - 8 < len(body) <= BODY
    headers = {**USER_HEADERS, "content-type": "application/json"}
    path = "/v1/chat/completions" if kind == "objects" else "/v1/completions"

    async def attack() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=attacked.url, timeout=DEADLINE_S, limits=limits) as client:
            return await asyncio.gather(*(client.post(path, content=body, headers=headers) for _ in range(50)))

    with alive(attacked) as took, Memory(attacked) as memory:
        answers = asyncio.run(attack())
    statuses: dict[int, int] = {}
    for answer in answers:
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        if answer.status_code >= 400:
            check_error(answer.json(), answer.headers)
    print(f"{kind}: {statuses}; gateway {memory}; others {max(took):.2f} s at most")
    assert set(statuses) <= {400, 503} and statuses.get(400), statuses
    assert memory.most < memory.before + 2 * BODIES + PARSED * 2 * BODY, memory


def test_a_body_beyond_the_cap_is_not_read(attacked: Attacked) -> None:
    """Whether its size is declared or it comes in chunks."""

    def chunks() -> Iterator[bytes]:
        for _ in range(64):
            yield b"x" * MIB

    headers = {**USER_HEADERS, "content-type": "application/json"}
    with alive(attacked), Memory(attacked) as memory:
        with contextlib.suppress(httpx.WriteError):  # closed while it sends
            answer = plain_http.post(attacked.url + "/v1/completions", content=chunks(), headers=headers, timeout=60)
            assert answer.status_code == 413, answer.text
            check_error(json.loads(answer.text), answer.headers)
    assert memory.most < memory.before + 4 * BODY, memory


@pytest.mark.parametrize("level", [64, 900, 100_000])
def test_deep_bodies(attacked: Attacked, level: int) -> None:
    body = b'{"prompt": ' + b"[" * level + b"]" * level + b"}"
    with alive(attacked):
        answer = plain_http.post(
            attacked.url + "/v1/completions",
            content=body,
            headers={**USER_HEADERS, "content-type": "application/json"},
            timeout=60,
        )
    assert answer.status_code == 400, answer.text
    check_error(answer.json(), answer.headers)
