"""The ledger over a Redis in memory: what is sent when, what is sent again, what is logged."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import Part, RedisUnavailable
from tandem.cluster.tenants import ledger as ledger_module
from tandem.cluster.tenants.billing_record import BillingRecord
from tandem.cluster.tenants.ledger import LOOK_PERIOD_S, UsageLedger
from tandem.workers.messages.request import Usage

NOW_S, KEPT_S = 1_800_000_000.0, 7 * 86400
rest = asyncio.sleep


class Memory:
    """Does what the ledger asks, and writes it down. `fails`: what the next calls raise."""

    def __init__(self) -> None:
        self.values: dict[Part, Any] = {}
        self.rows: dict[tuple[Part, Part], Part] = {}
        self.sent: list[Part] = []
        self.looks = 0
        self.fails: Callable[[], Exception | None] = lambda: None

    async def command(self, *parts: Part) -> object:
        await rest(0)
        if parts[0] == "GET":
            return self.values.get(parts[1])
        assert parts[:2] == ("EVAL", ledger_module._WRITE), parts
        if (error := self.fails()) is not None:
            raise error
        split = 3 + int(parts[2])
        return self._write(list(parts[3:split]), list(parts[split:]))

    async def pipeline(self, commands: list[list[Part]]) -> list[object]:
        await rest(0)
        if (error := self.fails()) is not None:
            raise error
        self.looks += 1
        return [self._answer(*command) for command in commands]

    def _write(self, names: list[Part], values: list[Part]) -> list[bytes]:
        """As the script does, with no hour summed up."""
        self.values[names[2]] = str(values[1]).encode()
        self.values[names[3]] = str(max(float(values[2]), float(self.values.get(names[3], 0)))).encode()
        rows = values[4 + int(values[3]) :]
        for i in range(0, len(rows), 4):
            self.rows.setdefault((names[2 + 2 * int(rows[i])], rows[i + 2]), rows[i + 3])
            self.sent.append(rows[i + 2])
        return []

    def _answer(self, name: Part, *parts: Part) -> object:
        if name == "SET":
            if "NX" not in parts or parts[0] not in self.values:
                self.values[parts[0]] = str(parts[1]).encode()
        elif name == "MGET":
            return [self.values.get(key) for key in parts]
        return None

    def take_sent(self) -> list[Part]:
        """Ids of the rows that were sent since the last time."""
        sent, self.sent = self.sent, []
        return sent


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


class Books:
    """One gateway's ledger, over a folder that others may have written into."""

    def __init__(self, folder: Path, gateway: str = "g", redis: Memory | None = None) -> None:
        self.redis, self.clock = redis or Memory(), Clock()
        self.ledger = UsageLedger(self.redis, folder, gateway, KEPT_S, clock=self.clock)

    async def settle(self, *numbers: int) -> None:
        for number in numbers:
            record = BillingRecord(id=f"r{number}", time_s=self.clock(), tenant="t", model="m")
            self.ledger.accepted(record)
            await self.ledger.settle(record.ended("stop", Usage(prompt_tokens=1, completion_tokens=1), self.clock()))

    async def sends(self) -> list[Part]:
        await self.ledger.send()
        return self.redis.take_sent()


async def until(condition: Callable[[], object]) -> None:
    for _ in range(5000):
        if condition():
            return
        await rest(0.001)
    raise AssertionError("it never came to that")


async def test_what_was_sent_is_not_sent_again(tmp_path: Path) -> None:
    books = Books(tmp_path)
    await books.settle(1, 2)
    assert set(await books.sends()) == {"r1", "r2"}
    assert await books.sends() == []
    await books.settle(3)
    assert await books.sends() == ["r3"] and await books.sends() == []
    await books.ledger.close()


async def test_a_new_row_hurries_and_what_is_sent_is_calm_again(tmp_path: Path) -> None:
    books = Books(tmp_path)
    await books.sends()
    assert not books.ledger._triggered.is_set()
    await books.settle(1)
    assert books.ledger._triggered.is_set()
    await books.sends()
    assert not books.ledger._triggered.is_set()
    await books.ledger.close()


async def test_a_row_whose_request_was_cancelled_comes_from_the_journal(tmp_path: Path) -> None:
    books = Books(tmp_path)
    await books.sends()
    settling = asyncio.create_task(books.settle(1))
    await rest(0)
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    assert books.ledger._triggered.is_set()
    await books.ledger._journal.sync()
    await until(lambda: books.ledger._journal._writing is None or books.ledger._journal._writing.done())
    assert await books.sends() == ["r1"]
    await books.ledger.close()


async def test_so_many_rows_wait_in_memory_and_then_in_the_journal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "MAX_WAITING", 3)
    books = Books(tmp_path)
    await books.sends()
    await books.settle(1, 2, 3)
    assert len(books.ledger._waiting) == 3
    await books.settle(4)
    assert len(books.ledger._waiting) == 0
    assert await books.sends() == ["r1", "r2", "r3", "r4"]
    await books.ledger.close()


@pytest.mark.parametrize("lost", ["origin", "written"])
async def test_a_redis_that_has_lost_something_gets_all_again_and_it_is_said(
    tmp_path: Path, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    books = Books(tmp_path)
    await books.settle(1)
    await books.sends()
    await books.settle(2)
    await books.sends()
    assert not caplog.records, "the first look finds no loss"
    if lost == "origin":
        del books.redis.values[keys.USAGE_ORIGIN]
    else:
        books.redis.values[keys.usage_written("g")] = b"1"
    assert await books.sends() == ["r1", "r2"]
    assert [record.getMessage() for record in caplog.records] == [
        "Redis had lost the usage rows: journals are sent again"
    ]
    assert await books.sends() == []
    await books.ledger.close()


async def test_a_replay_that_breaks_off_begins_again(tmp_path: Path) -> None:
    books = Books(tmp_path)
    await books.settle(1)
    books.ledger._waiting.clear()
    answers = iter([None, RedisUnavailable("not now")])
    books.redis.fails = lambda: next(answers, None)
    with pytest.raises(RedisUnavailable):
        await books.ledger.send()
    assert await books.sends() == ["r1"]
    await books.ledger.close()


async def leave(folder: Path, gateway: str, number: int) -> None:
    """A journal whose gateway is gone; its row is in no Redis."""
    other = Books(folder, gateway)
    await other.settle(number)
    await other.ledger._journal.close()


async def test_what_others_left_is_looked_for_now_and_then_and_sent_once(tmp_path: Path) -> None:
    await leave(tmp_path, "a", 1)
    books = Books(tmp_path)
    assert await books.sends() == ["r1"]
    await leave(tmp_path, "b", 2)
    assert await books.sends() == []
    books.clock.now_s += LOOK_PERIOD_S - 1
    assert await books.sends() == []
    books.clock.now_s += 1
    assert await books.sends() == ["r2"]
    books.clock.now_s += LOOK_PERIOD_S
    assert await books.sends() == []
    del books.redis.values[keys.USAGE_ORIGIN]
    assert sorted(map(str, await books.sends())) == ["r1", "r2"], "after a loss at once, and all of it"
    await books.ledger.close()


async def test_the_end_says_whether_redis_has_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = Books(tmp_path, "a")
    await told.settle(1)
    assert await told.ledger.close() and not caplog.records
    untold = Books(tmp_path, "b")
    await untold.settle(2)
    untold.redis.fails = lambda: RedisUnavailable("gone")
    assert not await untold.ledger.close()
    (line,) = caplog.records
    assert "1 usage rows are in" in line.getMessage() and str(tmp_path) in line.getMessage()


async def test_running_sends_when_there_is_news_and_waits_a_moment_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await rest(0)

    monkeypatch.setattr(ledger_module.asyncio, "sleep", sleep)
    books = Books(tmp_path)
    running = asyncio.create_task(books.ledger.run())
    await until(lambda: books.redis.looks and not books.ledger._sending.locked())
    for _ in range(50):
        await rest(0)
    assert books.redis.looks == 1 and slept == [], "no news"
    await books.settle(1)
    await until(lambda: books.redis.rows)
    assert slept == [0.05]
    running.cancel()
    await books.ledger.close()


async def test_running_goes_on_whatever_happens_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledger_module, "PERIOD_S", 0.001)
    monkeypatch.setattr(ledger_module, "IDLE_PERIOD_S", 0.001)
    books = Books(tmp_path)
    await books.settle(1)
    await books.sends()
    answers = iter([None, None, RedisUnavailable("not now"), ValueError("a defect")])
    books.redis.fails = lambda: next(answers, None)
    with caplog.at_level(logging.DEBUG, "tandem.ledger"):
        running = asyncio.create_task(books.ledger.run())
        await until(lambda: books.redis.looks >= 8)
    assert not running.done()
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "tandem.ledger"]
    assert said == [
        ("DEBUG", "0 usage rows wait: not now"),
        ("ERROR", "usage rows were not sent: they stay in the journal"),
    ]
    assert books.redis.take_sent() == ["r1"], "after a defect the journal is sent again"
    running.cancel()
    await books.ledger.close()
