"""benchmarks/service/overload.py: what counts as goodput, when a bar holds, and that load comes whatever comes back."""

import argparse
import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.service.overload import Client, Level, Request, service_flags, tokens_per_s, verdicts
from tandem.configs.options import OPTIONS

ASKED = argparse.Namespace(output_len=3, prompt_len=4, rows=16, queue=8, threads=1, ttft_s=1.0)


def level(times: float, goodput: float, refusal_ms: float | None, memory: float, failed: int = 0) -> Level:
    rest: dict[str, Any] = {key: {"p50": 1.0, "p99": 1.0} for key in ("ttft_ms", "sent_late_ms")}
    refused = {} if refusal_ms is None else {"p50": 1.0, "p99": refusal_ms}
    memories = dict.fromkeys(("gateway", "coordinator"), (100.0, memory, memory))
    figures = {"client_cores": 0.1, "other_cpu": 0.0, "load_average": 1.0, "memory_mib": memories, **rest}
    counts = {"answered": 1, "refused": 1, "failed": failed}
    return Level(
        level=times, offered_per_s=times, goodput_tokens_per_s=goodput, refusal_ms=refused, **counts, **figures
    )


@pytest.mark.parametrize(
    ("last", "holds"),
    [
        (level(3.0, 91.0, 49.0, 119.0), [True, True, True, True]),
        (level(3.0, 89.0, 51.0, 121.0), [False, False, False, True]),
        (level(3.0, 100.0, None, 100.0), [True, False, True, True]),
        (level(3.0, 100.0, 49.0, 100.0, failed=1), [True, True, True, False]),
    ],
)
def test_the_bars_are_those_of_the_highest_level(last: Level, holds: list[bool]) -> None:
    first, peak = level(0.5, 50.0, None, 100.0), level(1.0, 100.0, 200.0, 300.0)
    assert [is_held for _, _, is_held in verdicts([first, peak, last]).values()] == holds


def test_one_failure_at_any_level_misses_the_bar() -> None:
    found = verdicts([level(0.5, 50.0, None, 100.0, failed=2), level(3.0, 100.0, 49.0, 100.0)])
    assert found["failed"] == (2, 0.0, False)


def test_only_whole_answers_in_time_are_goodput() -> None:
    whole = Request(due_s=1.0, status=200, is_ended=True, token_times_s=[1.5, 2.0, 2.5])
    cut = Request(due_s=1.0, status=200, is_ended=True, token_times_s=[1.5, 2.0])
    late = Request(due_s=1.0, status=200, is_ended=True, token_times_s=[2.1, 2.2, 2.3])
    refused = Request(due_s=1.0, status=429)
    assert [one.is_good(3, 1.0) for one in (whole, cut, late, refused)] == [True, False, False, False]
    assert tokens_per_s([whole], 1.75, 2.25) == 2.0, "one token in half a second"


TOKEN = b'data: {"choices": [{"token_ids": [7]}]}\n\n'
ERROR = b'data: {"error": {"message": "the group was lost"}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("status", "events", "is_answered"),
    [
        (200, [TOKEN, TOKEN, TOKEN, DONE], True),
        (200, [TOKEN, TOKEN, ERROR, DONE], False),
        (200, [TOKEN, TOKEN, TOKEN, ERROR, DONE], False),
        (200, [TOKEN, TOKEN, DONE], False),
        (200, [TOKEN, TOKEN, TOKEN], False),
        (503, [DONE], False),
    ],
)
async def test_an_answer_is_a_whole_stream_without_an_error(
    status: int, events: list[bytes], is_answered: bool
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=b"".join(events), content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        client = Client(Service(str(server.make_url("")).rstrip("/")), ASKED, vocab_size=100)  # type: ignore[arg-type]
        request = Request(due_s=0.0)
        await client.send(session, request, client.body())
    assert request.status == status
    assert request.is_answered(ASKED.output_len) is is_answered


class Service:
    model_name = "m"

    def __init__(self, url: str = "http://nowhere") -> None:
        self.url = url


async def test_an_open_loop_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = Client(Service(), ASKED, vocab_size=100)  # type: ignore[arg-type]
    running, most, all_sent = 0, 0, asyncio.Event()

    async def send(session: Any, request: Request, body: bytes) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running >= 5:
            all_sent.set()
        await all_sent.wait()

    monkeypatch.setattr(client, "send", send)
    sent = await asyncio.wait_for(client.open_loop(None, per_s=1000.0, seconds=0.02), 30)
    assert most == len(sent) >= 5, "none waited for another"
    assert [one.due_s for one in sent] == sorted(one.due_s for one in sent)


def test_the_service_has_the_limits_that_are_measured() -> None:
    flags = service_flags(ASKED)
    assert {flag.removeprefix("--").replace("-", "_") for flag in flags[::2]} <= {option.name for option in OPTIONS}
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert (given["--max-num-seqs"], given["--max-num-queued-reqs"], given["--cpu-threads"]) == ("16", "8", "1")
