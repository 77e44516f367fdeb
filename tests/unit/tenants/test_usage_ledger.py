"""Exactly one row for each accepted request: outages, crashes after the journal, emptied servers, full disks."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable
from tandem.cluster.tenants.billing_record import BillingRecord, day_of, parse_since, summed, tenants_of
from tandem.cluster.tenants.journal import Journal, left_behind, read_rows
from tandem.cluster.tenants.ledger import UsageLedger
from tandem.configs.errors import SettingsError
from tandem.workers.messages.request import Usage
from tests.support.usage import read_usage
from tests.unit.tenants.tenant_rig import patient, until

NOW_S = 1_800_000_000.0
KEPT_S = 7 * 86400


def outcome(number: int, tenant: str = "acme", terminal: str = "stop", time_s: float = NOW_S) -> BillingRecord:
    usage = Usage(prompt_tokens=number, completion_tokens=2 * number, cached_tokens=1)
    adapter = "a@1" if number % 2 else None
    return msgspec.structs.replace(opening(number, tenant), adapter=adapter).ended(terminal, usage, time_s)


def opening(number: int, tenant: str = "acme", time_s: float = NOW_S) -> BillingRecord:
    return BillingRecord(id=f"r{number}", time_s=time_s, tenant=tenant, model="m")


class Clock:
    """Wall and monotonic at once."""

    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def ledger(redis: BackgroundClient, folder: Path, gateway: str = "g", clock: Clock | None = None) -> UsageLedger:
    clock = clock or Clock()
    return UsageLedger(redis, folder, gateway, KEPT_S, clock=clock)


async def settle(books: UsageLedger, *numbers: int) -> None:
    for number in numbers:
        books.accepted(opening(number))
    await asyncio.gather(*(books.settle(outcome(number)) for number in numbers))


async def ids(redis: BackgroundClient, tenant: str | None = None) -> list[str]:
    return [row.id for row in await read_usage(redis, tenant, NOW_S - 3 * 86400, NOW_S + 3 * 86400)]


async def test_rows_come_to_redis_whole_and_once(redis: BackgroundClient, tmp_path: Path) -> None:
    books = ledger(redis, tmp_path)
    await settle(books, 3)
    for _ in range(3):
        await books.send()
    (row,) = await read_usage(redis, "acme", NOW_S - 1, NOW_S + 1)
    assert row == BillingRecord(
        id="r3",
        time_s=NOW_S,
        tenant="acme",
        model="m",
        adapter="a@1",
        terminal="stop",
        prompt_tokens=3,
        cached_tokens=1,
        completion_tokens=6,
    )
    assert 0 < await redis.command("TTL", keys.usage("acme", day_of(NOW_S))) <= KEPT_S
    await books.close()


async def test_a_batch_keeps_its_rows_and_the_lists_of_them_for_their_time(
    redis: BackgroundClient, tmp_path: Path
) -> None:
    books, day = ledger(redis, tmp_path), day_of(NOW_S)
    await books.send()
    await settle(books, 1)
    await books.send()
    names = (
        keys.usage("acme", day),
        keys.usage_tenants(day),
        keys.usage_written("g"),
        keys.usage_sent("g"),
        keys.USAGE_ORIGIN,
    )
    for name in names:
        assert await redis.command("EXISTS", name)
        await redis.command("PERSIST", name)
    books.accepted(opening(2, "beta"))
    await settle(books, 3)
    await books.settle(outcome(2, "beta"))
    await books.send()
    for name in (*names, keys.usage("beta", day)):
        assert 0 < await redis.command("TTL", name) <= KEPT_S, name
    assert await tenants_of(redis, day) == ["acme", "beta"]
    assert await redis.command("GET", keys.usage_written("g")) == b"2", "batches"
    await books.close()


async def test_a_full_memory_refuses_a_batch_whole(redis: BackgroundClient, tmp_path: Path) -> None:
    books = ledger(redis, tmp_path)
    await books.send()
    await settle(books, 1)
    await books.send()
    await settle(books, 2)
    await redis.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(RedisUnavailable):
        await books._write(list(books._waiting), "g")
    assert await ids(redis) == ["r1"] and await redis.command("GET", keys.usage_written("g")) == b"1"
    await redis.command("CONFIG", "SET", "maxmemory", "0")
    await books.send()
    assert await ids(redis) == ["r1", "r2"]
    await books.close()


async def test_settled_means_on_disk(redis: BackgroundClient, tmp_path: Path) -> None:
    books = ledger(redis, tmp_path)
    await settle(books, 1, 2)
    (path,) = tmp_path.glob("usage-*")
    assert [row.id for row in read_rows(path, is_over=False)] == ["r1", "r2"]
    assert path.stat().st_mode & 0o777 == 0o600
    await books.close()


async def test_rows_of_an_outage_follow_when_redis_is_back(
    server: RedisServer, redis: BackgroundClient, tmp_path: Path
) -> None:
    books = ledger(redis, tmp_path)
    await settle(books, *range(10))
    await books.send()
    server.stop()
    await settle(books, *range(10, 700))
    with pytest.raises(RedisUnavailable):
        await books.send()
    server.start()
    sending = asyncio.create_task(books.run())
    await until(lambda: has(redis, 700), "all rows are there")
    sending.cancel()
    assert sorted(await ids(redis)) == sorted(f"r{i}" for i in range(700))
    await books.close()


async def has(redis: BackgroundClient, count: int) -> bool:
    try:
        return len(await ids(redis)) == count
    except RedisUnavailable:
        return False


async def test_more_rows_than_memory_holds_come_from_the_journal(
    server: RedisServer, redis: BackgroundClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cluster.tenants.ledger.MAX_WAITING", 20)
    books = ledger(redis, tmp_path)
    await books.send()
    server.stop()
    await settle(books, *range(95))
    assert len(books._waiting) <= 20
    server.start()
    await until(lambda: sent(books), "Redis is back")
    assert sorted(await ids(redis)) == sorted(f"r{i}" for i in range(95))
    await books.close()


async def sent(books: UsageLedger) -> bool:
    try:
        await books.send()
    except RedisUnavailable:
        return False
    return True


async def test_a_redis_that_has_lost_its_rows_gets_all_of_them_again(redis: BackgroundClient, tmp_path: Path) -> None:
    before = ledger(redis, tmp_path, "old")
    await settle(before, 1)
    await before.close()
    books = ledger(redis, tmp_path)
    await settle(books, 2)
    await books.send()
    await redis.command("FLUSHALL")
    await settle(books, 3)
    await books.send()
    assert await ids(redis) == ["r1", "r2", "r3"]
    await books.close()


async def test_a_loss_is_found_without_new_rows(
    redis: BackgroundClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cluster.tenants.ledger.IDLE_PERIOD_S", 0.02)
    books = ledger(redis, tmp_path)
    sending = asyncio.create_task(books.run())
    await settle(books, 1)
    await until(lambda: has(redis, 1), "it is there")
    await redis.command("FLUSHALL")
    await until(lambda: has(redis, 1), "it is there again")
    sending.cancel()
    await books.close()


async def test_a_redis_of_an_older_snapshot_gets_the_rows_since_then_again(
    redis: BackgroundClient, tmp_path: Path
) -> None:
    books = ledger(redis, tmp_path)
    await settle(books, 1)
    await books.send()
    written = await redis.command("GET", keys.usage_written("g"))
    assert isinstance(written, bytes)
    await settle(books, 2)
    await books.send()
    await redis.command("HDEL", keys.usage("acme", day_of(NOW_S)), "r2")
    await redis.command("SET", keys.usage_written("g"), written)
    await books.send()
    assert await ids(redis) == ["r1", "r2"]
    await books.close()


async def test_a_lost_answer_makes_no_second_row(redis: BackgroundClient, tmp_path: Path) -> None:
    """The batch is written and the connection breaks before its answer: it is sent again, an hour later too."""

    class Breaking:
        """Runs what it is given and says that it failed, once."""

        breaks = 1

        async def command(self, *parts: str | bytes | int | float) -> object:
            answer = await redis.command(*parts)
            if self.breaks and parts[0] == "EVAL":
                self.breaks -= 1
                raise RedisUnavailable("the answer was lost")
            return answer

        async def pipeline(self, commands: list[list[str | bytes | int | float]]) -> list[object]:
            return await redis.pipeline(commands)

    clock = Clock()
    books = UsageLedger(Breaking(), tmp_path, "g", KEPT_S, clock=clock)
    await settle(books, 1, 2)
    with pytest.raises(RedisUnavailable):
        await books.send()
    clock.now_s += 36 * 3600
    await books.send()
    rows = await read_usage(redis, "acme", NOW_S - 1, NOW_S + 1)
    assert [row.id for row in rows] == ["r1", "r2"]
    assert sorted(await ids(redis)) == ["r1", "r2"]
    await books.close()


CRASHING = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tandem.cluster.state.redis_client import BackgroundClient
from tests.unit.tenants.test_usage_ledger import ledger, opening, outcome, settle

async def main():
    redis = BackgroundClient(sys.argv[1])
    books = ledger(redis, Path(sys.argv[2]), "crashed")
    await settle(books, 1, 2, 3)
    await books.send()                  # these are in both
    await settle(books, 4, 5)           # these are in the journal only
    books.accepted(opening(6))          # this one never ends
    await books._journal.sync()
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_a_gateway_killed_between_journal_and_redis_leaves_each_row_once(
    server: RedisServer, redis: BackgroundClient, tmp_path: Path
) -> None:
    root = str(Path(__file__).resolve().parents[3])
    command = [sys.executable, "-c", CRASHING, server.url, str(tmp_path), root]
    done = await asyncio.to_thread(subprocess.run, command, cwd=root, capture_output=True, timeout=180)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert sorted(await ids(redis)) == ["r1", "r2", "r3"]
    books = ledger(redis, tmp_path, "next")
    for _ in range(2):
        await books.send()
    rows = {row.id: row for row in await read_usage(redis, None, NOW_S - 1, NOW_S + 1)}
    assert sorted(rows) == ["r1", "r2", "r3", "r4", "r5", "r6"]
    assert (rows["r6"].terminal, rows["r6"].completion_tokens) == ("client_lost", 0)
    assert all(rows[f"r{i}"].completion_tokens == 2 * i for i in range(1, 6))
    await books.close()


async def test_a_request_that_was_run_again_is_billed_whoever_writes_first(
    redis: BackgroundClient, tmp_path: Path
) -> None:
    """The journal of the gateway that was lost says so of the same id, before or after."""
    for number, first in enumerate(("client_lost", "stop"), 1):
        books = [ledger(redis, tmp_path, f"g{number}-{gateway}") for gateway in range(2)]
        for own, terminal in zip(books, (first, "stop" if first == "client_lost" else "client_lost"), strict=True):
            own.accepted(opening(number))
            await own.settle(outcome(number, terminal=terminal))
            await own.send()
        for own in books:
            await own.close()
    rows = await read_usage(redis, "acme", NOW_S - 1, NOW_S + 1)
    assert [(row.id, row.terminal, row.completion_tokens) for row in rows] == [("r1", "stop", 2), ("r2", "stop", 4)]


async def test_the_journal_of_a_living_gateway_is_its_own(redis: BackgroundClient, tmp_path: Path) -> None:
    clock = Clock()
    living, other = ledger(redis, tmp_path, "living"), ledger(redis, tmp_path, "other", clock)
    living.accepted(opening(1))
    await living._journal.sync()
    await other.send()
    assert await ids(redis) == [], "it may end yet"
    await living.settle(outcome(1))
    await living.close()
    clock.now_s += 60
    await other.send()
    assert [(r.id, r.terminal) for r in await read_usage(redis, None, NOW_S - 1, NOW_S + 1)] == [("r1", "stop")]
    await other.close()


async def test_the_last_gateway_takes_up_what_another_left_a_moment_ago(
    redis: BackgroundClient, tmp_path: Path
) -> None:
    clock = Clock()
    dying, last = ledger(redis, tmp_path, "dying"), ledger(redis, tmp_path, "last", clock)
    await last.send()
    await settle(dying, 1)
    await dying._journal.close()
    assert await last.close()
    assert await ids(redis) == ["r1"], "though it looked less than LOOK_PERIOD_S before"


async def test_a_replay_that_is_asked_for_during_a_replay_is_not_forgotten(
    redis: BackgroundClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = ledger(redis, tmp_path)
    await settle(books, 1)
    replay = books._replay

    async def overtaken(path: Path, *, is_over: bool) -> None:
        await replay(path, is_over=is_over)
        books._must_replay = True  # as a cancelled settlement or a full memory does

    with monkeypatch.context() as patch:
        patch.setattr(books, "_replay", overtaken)
        await books.send()
    assert books._must_replay
    await books.close()


async def test_full_files_are_closed_and_owe_nothing(redis: BackgroundClient, tmp_path: Path) -> None:
    """A request that began in one file and ended in another has one row, whoever reads them."""
    journal = Journal(tmp_path, "g", rotate_bytes=400)
    books = ledger(redis, tmp_path, "other")
    books._journal, before = journal, books._journal
    await before.close()
    books.accepted(opening(0))
    books.accepted(opening(999))
    for number in range(1, 12):
        await settle(books, number)
    await books.settle(outcome(0))
    assert len(journal.paths) > 3
    for over in journal.paths[:-1]:
        assert [row.terminal for row in read_rows(over, is_over=True)] == ["stop"] * len(
            list(read_rows(over, is_over=False))
        )
    lost = [row.id for row in read_rows(journal.paths[-1], is_over=True) if row.terminal == "client_lost"]
    assert lost == ["r999"]
    await redis.command("FLUSHALL")
    books._waiting.clear()
    await books.send()
    assert sorted(await ids(redis)) == sorted(f"r{i}" for i in range(12))
    await books.close()


async def test_a_torn_line_costs_no_other_line(redis: BackgroundClient, tmp_path: Path) -> None:
    books = ledger(redis, tmp_path, "g")
    await settle(books, 1, 2)
    await books.close()
    path = tmp_path / "usage-g-0.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    assert [(row.id, row.terminal) for row in read_rows(path, is_over=True)] == [("r1", "stop"), ("r2", "client_lost")]


async def test_old_journals_are_removed_and_locked_ones_left_alone(tmp_path: Path) -> None:
    living = Journal(tmp_path, "living")
    for name in ("old", "young"):
        await Journal(tmp_path, name).close()
    os.utime(tmp_path / "usage-old-0.jsonl", (0, 0))
    os.utime(tmp_path / "usage-living-0.jsonl", (0, 0))
    found = [path.name for path in left_behind(tmp_path, max_age_s=3600)]
    assert found == ["usage-young-0.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["usage-living-0.jsonl", "usage-young-0.jsonl"]
    await living.close()


async def test_a_disk_that_takes_no_more_costs_no_row_and_no_request(
    redis: BackgroundClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    books = ledger(redis, tmp_path)
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if descriptor == books._journal._descriptor:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr("tandem.cluster.tenants.journal.os.write", full)
        await settle(books, 1, 2)
        await settle(books, 3)
    assert sum("cannot be journaled" in record.message for record in caplog.records) == 1
    await settle(books, 4)
    await books.send()
    assert sorted(await ids(redis)) == ["r1", "r2", "r3", "r4"]
    await books.close()


async def test_many_ends_share_a_sync(redis: BackgroundClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = 0
    real = os.fdatasync

    def counted(descriptor: int) -> None:
        nonlocal syncs
        syncs += 1
        real(descriptor)

    monkeypatch.setattr("tandem.cluster.tenants.journal.os.fdatasync", counted)
    books = ledger(redis, tmp_path)
    await settle(books, *range(500))
    assert syncs <= 5
    await books.close()


async def test_usage_is_read_by_tenant_and_time(redis: BackgroundClient, tmp_path: Path) -> None:
    clock = Clock()
    books = ledger(redis, tmp_path, clock=clock)
    for number, tenant in ((1, "acme"), (2, "beta"), (3, "acme"), (5, "acme")):
        books.accepted(opening(number, tenant))
        await books.settle(outcome(number, tenant, time_s=clock.now_s))
        clock.now_s += 20 * 3600
    await books.send()
    assert [row.id for row in await read_usage(redis, None, NOW_S - 1, clock.now_s)] == ["r1", "r2", "r3", "r5"]
    assert [row.id for row in await read_usage(redis, "acme", NOW_S + 1, clock.now_s)] == ["r3", "r5"]
    assert await read_usage(redis, "gamma", NOW_S - 1, clock.now_s) == []
    sums = summed(await read_usage(redis, None, NOW_S - 1, clock.now_s))
    assert [(s.tenant, s.adapter, s.requests, s.prompt_tokens) for s in sums] == [
        ("acme", "a@1", 3, 9),
        ("beta", None, 1, 2),
    ]
    await books.close()


@pytest.mark.parametrize(
    ("text", "since_s"),
    [("24h", NOW_S - 86400), ("1.5m", NOW_S - 90), ("7d", NOW_S - 7 * 86400), ("1970-01-02", 86400.0)],
)
def test_since_is_a_span_or_a_moment(text: str, since_s: float) -> None:
    assert parse_since(text, NOW_S) == since_s


@pytest.mark.parametrize("text", ["", "h", "24", "-1h", "yesterday", "24 h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_since(text, NOW_S)


async def test_the_server_may_restart_at_any_moment(server: RedisServer, tmp_path: Path) -> None:
    redis = patient(server)
    books = ledger(redis, tmp_path)
    sending = asyncio.create_task(books.run())
    for start in range(0, 400, 100):
        await settle(books, *range(start, start + 50))
        server.stop()
        await settle(books, *range(start + 50, start + 100))
        server.start()
    await until(lambda: has(redis, 400), "all rows are there")
    sending.cancel()
    await books.close()
    await redis.close()
