"""Reports of groups over a real Redis: written when asked for, once, and never waited for long."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from tandem.cluster.fleet.fleet_view import FleetView, GroupRecord
from tandem.cluster.fleet.group_reports import GroupReport, GroupReports, ReportWriter
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.scaling.decide import FIGURES
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import BackgroundClient, Part, RedisUnavailable
from tests.support.subscribed import subscribed

PATIENT_S = 30.0
IMPATIENT_S = 0.05


class Group:
    """A writer that runs, and how often it was read."""

    def __init__(self, redis: BackgroundClient, name: str, changes: Announcements = Announcements()) -> None:
        self.name = name
        self.times = 0
        self.writer = ReportWriter(redis, "s", self._read, changes)

    def _read(self) -> GroupReport:
        self.times += 1
        return GroupReport(group=self.name, model="m", rank_pids=[self.times])


@asynccontextmanager
async def running(*writers: ReportWriter) -> AsyncIterator[None]:
    """They answer while the block runs, which ends while Redis is there."""
    tasks = [asyncio.create_task(writer.run()) for writer in writers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=PATIENT_S)


async def test_each_question_is_answered_once_by_each_group(server: RedisServer, redis: BackgroundClient) -> None:
    async with subscribed(server.url, keys.reports_asked("s")) as changes:
        group = Group(redis, "g1", changes)
        reports = GroupReports(redis, "s")
        async with running(group.writer):
            for count in (1, 2, 3):
                (report,) = await reports.read(["g1"], PATIENT_S)
                assert (report.group, report.rank_pids) == ("g1", [count])
        assert group.times == 3


@pytest.mark.parametrize("loss", [["DEL", keys.reports_asked("s")], ["FLUSHALL"]])
async def test_a_question_after_the_counter_is_lost_is_answered_as_well(
    server: RedisServer, redis: BackgroundClient, loss: list[Part]
) -> None:
    async with subscribed(server.url, keys.reports_asked("s")) as changes:
        group = Group(redis, "g1", changes)
        async with running(group.writer):
            await GroupReports(redis, "s").read(["g1"], PATIENT_S)
            await redis.command(*loss)
            (report,) = await GroupReports(redis, "s").read(["g1"], PATIENT_S)
    assert report.rank_pids == [2]
    assert 0 < int(await redis.command("TTL", keys.reports_asked("s"))) <= keys.REPORTS_ASKED_TTL_S


async def test_without_a_question_nothing_is_written(redis: BackgroundClient) -> None:
    group = Group(redis, "g1")
    await group.writer.answer()
    assert group.times == 0 and not await redis.command("EXISTS", keys.group_report("s", "g1"))
    await redis.command("INCR", keys.reports_asked("s"))
    await group.writer.answer()
    await group.writer.answer()
    assert group.times == 1
    assert 0 < int(await redis.command("PTTL", keys.group_report("s", "g1"))) <= keys.GROUP_REPORT_TTL_MS


async def test_a_group_that_does_not_answer_shows_its_last_report_and_others_their_new_ones(
    redis: BackgroundClient,
) -> None:
    silent, lively = Group(redis, "silent"), Group(redis, "lively")
    reports = GroupReports(redis, "s")
    async with running(lively.writer):
        async with running(silent.writer):
            assert [report.rank_pids for report in await reports.read(["lively", "silent"], PATIENT_S)] == [[1], [1]]
        assert [report.rank_pids for report in await reports.read(["lively"], PATIENT_S)] == [[2]]
        assert set(reports._known) == {"lively"}, "a group that is gone is forgotten"
        both = {report.group: report.rank_pids for report in await reports.read(["lively", "silent"], 1.0)}
    assert both["silent"] == [1] and both["lively"] >= [2]


async def test_without_redis_the_last_reports_stay_and_nobody_waits(server: RedisServer) -> None:
    redis = BackgroundClient(server.url, timeout_s=PATIENT_S, retries=0)
    group = Group(redis, "g1")
    reports = GroupReports(redis, "s")
    async with running(group.writer):
        known = await reports.read(["g1"], PATIENT_S)
    assert [report.group for report in known] == ["g1"]
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(PATIENT_S / 2):  # the client alone would wait for PATIENT_S
            assert await reports.read(["g1"], IMPATIENT_S) == known
        assert await reports.read(["g1"], may_ask=False) == known
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await redis.close()


async def test_what_cannot_be_read_is_not_shown(redis: BackgroundClient) -> None:
    await redis.command("SET", keys.group_report("s", "g1"), b"\x01")
    assert await GroupReports(redis, "s").read(["g1"], IMPATIENT_S) == []


async def test_a_view_asks_for_reports_unless_redis_is_unavailable(redis: BackgroundClient) -> None:
    record = GroupRecord(group="g1", life=1, model="m", state="serving", host="h", pid=1)
    await redis.command("SET", keys.SENTINEL, "1")
    await redis.command("SADD", keys.groups("s"), "g1")
    await redis.command("SET", keys.group("s", "g1"), msgspec.msgpack.encode(record))
    view = FleetView(redis, "s")
    await view.refresh()
    group = Group(redis, "g1")
    async with running(group.writer):
        (report,) = await view.read_reports(PATIENT_S)
    assert report.rank_pids == [group.times] == [1]
    asked = await redis.command("GET", keys.reports_asked("s"))
    view.redis_state = "is away"
    assert await view.read_reports() == [report]
    assert await redis.command("GET", keys.reports_asked("s")) == asked


async def test_a_writer_goes_on_through_an_outage(redis: BackgroundClient) -> None:
    class Shaky:
        calls = 0

        async def command(self, *parts: object) -> object:
            Shaky.calls += 1
            if Shaky.calls <= 3:
                raise RedisUnavailable("gone")
            return await redis.command(*parts)  # type: ignore[arg-type]

        async def pipeline(self, commands: object) -> list[object]:
            raise AssertionError(commands)

    class Soon:
        is_subscribed = False

        async def wait(self, key: str, timeout_s: float) -> None:
            await asyncio.sleep(0)

    await redis.command("INCR", keys.reports_asked("s"))
    async with running(ReportWriter(Shaky(), "s", Group(redis, "g1")._read, Soon())), asyncio.timeout(PATIENT_S):
        while not await redis.command("EXISTS", keys.group_report("s", "g1")):
            await asyncio.sleep(0)


async def test_a_writer_ends_although_its_client_loses_the_cancellation() -> None:
    asked = asyncio.Event()

    class Losing:
        async def command(self, *parts: object) -> object:
            asked.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)  # until it is cancelled
            return None

        async def pipeline(self, commands: object) -> list[object]:
            raise AssertionError(commands)

    class Soon:
        is_subscribed = False

        async def wait(self, key: str, timeout_s: float) -> None:
            await asyncio.sleep(0)

    running = asyncio.create_task(ReportWriter(Losing(), "s", lambda: GroupReport(group="g", model="m"), Soon()).run())
    await asked.wait()
    running.cancel()
    async with asyncio.timeout(PATIENT_S):
        await running


def test_a_heartbeat_is_small_and_nothing_in_it_grows() -> None:
    record = GroupRecord(
        group="abcd1234", life=1764000000123, model="meta-llama/Llama-3.1-70B-Instruct", state="serving",
        host="ip-10-0-12-34.eu-central-1.compute.internal", pid=1234567, waiting=1000, running=256,
        outstanding_tokens=10**7, kv_used=0.987654321, kv_tokens=10**7, stalled_s=0.123456789,
        loaded_bytes=140 * 10**9, total_bytes=140 * 10**9, load_s=123.456789,
    )  # fmt: skip
    assert len(msgspec.msgpack.encode(record)) < 400
    scaled = msgspec.structs.replace(record, figures=[0.123456789] * len(FIGURES))
    assert len(msgspec.msgpack.encode(scaled)) < 600
    assert all(isinstance(value, str | int | float | list) for value in msgspec.structs.astuple(record))


async def test_a_reader_ends_although_its_client_loses_the_cancellation_of_its_time() -> None:
    class Lossy:
        """Commands that answer, whatever is cancelled meanwhile."""

        async def pipeline(self, commands: object) -> list[object]:
            return [1, None, 7, 1]

        async def command(self, *parts: Part) -> list[None]:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(PATIENT_S)  # until it is cancelled
            return [None]

    async with asyncio.timeout(PATIENT_S / 2):
        assert await GroupReports(Lossy(), "s").read(["g1"], IMPATIENT_S) == []
