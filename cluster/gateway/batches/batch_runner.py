"""The batches that a gateway runs: it looks for those that nobody runs, and takes the leases of some.

A batch whose gateway has died is taken up once its lease is over, and has been seen free for a while: when Redis was
away nobody could renew, and who held a lease before comes first. Tenants take turns (tenant_shares.py).
"""

import asyncio
import logging
from contextlib import suppress
from typing import NamedTuple

from tandem.cluster.gateway.batches.batch_records import LIVE
from tandem.cluster.gateway.batches.batch_run import BatchRun, BatchServices
from tandem.cluster.gateway.batches.batch_store import BatchPlace
from tandem.cluster.gateway.batches.tenant_shares import giver, next_place
from tandem.cluster.state.redis_client import RedisUnavailable

log = logging.getLogger("tandem.gateway")
LOOK_S = 2.0
FREE_S = 3.0
"""Time for which a batch that has begun is seen without a lease before it is taken up."""
MOST = 16
"""Batches that one gateway runs at once; they share its idle rows."""


class _Running(NamedTuple):
    run: BatchRun
    task: "asyncio.Task[None]"
    since_s: float


class BatchRunner:
    """The batches of one gateway: run() until it leaves, then close(). created: is set where there is a new one."""

    def __init__(self, services: BatchServices, created: asyncio.Event) -> None:
        self._services = services
        self._store = services.store
        self._runs: dict[BatchPlace, _Running] = {}
        self._free_since_s: dict[BatchPlace, float] = {}
        self._turn_s: dict[str, float] = {}  # by tenant, the last one
        self._created = created
        self._is_closed = False

    async def run(self) -> None:
        """Looks for batches until close()."""
        while not self._is_closed:  # no cancellation: one that meets a call to Redis may be lost
            if not self._services.is_leaving():
                try:
                    await self._look()
                except RedisUnavailable as error:
                    log.debug("batches are not looked for: %s", error)
                except Exception:
                    log.exception("batches were not looked for")
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._created.wait()
                    if not self._is_closed:
                        self._created.clear()

    async def close(self, timeout_s: float) -> None:
        """Waits for the runs, which end when the gateway leaves, and ends those that do not."""
        self._is_closed = True
        self._created.set()
        runs = {running.task for running in self._runs.values()}
        if runs:
            _, late = await asyncio.wait(runs, timeout=timeout_s)
            for run in late:
                run.cancel()
            if late:
                await asyncio.wait(late, timeout=timeout_s)

    async def _look(self) -> None:
        holders = await self._store.holders(await self._store.live())
        self._services.shares.note(holders)
        now_s = asyncio.get_running_loop().time()
        free = [place for place, holder in holders if not holder and place not in self._runs]
        self._free_since_s = {place: self._free_since_s.get(place, now_s) for place in free}
        tenants = {place.tenant for place, _ in holders}
        self._turn_s = {tenant: at_s for tenant, at_s in self._turn_s.items() if tenant in tenants}
        waiting = [place for place in free if await self._may_be_taken(place, now_s)]
        while waiting:
            place = next_place(waiting, self._runs, self._turn_s)
            if len(self._runs) >= MOST:
                self._make_room(place.tenant, now_s)
                return
            waiting.remove(place)
            await self._take_up(place, now_s)

    async def _may_be_taken(self, place: BatchPlace, now_s: float) -> bool:
        """True for a batch that has been free for a while, or has not begun."""
        return now_s >= self._free_since_s[place] + FREE_S or await self._store.status(place) == "validating"

    def _make_room(self, tenant: str, now_s: float) -> None:
        """Has a batch give its place to one of a tenant, if it is that one's turn, and none gives way already."""
        lines_run = {place: one.since_s for place, one in self._runs.items() if one.run.runs_lines}
        if len(lines_run) == len(self._runs) and (place := giver(tenant, lines_run, now_s)) is not None:
            log.info("batch %s of %s gives its place here to one of %s", place.id, place.tenant, tenant)
            self._runs[place].run.give_way()

    async def _take_up(self, place: BatchPlace, now_s: float) -> None:
        if not await self._store.lease(place).take():
            return
        batch = await self._store.get(place)  # as it is under the lease
        if batch is None or batch.status not in LIVE:
            wall_s = self._services.context.wall_clock()
            await self._store.move(place, "failed", wall_s, {}, is_owner=False)  # takes it off the list
            return
        self._turn_s[place.tenant] = now_s
        run = BatchRun(self._services, batch)
        task = asyncio.create_task(run.run(), name=f"batch {place.id}")
        self._runs[place] = _Running(run, task, now_s)
        task.add_done_callback(lambda done: self._ended(place, done))

    def _ended(self, place: BatchPlace, run: "asyncio.Task[None]") -> None:
        del self._runs[place]
        if not run.cancelled() and (error := run.exception()) is not None:
            log.error("batch %s stopped: it is tried again", place.id, exc_info=error)
