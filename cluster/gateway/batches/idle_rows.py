"""Rows of the groups that nobody else uses: lines of batches take those, and no others.

A gateway knows from the groups' records how many sequences run and wait, and how many of them are lines of whatever
gateway. While a request waits no line begins, and an eighth of the rows is left free for those that come. Records are
up to a second old, and a line may have many prompts or choices, so a burst of requests may find rows taken by lines:
these give way (workers/engine/waiting/least_share.py).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

LOOK_S = 0.25
"""Pause between two looks for an idle row, where no line has ended."""
RECORD_S = 1.5
"""Age of a record, at most."""
KV_FULL = 0.9
"""Share of the KV in use from which on no line begins."""


class IdleRows:
    """The lines of one gateway. load: as Dispatch.load(). rows: of one group. is_asleep: there is no group, and the
    first request brings one."""

    def __init__(
        self, load: Callable[[], Mapping[str, float | int | str]], rows: int, is_asleep: Callable[[], bool]
    ) -> None:
        self._load = load
        self._rows = rows
        self._is_asleep = is_asleep
        self._mine: Counter[str] = Counter()
        self._asking: Counter[str] = Counter()
        # the fewest and the most lines in this and the last time of a record
        self._now = self._before = (0, 0)
        self._turned_s = 0.0
        self._changed = asyncio.Event()

    @property
    def lines(self) -> int:
        """Lines that run here."""
        return self._mine.total()

    async def take(self, tenant: str, most: Callable[[], int | None], is_over: Callable[[], bool]) -> bool:
        """Waits for an idle row, and counts a line until give_back(). Of the tenants that ask, those with the fewest
        lines come first. most: lines of the tenant at once; None: any number. False once is_over."""
        while not is_over():
            limit = most()
            may_have = limit is None or self._mine[tenant] < limit
            if may_have and self._is_next(tenant) and self._room() > 0:
                self._count(tenant, 1)
                self._changed.set()  # others may be next now
                return True
            self._asking[tenant] += may_have
            try:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
            finally:
                self._asking[tenant] -= may_have
        return False

    def _is_next(self, tenant: str) -> bool:
        self._asking = +self._asking
        return all(self._mine[tenant] <= self._mine[other] for other in self._asking)

    def give_back(self, tenant: str) -> None:
        """A line is over."""
        self._count(tenant, -1)
        self._changed.set()

    def _room(self) -> int:
        """Lines that may begin now."""
        if self._is_asleep():
            return 1 - self.lines
        load = self._load()
        running, waiting = int(load.get("idle_work_running", 0)), int(load.get("idle_work_waiting", 0))
        requests = int(load["num_requests_running"]) - running
        if int(load["num_requests_waiting"]) > waiting or float(load.get("kv_cache_usage_perc", 0.0)) >= KV_FULL:
            return 0
        rows = self._rows * int(load.get("groups_serving", 1))
        free = rows - max(1, rows // 8) if rows > 1 else rows
        return free - requests - self._others(running + waiting) - self.lines

    def _others(self, known: int) -> int:
        """Sequences of lines of other gateways, of those that records tell of. Which of its own these count is not
        known: if the most that ran lately are all of them, there are no others; else the fewest are taken off."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._turned_s + RECORD_S:
            self._turned_s, self._before, self._now = now_s, self._now, (self.lines, self.lines)
        if known <= max(self._before[1], self._now[1]):
            return 0
        return known - min(self._before[0], self._now[0])

    def _count(self, tenant: str, change: int) -> None:
        self._mine[tenant] += change
        if not self._mine[tenant]:
            del self._mine[tenant]
        self._now = min(self._now[0], self.lines), max(self._now[1], self.lines)
