"""--usage-rows: beyond so many usage rows in Redis, the oldest become sums by hour. Rows are written by ledger.py.

A row is deleted and added to its sums in one script, so that what a tenant has used stays right at every moment.
"""

import asyncio
import datetime
import logging
import time
from collections.abc import Callable, Iterable, Iterator

from tandem.cluster.state import keys
from tandem.cluster.state.lease import RedisLease
from tandem.cluster.state.lua import load_lua
from tandem.cluster.state.redis_client import Commands, RedisUnavailable, text_of
from tandem.cluster.tenants.billing_record import (
    DAY_S,
    HOUR_S,
    PAGE,
    BillingRecord,
    day_of,
    sums_by_hour,
    tenants_of,
    unpack,
)

log = logging.getLogger("tandem.ledger")
BATCH = 256
COUNT_PERIOD_S = 60.0
GRACE_S = 3600.0
"""Rows are not summed up before: those of an outage may yet come."""
_SUM_UP = load_lua(__file__, "usage_sum_up.lua")


class UsageCap:
    """Keeps at most `most` rows in Redis: beyond that the oldest become sums by hour, so that what a tenant has used
    stays right. One gateway of a service does it at a time. kept_s: how long Redis keeps sums."""

    def __init__(
        self, redis: Commands, gateway: str, most: int, kept_s: int, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._redis = redis
        self._most = most
        self._kept_s = kept_s
        self._wall_clock = wall_clock
        self._lease = RedisLease(redis, keys.USAGE_LEASE, gateway, keys.USAGE_LEASE_TTL_MS)
        self.summed_rows = 0

    async def run(self) -> None:
        """Counts and sums up until it is cancelled."""
        is_failing = False
        while True:
            await asyncio.sleep(COUNT_PERIOD_S)
            try:
                await self.enforce()
                is_failing = False
            except RedisUnavailable as error:
                level = logging.DEBUG if is_failing else logging.WARNING
                log.log(level, "Redis may hold more usage rows than --usage-rows: they were not counted: %s", error)
                is_failing = True
            except Exception:
                log.exception("usage rows were not counted")

    async def enforce(self) -> None:
        """Sums up as many hours as it takes, the oldest first, and none of the last GRACE_S."""
        if not await self._lease.take():
            return
        days = {day: await tenants_of(self._redis, day) for day in self._days()}
        over, before = await self._count(days) - self._most, self.summed_rows
        for day, until_s in self._ends(days):
            if over <= 0 or not await self._lease.take():
                break
            for tenant in days[day]:
                over -= await self._sum_up(tenant, day, until_s)
        if done := self.summed_rows - before:
            log.warning("--usage-rows: the %d oldest usage rows are sums now; the journals have the rows", done)
        if over > 0:
            log.error("Redis holds %d usage rows more than --usage-rows: they are of the last hour", over)

    async def _count(self, days: dict[str, list[str]]) -> int:
        places = [keys.usage(tenant, day) for day, tenants in days.items() for tenant in tenants]
        total = 0
        for start in range(0, len(places), PAGE):
            lengths = await self._redis.pipeline([["HLEN", place] for place in places[start : start + PAGE]])
            total += sum(length for length in lengths if isinstance(length, int))
        return total

    async def _sum_up(self, tenant: str, day: str, until_s: int) -> int:
        """Sums up the rows of before until_s; returns how many it was."""
        place, cursor, summed = keys.usage(tenant, day), "0", 0
        while True:
            answer = await self._redis.command("HSCAN", place, cursor, "COUNT", BATCH)
            assert isinstance(answer, list | tuple), answer
            old = [row for field, raw in answer[1].items() if (row := unpack(field, raw)).time_s < until_s]
            if old and await self._replace(old, place, keys.usage_sums(day), until_s):
                summed += len(old)
                self.summed_rows += len(old)
            cursor = text_of(answer[0])
            if cursor == "0":
                return summed

    async def _replace(self, rows: Iterable[BillingRecord], place: str, sums: str, until_s: int) -> bool:
        ids = [row.id for row in rows]
        amounts = [part for pair in sums_by_hour(rows).items() for part in pair]
        names, kept = (place, sums, keys.USAGE_SUMMED), (until_s, self._kept_s)
        answer = await self._redis.command("EVAL", _SUM_UP, len(names), *names, len(ids), *ids, *kept, *amounts)
        return bool(answer)

    def _days(self) -> list[str]:
        """The days that may have rows, the oldest first."""
        now_s = self._wall_clock()
        return [day_of(now_s - age * DAY_S) for age in range(self._kept_s // DAY_S + 1, -1, -1)]

    def _ends(self, days: Iterable[str]) -> Iterator[tuple[str, int]]:
        """The moments up to which each day can be summed up: its end, or, of a day that has not ended, its hours."""
        latest_s = self._wall_clock() - GRACE_S
        for day in days:
            began_s = int(datetime.datetime.strptime(f"{day}+0000", "%Y%m%d%z").timestamp())
            hours = range(1, DAY_S // HOUR_S + 1) if began_s + DAY_S > latest_s else (DAY_S // HOUR_S,)
            yield from ((day, end_s) for hour in hours if (end_s := began_s + hour * HOUR_S) <= latest_s)
