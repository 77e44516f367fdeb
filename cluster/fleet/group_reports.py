"""Reports of groups: their statistics, adapters and notes, written only when somebody asks.

A heartbeat carries what routing, readiness, drain and failover need; the rest is large, and wanted by a scrape of
/metrics, `tandem status` and the like. They ask by raising a counter in Redis, which is announced. It begins at the
wall clock's milliseconds, so that no number comes twice even when Redis has lost it. Each group answers once with a
report that names the number it answers; who asks waits for that a second at most, and goes on with what it knows.
However many ask at the same time, a group writes at most 20 reports a second.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TypeVar

import msgspec

from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Announcements, announcement
from tandem.cluster.state.redis_client import Commands, RedisUnavailable

log = logging.getLogger("tandem.fleet")
R = TypeVar("R", bound=msgspec.Struct)
ANSWER_S = 1.0
FIRST_LOOK_S, MOST_PAUSE_S = 0.005, 0.1
"""Pauses between two looks for answers: first this, then twice the last."""
AT_ONCE = 16
"""Reports in one answer of Redis: with a thousand tenants each has some 60 kB, and streams must not wait."""
POLL_S, SUBSCRIBED_POLL_S = 0.5, 5.0
"""Periods of looks for questions: while they are not announced, and while they are."""


class AdapterReport(msgspec.Struct, frozen=True, kw_only=True):
    """A group's adapters."""

    # keys (routing/residency.py), each in one of the two
    on_device: list[str] = []
    on_host: list[str] = []
    # names of those that requests use, as they lie on the device or not
    running: list[str] = []
    waiting: list[str] = []
    max_loras: int = 0


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """One group at one moment."""

    group: str
    model: str
    answers: int = 0  # the number of the question
    stats: bytes = b""  # msgpack of the engine's statistics, empty before there are any
    rank_pids: list[int] = []
    notes: list[str] = []  # choices made at its start that its user should know
    adapters: AdapterReport | None = None  # None without --enable-lora


class ReportWriter:
    """A group's side: answers questions until it is cancelled. read: the report of now, which this numbers."""

    def __init__(self, redis: Commands, service: str, read: Callable[[], GroupReport], changes: Announcements) -> None:
        self._redis = redis
        self._service = service
        self._read = read
        self._changes = changes
        self._answered = 0

    async def run(self) -> None:
        while not is_cancelled():
            try:
                await self.answer()
            except RedisUnavailable as error:
                log.debug("nobody could ask for a report: %s", error)
            except Exception:
                log.exception("no report was written")
            period_s = SUBSCRIBED_POLL_S if self._changes.is_subscribed else POLL_S
            await self._changes.wait(keys.reports_asked(self._service), period_s)

    async def answer(self) -> None:
        """Writes a report if somebody has asked since the last one. Raises RedisUnavailable."""
        value = await self._redis.command("GET", keys.reports_asked(self._service))
        asked = int(value) if isinstance(value, bytes) else 0
        if asked in (0, self._answered):
            return
        report = msgspec.structs.replace(self._read(), answers=asked)
        key = keys.group_report(self._service, report.group)
        await self._redis.command("SET", key, msgspec.msgpack.encode(report), "PX", keys.GROUP_REPORT_TTL_MS)
        self._answered = asked


def is_cancelled() -> bool:
    """True when this task was told to end: a call of the Redis library may lose the cancellation that comes with its
    result."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class GroupReports:
    """The reader's side: the last known reports of one service's groups. One event loop."""

    def __init__(self, redis: Commands, service: str) -> None:
        self._redis = redis
        self._service = service
        self._known: dict[str, GroupReport] = {}

    async def read(
        self, groups: Collection[str], answer_s: float = ANSWER_S, *, may_ask: bool = True
    ) -> list[GroupReport]:
        """Reports of these groups, by their ids: new ones of those that answer in time, else the last ones known; none
        of a group that has never answered. Takes answer_s at most, whatever Redis does. may_ask: False while Redis is
        known to be unavailable."""
        if may_ask and groups:
            with suppress(RedisUnavailable, TimeoutError):
                async with asyncio.timeout(answer_s):
                    await self._ask(set(groups))
        self._known = {group: report for group, report in self._known.items() if group in groups}
        return [self._known[group] for group in sorted(self._known)]

    async def _ask(self, missing: set[str]) -> None:
        """Asks, and reads until every group has answered."""
        key, pause_s = keys.reports_asked(self._service), FIRST_LOOK_S
        _, _, number, _ = await self._redis.pipeline(
            [
                ["EXPIRE", key, keys.REPORTS_ASKED_TTL_S],
                ["SET", key, time.time_ns() // 1_000_000, "EX", keys.REPORTS_ASKED_TTL_S, "NX"],
                ["INCR", key],
                announcement(key),
            ]
        )
        assert isinstance(number, int), number
        while missing and not is_cancelled():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)
            asked = sorted(missing)
            for first in range(0, len(asked), AT_ONCE):
                missing -= await self._look(asked[first : first + AT_ONCE], number)

    async def _look(self, groups: list[str], number: int) -> set[str]:
        """Reads the reports of some groups; returns those that have answered this question or a later one."""
        values = await self._redis.command("MGET", *(keys.group_report(self._service, group) for group in groups))
        assert isinstance(values, list), values
        pairs = zip(groups, values, strict=True)
        found = {group: decode_record(value, GroupReport, "report", group) for group, value in pairs}
        self._known |= {group: report for group, report in found.items() if report is not None}
        return {group for group, report in found.items() if report is not None and report.answers >= number}


def decode_record(value: object, kind: type[R], what: str, group: str) -> R | None:
    """A group's record or report (`what`) from an answer of Redis; None when there is none, or it cannot be read."""
    if not isinstance(value, bytes):
        return None
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except msgspec.DecodeError as error:
        log.warning("the %s of group %s cannot be read: %s", what, group, error)
        return None
