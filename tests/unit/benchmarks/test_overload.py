"""benchmarks/service/overload.py: what counts as goodput, when a bar holds, and that load comes whatever comes back."""

import argparse
import asyncio
from typing import Any

import pytest

from benchmarks.service.overload import Client, Level, Request, service_flags, tokens_per_s, verdicts
from tandem.configs.options import OPTIONS

ASKED = argparse.Namespace(output_len=3, prompt_len=4, rows=16, queue=8, threads=1, ttft_s=1.0)


def level(times: float, goodput: float, refusal_ms: float | None, memory: float) -> Level:
    rest: dict[str, Any] = {key: {"p50": 1.0, "p99": 1.0} for key in ("ttft_ms", "sent_late_ms")}
    refused = {} if refusal_ms is None else {"p50": 1.0, "p99": refusal_ms}
    memories = dict.fromkeys(("gateway", "coordinator"), (100.0, memory, memory))
    figures = {"client_cores": 0.1, "other_cpu": 0.0, "load_average": 1.0, "memory_mib": memories, **rest}
    counts = dict.fromkeys(("answered", "refused", "failed"), 1)
    return Level(
        level=times, offered_per_s=times, goodput_tokens_per_s=goodput, refusal_ms=refused, **counts, **figures
    )


@pytest.mark.parametrize(
    ("last", "holds"),
    [
        (level(3.0, 91.0, 49.0, 119.0), [True, True, True]),
        (level(3.0, 89.0, 51.0, 121.0), [False, False, False]),
        (level(3.0, 100.0, None, 100.0), [True, False, True]),
    ],
)
def test_the_bars_are_those_of_the_highest_level(last: Level, holds: list[bool]) -> None:
    first, peak = level(0.5, 50.0, None, 100.0), level(1.0, 100.0, 200.0, 300.0)
    assert [is_held for _, _, is_held in verdicts([first, peak, last]).values()] == holds


def test_only_whole_answers_in_time_are_goodput() -> None:
    whole = Request(due_s=1.0, status=200, token_times_s=[1.5, 2.0, 2.5])
    cut = Request(due_s=1.0, status=200, token_times_s=[1.5, 2.0])
    late = Request(due_s=1.0, status=200, token_times_s=[2.1, 2.2, 2.3])
    refused = Request(due_s=1.0, status=429)
    assert [one.is_good(3, 1.0) for one in (whole, cut, late, refused)] == [True, False, False, False]
    assert tokens_per_s([whole], 1.75, 2.25) == 2.0, "one token in half a second"


class Service:
    url, model_name = "http://nowhere", "m"


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
