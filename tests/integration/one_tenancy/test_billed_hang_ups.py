"""Clients of a real service that hang up before their first token: the prompts that the group had begun are paid for,
in the ledger and in the tokens of the minute; those that only waited are not.

The step log says which prompts were begun. Prompts are long and steps are short, so that a client that watches it is
gone long before its first token.
"""

import asyncio
import contextlib
import json
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.tenants.billing_record import BillingRecord
from tandem.workers.engine.observers.step_log import StepLog
from tandem.workers.messages.step import StepPlan
from tests.support.doors import bearer
from tests.support.service import Service, wait_for
from tests.support.usage import read_usage

pytestmark = pytest.mark.cluster
ADMIN = bearer("boss")
PROMPT = 1500
"""Tokens: some 23 steps of one prompt alone. None is the beginning of another: its first tokens are its number."""
TOGETHER = 3
"""Clients that come and leave at once. A step has room for one prompt only, so the others wait."""
WAIT_S = 60.0


class BegunPrompts:
    """The numbers of the prompts that got a row, as the step log grows."""

    def __init__(self, step_log: Path) -> None:
        (self._file,) = step_log.parent.iterdir()
        self._read = self._file.stat().st_size
        self.numbers: set[int] = set()

    def look(self) -> set[int]:
        with self._file.open("rb") as log:
            log.seek(self._read)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in StepLog.lines(whole + newline):
            for row in line.new_rows if isinstance(line, StepPlan) else ():
                if row.prompt_len == PROMPT:
                    self.numbers.add(number_of(row.token_ids))
        return self.numbers


def prompt_of(number: int) -> list[int]:
    """A prompt that says its number in its first tokens."""
    return [20 + number // 100, 20 + number % 100, *[30] * (PROMPT - 2)]


def number_of(token_ids: Sequence[int]) -> int:
    return 100 * (token_ids[0] - 20) + token_ids[1] - 20


def asked(service: Service, key: str, number: int) -> socket.socket:
    """A connection on which prompt `number` was sent, with nothing read yet."""
    body = json.dumps({"prompt": prompt_of(number), "max_tokens": 4, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=WAIT_S)
    connection.sendall(head.encode() + body)
    return connection


def made(service: Service, name: str, tokens_per_minute: int) -> str:
    """The key of a new tenant."""
    limits = {"name": name, "tokens_per_minute": tokens_per_minute}
    answer = service.post("/admin/tenants", limits, headers=ADMIN)
    assert answer.status_code == 201, answer.text
    key: str = answer.json()["key"]
    wait_for(lambda: service.get("/v1/models", headers=bearer(key)).status_code == 200, WAIT_S, "the key is known")
    return key


def left_in_the_minute(service: Service, key: str) -> int:
    return int(service.get("/v1/models", headers=bearer(key)).headers["x-ratelimit-remaining-tokens"])


def bill(service: Service, tenant: str) -> list[BillingRecord]:
    (redis,) = service.titled("tandem redis")
    url = f"unix://{redis.cmdline()[1].removesuffix('redis.conf')}redis.sock"

    async def read() -> list[BillingRecord]:
        client = BackgroundClient(url)
        try:
            return await read_usage(client, tenant, time.time() - 3600, time.time() + 60)
        finally:
            await client.close()

    return asyncio.run(read())


def hang_up_together(service: Service, key: str, begun: BegunPrompts, count: int) -> None:
    """TOGETHER clients ask at a time, and all leave when the group has begun one of their prompts."""
    for first in range(0, count, TOGETHER):
        wave = range(first, first + TOGETHER)
        connections = [asked(service, key, number) for number in wave]
        wait_for(lambda wave=wave: begun.look() & set(wave), WAIT_S, "one was begun", period_s=0.002)  # type: ignore[misc]
        for connection in connections:
            connection.close()


def check_the_bill(service: Service, step_log: Path, tenant: str, count: int) -> None:
    begun = BegunPrompts(step_log)
    per_minute = 2 * count * PROMPT
    key = made(service, tenant, per_minute)
    began_s = time.monotonic()
    hang_up_together(service, key, begun, count)
    wait_for(lambda: service.get("/load").json()["http_requests_in_hand"] == 0, WAIT_S, "all have left")
    wait_for(lambda: service.metric("gateway_requests_open") == 0, WAIT_S, "all are settled")

    def billed() -> list[BillingRecord]:
        rows = [row for row in bill(service, tenant) if row.prompt_tokens]
        return rows if len(rows) >= len(begun.look()) else []

    with contextlib.suppress(AssertionError):  # what is missing is said below
        wait_for(billed, WAIT_S, "the ledger has what was begun", period_s=0.25)
    rows = [row for row in bill(service, tenant) if row.prompt_tokens]
    assert len(rows) == len(begun.numbers), f"{len(rows)} prompts billed, {len(begun.numbers)} begun"
    assert [row.prompt_tokens for row in rows] == [PROMPT] * len(begun.look())
    assert count // TOGETHER <= len(begun.numbers) < count, "some waited until their clients had left"
    free = [row for row in bill(service, tenant) if not row.prompt_tokens]
    assert {row.completion_tokens for row in free} <= {0}
    before_the_first = [row for row in rows if row.completion_tokens == 0]
    assert before_the_first and {row.terminal for row in before_the_first} == {"abort"}
    used = sum(row.prompt_tokens + row.completion_tokens for row in rows)
    seen: list[tuple[int, float]] = []

    def is_charged() -> bool:
        """What a request has used goes to the minute by itself, a moment after its row. Both sides grow alike."""
        seen.append((left_in_the_minute(service, key), time.monotonic() - began_s))
        left, span_s = seen[-1]
        return per_minute - used <= left <= per_minute - used + per_minute * span_s / 60 + 1

    wait_for(is_charged, WAIT_S, f"the minute has the {used} tokens of the bill: {seen}")
    left, span_s = seen[-1]
    told = f"{count} hung up: {len(rows)} prompts begun and billed ({len(before_the_first)} before the first token)"
    print(f"{told}, {len(free)} not; {used} tokens used, {left} of {per_minute} left after {span_s:.1f} s")


def check_the_minute(service: Service, step_log: Path, tenant: str, count: int) -> None:
    """One client after the other asks and leaves: the minute pays for few."""
    begun, per_minute = BegunPrompts(step_log), 8 * PROMPT
    key = made(service, tenant, per_minute)
    began_s, admitted, refused = time.monotonic(), 0, 0
    for number in range(count):
        with asked(service, key, number) as connection:

            def decided(number: int = number, connection: socket.socket = connection) -> bool:
                return number in begun.look() or bool(select.select([connection], [], [], 0)[0])

            wait_for(decided, WAIT_S, "it was begun or refused", period_s=0.002)
            if number in begun.numbers:
                admitted += 1
            else:
                answer = connection.recv(4096)
                assert answer.startswith(b"HTTP/1.1 429 ") and b"retry-after" in answer, answer
                refused += 1
    span_s = time.monotonic() - began_s
    print(f"{count} hung up: {admitted} prompts begun, {refused} refused in {span_s:.1f} s")
    assert 7 <= admitted <= (per_minute + per_minute * span_s / 60) / PROMPT + 1
    assert admitted + refused == count and refused > 0


def test_prompts_that_were_begun_are_billed_and_those_that_waited_are_not(closed: Service, step_log: Path) -> None:
    check_the_bill(closed, step_log, "hasty", 60)


def test_hanging_up_uses_up_the_minute(closed: Service, step_log: Path) -> None:
    check_the_minute(closed, step_log, "limited", 60)


@pytest.mark.chaos
def test_a_thousand_hang_ups_are_billed(closed: Service, step_log: Path) -> None:
    check_the_bill(closed, step_log, "hasty-thousand", 999)


@pytest.mark.chaos
def test_a_thousand_hang_ups_use_up_the_minute(closed: Service, step_log: Path) -> None:
    check_the_minute(closed, step_log, "limited-thousand", 1000)
