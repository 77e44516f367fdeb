"""--usage-rows: Redis keeps so many rows, the oldest become sums by hour, and what a tenant has used stays right."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient, Part, RedisUnavailable
from tandem.cluster.tenants.billing_record import (
    BillingRecord,
    UsageSum,
    day_of,
    pack,
    parse_since,
    read_rows_and_sums,
    summed,
)
from tandem.cluster.tenants.ledger import UsageLedger
from tandem.cluster.tenants.usage_cap import UsageCap
from tandem.configs.errors import TandemError
from tandem.workers.messages.request import Usage
from tests.support.usage import read_usage
from tests.unit.tenants.tenant_rig import service

HOUR_S, DAY_S = 3600, 86400
NOON_S = parse_since("2027-01-15T12:00", 0.0)
KEPT_S = 7 * DAY_S


def row(number: int, time_s: float, tenant: str = "acme") -> BillingRecord:
    record = BillingRecord(
        id=f"r{number}", time_s=time_s, tenant=tenant, model="m", adapter="a@1" if number % 2 else None
    )
    usage = Usage(prompt_tokens=number, completion_tokens=2 * number, cached_tokens=1)
    return record.ended("stop", usage, time_s)


class Books:
    """A ledger and the cap of its gateway, at a moment of the wall clock."""

    def __init__(self, redis: BackgroundClient, folder: Path, most: int, gateway: str = "g") -> None:
        self.redis = redis
        self.now_s = NOON_S
        self.ledger = UsageLedger(redis, folder, gateway, KEPT_S, clock=lambda: self.now_s)
        self.cap = UsageCap(redis, gateway, most, KEPT_S, wall_clock=lambda: self.now_s)

    async def settle(self, rows: Iterable[BillingRecord]) -> None:
        for one in rows:
            self.ledger.accepted(msgspec.structs.replace(one, terminal=None))
            await self.ledger.settle(one)
        await self.ledger.send()

    async def ids(self) -> list[str]:
        return [one.id for one in await read_usage(self.redis, None, NOON_S - 6 * DAY_S, NOON_S + DAY_S)]

    async def sums(self, tenant: str | None = None, since_s: float = NOON_S - 6 * DAY_S) -> list[UsageSum]:
        return summed(*await read_rows_and_sums(self.redis, tenant, since_s, NOON_S + DAY_S))


def three_days() -> list[BillingRecord]:
    """Rows 1 to 12 of two tenants: four of the day before yesterday, four of yesterday, four of this morning."""
    times = (
        [NOON_S - 2 * DAY_S] * 4 + [NOON_S - DAY_S] * 4 + [NOON_S - 10 * HOUR_S, NOON_S - 5 * HOUR_S, NOON_S, NOON_S]
    )
    return [row(i, time_s, ("acme", "beta")[i % 3 == 0]) for i, time_s in enumerate(times, 1)]


@pytest.mark.parametrize(("most", "left"), [(12, 12), (11, 8), (8, 8), (7, 4), (3, 3), (2, 2), (0, 2)])
async def test_the_oldest_rows_go_first_and_the_sums_stay(
    redis: BackgroundClient, tmp_path: Path, most: int, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole days of those that have ended, then hours of today, but none of the last one."""
    books = Books(redis, tmp_path, most)
    rows = three_days()
    await books.settle(rows)
    await books.cap.enforce()
    assert await books.ids() == [one.id for one in rows[12 - left :]]
    assert books.cap.summed_rows == 12 - left
    for tenant in (None, "acme", "beta"):
        assert await books.sums(tenant) == summed(one for one in rows if tenant in (None, one.tenant))
    assert ("more than --usage-rows" in caplog.text) == (left > most)
    await books.cap.enforce()
    assert books.cap.summed_rows == 12 - left, "nothing more to do"
    await books.ledger.close()


async def test_sums_are_of_hours(redis: BackgroundClient, tmp_path: Path) -> None:
    books = Books(redis, tmp_path, 0)
    rows = three_days()
    await books.settle(rows)
    await books.cap.enforce()
    for since_s, first in ((NOON_S - DAY_S, 5), (NOON_S - DAY_S + HOUR_S, 9), (NOON_S - 9.5 * HOUR_S, 9)):
        assert await books.sums(since_s=since_s) == summed(rows[first - 1 :]), since_s
    assert await books.sums(since_s=NOON_S - 9 * HOUR_S) == summed(rows[9:])
    await books.ledger.close()


async def test_a_journal_that_is_sent_again_counts_nothing_twice(redis: BackgroundClient, tmp_path: Path) -> None:
    rows = three_days()
    first = Books(redis, tmp_path, 4)
    await first.settle(rows)
    await first.cap.enforce()
    await first.ledger.close()
    later = Books(redis, tmp_path, 4, "later")  # takes up what the first has left
    await later.ledger.send()
    assert await later.ids() == [one.id for one in rows[8:]] and await later.sums() == summed(rows)
    assert later.ledger.late_rows == 0
    await redis.command("FLUSHALL")
    await later.settle([row(13, NOON_S)])
    await later.cap.enforce()
    assert await later.sums() == summed([*rows, row(13, NOON_S)]), "with the rows the sums were lost, and come again"
    await later.ledger.close()


class MeanwhileSummed:
    """Redis, of which a gateway with a cap sums up what it can before every second call of a script."""

    def __init__(self, redis: BackgroundClient, cap: UsageCap) -> None:
        self._redis, self._cap, self._calls = redis, cap, 0

    async def command(self, *parts: Part) -> object:
        self._calls += parts[0] == "EVAL"
        if parts[0] == "EVAL" and self._calls % 2 == 0:
            await self._cap.enforce()
        return await self._redis.command(*parts)

    async def pipeline(self, commands: list[list[Part]]) -> list[object]:
        return await self._redis.pipeline(commands)


async def test_rows_that_are_summed_up_during_a_replay_are_counted_once(
    redis: BackgroundClient, tmp_path: Path
) -> None:
    """The next gateway sends again what the last one left; another one's cap comes between its batches."""
    rows = [row(i, NOON_S - 3 * HOUR_S) for i in range(1000)]
    first = Books(redis, tmp_path, 100)
    await first.settle(rows)
    await first.ledger.close()
    later = Books(redis, tmp_path, 100, "later")
    later.ledger._redis = MeanwhileSummed(redis, first.cap)
    await later.ledger.send()
    assert first.cap.summed_rows == 1000 and await later.sums() == summed(rows)
    await first.cap.enforce()
    assert await later.ids() == [] and await later.sums() == summed(rows)
    await later.ledger.close()


async def test_a_row_that_was_left_of_an_older_day_does_not_bring_newer_ones_back(
    redis: BackgroundClient, tmp_path: Path
) -> None:
    """It came while its hour was being summed up, behind the scan."""
    rows = three_days()
    books = Books(redis, tmp_path, 2)
    await books.settle(rows)
    await books.cap.enforce()
    left = row(13, NOON_S - DAY_S)
    await redis.command("HSET", keys.usage(left.tenant, day_of(left.time_s)), left.id, pack(left))
    await books.cap.enforce()
    await books.ledger.close()
    later = Books(redis, tmp_path, 2, "later")
    await later.ledger.send()
    assert await later.sums() == summed([*rows, left])
    await later.ledger.close()


async def test_a_row_that_comes_too_late_is_logged_and_counted(
    redis: BackgroundClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    books = Books(redis, tmp_path, 4)
    await books.settle(three_days())
    await books.cap.enforce()
    late = row(99, NOON_S - DAY_S)
    await books.settle([late])
    assert "1 usage rows came later than --usage-rows allows" in caplog.text
    assert books.ledger.late_rows == 1 and "r99" not in await books.ids()
    await books.ledger.close()


async def summed_until(redis: BackgroundClient, time_s: float) -> None:
    """As another gateway's cap does that finds no more rows of before."""
    await redis.command("SET", keys.USAGE_SUMMED, int(time_s))


async def test_late_rows_that_only_the_journal_had_are_counted_once(
    redis: BackgroundClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More than memory holds wait for longer than an hour, while another gateway's Redis works."""
    books = Books(redis, tmp_path, 100)
    await books.settle(row(i, NOON_S - 3 * HOUR_S) for i in range(5))
    monkeypatch.setattr("tandem.cluster.tenants.ledger.MAX_WAITING", 3)
    for i in range(10, 16):
        await books.ledger.settle(row(i, NOON_S - 2 * HOUR_S))
    assert 0 < len(books.ledger._waiting) < 6, "some are in the journal only, some wait too"
    await summed_until(redis, NOON_S - HOUR_S)
    await books.settle([row(20, NOON_S)])
    assert books.ledger.late_rows == 6 and "usage rows came later than --usage-rows allows" in caplog.text
    books.ledger._must_replay = True
    await books.ledger.send()
    assert books.ledger.late_rows == 6 and "r20" in await books.ids()
    await books.ledger.close()


async def test_late_rows_of_a_journal_that_was_left_are_those_its_gateway_had_not_sent(
    redis: BackgroundClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed = Books(redis, tmp_path, 100, "killed")
    await killed.settle(row(i, NOON_S - 3 * HOUR_S) for i in range(5))
    for i in range(5, 8):
        await killed.ledger.settle(row(i, NOON_S - 2 * HOUR_S))
    await killed.ledger.settle(row(8, NOON_S))
    await killed.ledger._journal.close()
    await summed_until(redis, NOON_S - HOUR_S)
    for gateway, late in (("next", 3), ("one-more", 0)):
        later = Books(redis, tmp_path, 100, gateway)
        await later.ledger.send()
        assert later.ledger.late_rows == late
        await later.ledger.close()
    assert caplog.text.count("3 usage rows came later than --usage-rows allows") == 1
    assert "r8" in await killed.ids()


async def test_rows_that_were_lost_and_whose_hour_is_sums_before_they_are_sent_again_are_late(
    redis: BackgroundClient, tmp_path: Path
) -> None:
    """Redis was emptied, and another gateway's rows were summed up before this one was back."""
    books = Books(redis, tmp_path, 100)
    await books.settle(row(i, NOON_S - 3 * HOUR_S) for i in range(5))
    await redis.command("FLUSHALL")
    await summed_until(redis, NOON_S - HOUR_S)
    await books.ledger.send()
    assert books.ledger.late_rows == 5
    await books.ledger.close()


async def test_the_counts_are_metrics(redis: BackgroundClient, tmp_path: Path) -> None:
    tenants = service("redis://127.0.0.1:1", tmp_path)
    registry = CollectorRegistry()
    tenants.expose(registry, "tandem")
    tenants.ledger.late_rows, tenants.usage_cap.summed_rows = 2, 5
    assert registry.get_sample_value("tandem:usage_rows_late_total") == 2
    assert registry.get_sample_value("tandem:usage_rows_summed_total") == 5
    await tenants.close()


class SummedWhileRead:
    """Redis, of which another gateway sums up something more before each reading of the sums, or after each of rows."""

    def __init__(self, redis: BackgroundClient, caps: Iterable[UsageCap], command: str) -> None:
        self._redis, self._caps, self._command = redis, iter(caps), command

    async def command(self, *parts: Part) -> object:
        answer = await self._redis.command(*parts) if self._command == "HSCAN" else None
        if parts[0] == self._command and (cap := next(self._caps, None)) is not None:
            await cap.enforce()
        return answer if self._command == "HSCAN" else await self._redis.command(*parts)

    async def pipeline(self, commands: list[list[Part]]) -> list[object]:
        return await self._redis.pipeline(commands)


@pytest.mark.parametrize("command", ["HSCAN", "HGETALL"])
@pytest.mark.parametrize("tenant", [None, "acme", "beta"])
async def test_rows_that_become_sums_while_usage_is_read_are_counted_once(
    redis: BackgroundClient, tmp_path: Path, tenant: str | None, command: str
) -> None:
    books = Books(redis, tmp_path, 12)
    rows = three_days()
    await books.settle(rows)
    caps = [UsageCap(redis, "g", most, KEPT_S, wall_clock=lambda: NOON_S) for most in (11, 7, 3)]
    reading = SummedWhileRead(redis, caps, command)
    read, sums = await read_rows_and_sums(reading, tenant, NOON_S - 2.5 * DAY_S, NOON_S + DAY_S)
    assert summed(read, sums) == summed(one for one in rows if tenant in (None, one.tenant))
    assert next(reading._caps, None) is None, "all of them came in between"
    await books.ledger.close()


async def test_usage_that_never_stands_still_is_not_shown(redis: BackgroundClient, tmp_path: Path) -> None:
    class Moving(SummedWhileRead):
        async def command(self, *parts: Part) -> object:
            if parts[0] == "HGETALL":
                await redis.command("HINCRBY", str(parts[1]), '[1,"t","m",null,"requests"]', 1)
            return await redis.command(*parts)

    with pytest.raises(TandemError, match="are becoming sums"):
        await read_rows_and_sums(Moving(redis, (), ""), None, 0.0, 10.0)


async def test_one_gateway_at_a_time_sums_up(redis: BackgroundClient, tmp_path: Path) -> None:
    one, other = Books(redis, tmp_path, 0, "one"), Books(redis, tmp_path, 0, "other")
    await one.settle(three_days())
    await other.cap._lease.take()
    await one.cap.enforce()
    assert one.cap.summed_rows == 0
    await other.cap._lease.release()
    await one.cap.enforce()
    assert one.cap.summed_rows == 10
    await one.ledger.close()
    await other.ledger.close()


async def test_two_that_sum_up_the_same_rows_count_them_once(redis: BackgroundClient, tmp_path: Path) -> None:
    """A gateway that was frozen believes that it still has the lease."""
    books = Books(redis, tmp_path, 0)
    rows = three_days()
    await books.settle(rows)
    day = day_of(rows[0].time_s)
    place = keys.usage("acme", day)
    mine = [one for one in rows[:4] if one.tenant == "acme"]
    until_s = int(NOON_S - DAY_S)
    assert await books.cap._replace(mine, place, keys.usage_sums(day), until_s)
    assert not await books.cap._replace(mine, place, keys.usage_sums(day), until_s)
    assert await books.sums() == summed(rows)
    await books.ledger.close()


async def test_a_redis_that_takes_no_writes_loses_no_row(redis: BackgroundClient, tmp_path: Path) -> None:
    books = Books(redis, tmp_path, 0)
    rows = three_days()
    await books.settle(rows)
    await redis.command("CONFIG", "SET", "min-replicas-to-write", "1")
    with pytest.raises(RedisUnavailable):
        await books.cap.enforce()
    await redis.command("CONFIG", "SET", "min-replicas-to-write", "0")
    assert len(await books.ids()) == 12
    await books.cap.enforce()
    assert await books.sums() == summed(rows)
    await books.ledger.close()


async def test_a_full_memory_is_when_rows_make_room(redis: BackgroundClient, tmp_path: Path) -> None:
    """Also by a gateway that has the lease already, and one whose lease has ended."""
    books = Books(redis, tmp_path, 8)
    rows = three_days()
    await books.settle(rows)
    await redis.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(RedisUnavailable):
        await redis.command("SET", "x", "1")
    for most, left in ((8, 8), (4, 4), (0, 2)):
        books.cap._most = most
        await books.cap.enforce()
        assert await books.ids() == [one.id for one in rows[12 - left :]] and await books.sums() == summed(rows)
        if most == 4:
            await books.cap._lease.release()
    assert await redis.command("GET", keys.USAGE_SUMMED) == str(int(NOON_S - 5 * HOUR_S) + HOUR_S).encode()
    assert 0 < await redis.command("TTL", keys.USAGE_SUMMED) <= KEPT_S
    await redis.command("CONFIG", "SET", "maxmemory", "0")
    await books.ledger.close()


async def test_a_cap_that_fails_says_so_once_until_it_works_again(
    redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cap = UsageCap(redis, "g", 0, KEPT_S)
    outcomes = iter([RedisUnavailable("full"), RedisUnavailable("full"), None, RedisUnavailable("full again")])

    async def enforce() -> None:
        try:
            outcome = next(outcomes)
        except StopIteration:
            raise asyncio.CancelledError from None
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(cap, "enforce", enforce)
    monkeypatch.setattr("tandem.cluster.tenants.usage_cap.COUNT_PERIOD_S", 0.0)
    with caplog.at_level("DEBUG", "tandem.ledger"), pytest.raises(asyncio.CancelledError):
        await cap.run()
    said = [(one.levelname, one.getMessage().rpartition(": ")[2]) for one in caplog.records]
    assert said == [("WARNING", "full"), ("DEBUG", "full"), ("WARNING", "full again")]
