"""Text work off the loop: the order of the queue, deadlines, and the budget of a request."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tandem.cluster.gateway.http.text_workers import INLINE_BYTES, LARGE_BYTES, MOST_IDLE, TextWorkers
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import RequestRefused
from tests.unit.gateway.rig import CHAT, COMPLETE, CONTEXT, error_of, gateway, make_tokenizer

SMALL, LARGE = INLINE_BYTES, LARGE_BYTES
WORDS = "The quick brown fox jumps over the lazy dog. "


class Bench:
    """Workers whose jobs begin when a thread takes them and end when they are told to."""

    def __init__(self, threads: int = 2, timeout_s: float = 60.0) -> None:
        self.began: list[str] = []
        self.worked: list[tuple[str, bool]] = []
        self.workers = TextWorkers(threads, timeout_s, meter=self)
        self._gates: dict[str, threading.Event] = {}
        self._tasks: dict[str, asyncio.Task[str]] = {}

    def text_worked(self, tenant: str, cpu_s: float, *, waited_s: float | None) -> None:
        assert cpu_s >= 0 and (waited_s is None or waited_s >= 0)
        self.worked.append((tenant, waited_s is None))

    async def ask(self, tenant: str, name: str, size: int) -> None:
        gate = self._gates[name] = threading.Event()

        def work() -> str:
            self.began.append(name)
            assert gate.wait(60)
            return name

        self._tasks[name] = asyncio.create_task(self.workers.run(tenant, size, work))
        await asyncio.sleep(0)

    async def until_begun(self, *names: str) -> None:
        async with asyncio.timeout(30):
            while not set(names) <= set(self.began):
                await asyncio.sleep(0.001)

    async def end(self, name: str) -> None:
        self._gates[name].set()
        assert await asyncio.wait_for(self._tasks[name], 30) == name
        await asyncio.sleep(0)

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait({self._tasks[name]})

    def close(self) -> None:
        for gate in self._gates.values():
            gate.set()
        self.workers.close()


@asynccontextmanager
async def bench(threads: int = 2, **options: Any) -> AsyncIterator[Bench]:
    made = Bench(threads, **options)
    try:
        yield made
    finally:
        made.close()


async def test_small_work_runs_at_once_on_the_loop() -> None:
    async with bench() as b:
        here = threading.get_ident()
        assert await b.workers.run("a", INLINE_BYTES - 1, threading.get_ident) == here
        assert await b.workers.run("a", INLINE_BYTES, threading.get_ident) != here
        assert b.worked == [("a", True), ("a", False)]


async def test_a_tenant_that_floods_waits_behind_one_that_does_not() -> None:
    async with bench(threads=1) as b:
        for number in range(4):
            await b.ask("loud", f"loud{number}", SMALL)
        await b.until_begun("loud0")
        await b.ask("quiet", "quiet0", SMALL)
        await b.ask("quiet", "quiet1", SMALL)
        for name in ("loud0", "quiet0", "loud1", "quiet1", "loud2", "loud3"):
            await b.until_begun(name)
            await b.end(name)
        assert b.began == ["loud0", "quiet0", "loud1", "quiet1", "loud2", "loud3"]


async def test_what_waits_or_comes_at_the_end_is_refused_and_not_left_waiting() -> None:
    async with bench(threads=1) as b:
        await b.ask("a", "runs", SMALL)
        await b.until_begun("runs")
        waiting = asyncio.create_task(b.workers.run("a", SMALL, str))
        await asyncio.sleep(0)
        b.workers.close()
        for refused in (waiting, b.workers.run("a", SMALL, str)):
            with pytest.raises(RequestRefused, match="shutting down"):
                await asyncio.wait_for(refused, 30)
        await b.end("runs")


async def test_shares_are_of_bytes_not_of_requests() -> None:
    async with bench(threads=1) as b:
        await b.ask("heavy", "first", SMALL)
        await b.until_begun("first")
        for number in range(2):
            await b.ask("heavy", f"heavy{number}", 8 * SMALL)
        for number in range(6):
            await b.ask("light", f"light{number}", SMALL)
        order = ["first", "light0", "heavy0", *(f"light{n}" for n in range(1, 6)), "heavy1"]
        for name in order:
            await b.until_begun(name)
            await b.end(name)
        assert b.began == order


async def test_who_was_idle_has_no_credit() -> None:
    async with bench(threads=1) as b:
        await b.ask("busy", "busy0", 8 * SMALL)
        await b.until_begun("busy0")
        await b.ask("busy", "busy1", SMALL)
        await b.end("busy0")
        await b.until_begun("busy1")
        await b.ask("busy", "busy2", SMALL)
        for number in range(3):
            await b.ask("idle", f"idle{number}", 8 * SMALL)
        for name in ("busy1", "idle0", "busy2", "idle1", "idle2"):
            await b.until_begun(name)
            await b.end(name)
        assert b.began == ["busy0", "busy1", "idle0", "busy2", "idle1", "idle2"]


async def test_large_work_never_takes_the_last_thread() -> None:
    async with bench(threads=2) as b:
        for number in range(3):
            await b.ask(f"t{number}", f"large{number}", LARGE)
        await b.until_begun("large0")
        await b.ask("other", "small", SMALL)
        await b.until_begun("small")
        await b.end("small")
        assert b.began == ["large0", "small"] and b.workers.num_waiting == 2
        for number in range(3):
            await b.until_begun(f"large{number}")
            await b.end(f"large{number}")


async def test_one_thread_does_large_work_too() -> None:
    async with bench(threads=1) as b:
        await b.ask("t", "large", LARGE)
        await b.until_begun("large")
        await b.end("large")


async def test_what_nobody_waits_for_is_not_begun() -> None:
    async with bench(threads=1) as b:
        for name in ("first", "left", "last"):
            await b.ask(name, name, SMALL)
        await b.until_begun("first")
        await b.leave("left")
        assert b.workers.num_waiting == 1
        await b.leave("first")  # it runs on, and its thread goes on to the next
        b._gates["first"].set()
        await b.until_begun("last")
        await b.end("last")
        assert b.began == ["first", "last"]


async def test_what_takes_too_long_is_refused() -> None:
    async with bench(threads=1, timeout_s=0.05) as b:
        await b.ask("t", "slow", SMALL)
        await b.until_begun("slow")
        with pytest.raises(RequestRefused, match="in time") as refused:
            await b.workers.run("t", SMALL, lambda: None)
        assert refused.value.status == 503 and b.workers.num_waiting == 0


async def test_what_is_raised_reaches_who_waits_and_the_thread_goes_on() -> None:
    async with bench(threads=1) as b:
        for size in (0, SMALL):
            with pytest.raises(RequestRefused, match="no"):
                await b.workers.run("t", size, _refuse)
        assert await b.workers.run("t", SMALL, lambda: 7) == 7
        assert not b.workers._served, "no tenant is kept"


def _refuse() -> None:
    raise RequestRefused("no", code="invalid_value")


def test_other_threads_run_while_a_text_is_tokenized() -> None:
    """The tokenizer lets go of the interpreter's lock. Else the loop would stand for as long as it computes, and this
    thread would wake up when it is over. On a busy machine a thread may sleep as long, but not five times."""
    tokenizer, text = make_tokenizer(), WORDS * 30_000

    def woke_early() -> bool:
        begins, times_s = threading.Event(), []

        def encode() -> None:
            times_s.append(time.monotonic())
            begins.set()
            assert len(tokenizer.encode(text, add_special_tokens=False)) == len(text)
            times_s.append(time.monotonic())

        thread = threading.Thread(target=encode)
        thread.start()
        begins.wait()
        woke_s = time.monotonic()
        thread.join()
        return woke_s - times_s[0] < (times_s[1] - times_s[0]) / 4

    assert any(woke_early() for _ in range(5))


# ---- the budget of a request ----


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "x" * 101}, "prompt"),
        ("/tokenize", {"prompt": "ü" * 51}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 60}] * 2}, "messages"),
        ("/detokenize", {"tokens": [65] * 26}, "tokens"),
        (COMPLETE, {"prompt": ["x" * 60] * 2, "max_tokens": 1}, "prompt"),
        (COMPLETE, {"prompt": "x" * 101, "max_tokens": 1, "truncate_prompt_tokens": 5}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 60}] * 2}, "messages"),
    ],
)
async def test_more_text_than_the_budget_is_refused_by_the_limits_name(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with gateway(settings=GatewaySettings(max_text_bytes=100)) as rig:
        answer = await rig.client.post(path, json=body)
        error = error_of(answer)
        assert (answer.status_code, error["code"], error["param"]) == (413, "content_too_large", param)
        assert "--max-text-bytes" in error["message"]
        assert f"limit of {25 if param == 'tokens' else 100} " in error["message"]
        assert not rig.backend.requests


def test_the_budget_grows_with_the_context() -> None:
    assert GatewaySettings().text_budget(CONTEXT) == 2**20
    assert GatewaySettings().text_budget(2**20) == 8 * 2**20
    assert GatewaySettings(max_text_bytes=7).text_budget(2**20) == 7


async def test_too_many_choices_are_refused_before_any_prompt_is_tokenized() -> None:
    async with gateway() as rig:
        answer = await rig.complete(prompt=["x" * 400] * 2048, n=2)
        assert (answer.status_code, error_of(answer)["param"]) == (400, "n")
        assert "4096 choices" in error_of(answer)["message"] and "2048" in error_of(answer)["message"]


async def test_text_work_is_metered() -> None:
    async with gateway() as rig:
        await rig.client.post("/tokenize", json={"prompt": WORDS})
        await rig.client.post("/tokenize", json={"prompt": WORDS * 1000})
        text = (await rig.client.get("/metrics")).text
        for place in ("loop", "thread"):
            (line,) = [
                line for line in text.splitlines() if f'place="{place}"' in line and "text_seconds_total" in line
            ]
            assert float(line.rpartition(" ")[2]) > 0
        assert 'tandem:tenant_text_seconds_total{tenant="default"}' in text
        assert "tandem:gateway_text_queue_seconds_count" in text


async def test_ten_thousand_tenants_come_and_go_under_load_and_few_are_kept() -> None:
    workers, most = TextWorkers(2), 0

    async def keep_busy() -> None:
        for number in range(1, 5_001):
            await workers.run(f"{id(asyncio.current_task())}-{number}", SMALL, str)

    tasks = [asyncio.create_task(keep_busy()) for _ in range(2)]
    while not all(task.done() for task in tasks):
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=0.01)
        most = max(most, len(workers._served))
    print(f"at most {most} of 10,000 tenants were kept")
    assert most <= MOST_IDLE + 10
    workers.close()


class Parsed:
    """What a body was parsed into; can be referred to weakly."""


async def test_what_was_parsed_goes_with_the_refusal() -> None:
    """Without the garbage collector, which may come gigabytes later."""
    left: list[weakref.ref[Parsed]] = []

    def refuse() -> None:
        value = Parsed()
        left.append(weakref.ref(value))
        try:
            raise ValueError(value)
        except ValueError:
            raise RequestRefused(f"{value} is wrong", code="invalid_value") from None

    def fail() -> None:
        value = Parsed()
        left.append(weakref.ref(value))
        raise KeyError("a defect")

    async with bench() as b:
        gc.disable()
        try:
            for work, error in ((refuse, RequestRefused), (fail, KeyError)):
                for size in (LARGE, SMALL):
                    with pytest.raises(error):
                        await b.workers.run("a", size, work)
            assert [ref() for ref in left] == [None] * 4
        finally:
            gc.enable()
