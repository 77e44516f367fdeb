"""The batches that a gateway runs: it looks for those that nobody runs, and takes the leases of some.

A batch whose gateway has died is taken up once its lease is over, and has been seen free for a while: when Redis was
away nobody could renew, and who held a lease before comes first.
"""

import asyncio
import logging
from contextlib import suppress

from tandem.cluster.gateway.batches.batch_records import LIVE
from tandem.cluster.gateway.batches.batch_run import BatchRun, BatchServices
from tandem.cluster.gateway.batches.batch_store import BatchPlace
from tandem.cluster.state.redis_client import RedisUnavailable

log = logging.getLogger("tandem.gateway")
LOOK_S = 2.0
FREE_S = 3.0
"""Time for which a batch that has begun is seen without a lease before it is taken up."""
MOST = 16
"""Batches that one gateway runs at once; they share its idle rows."""


class BatchRunner:
    """The batches of one gateway: run() until it leaves, then close(). created: is set where there is a new one."""

    def __init__(self, services: BatchServices, created: asyncio.Event) -> None:
        self._services = services
        self._store = services.store
        self._runs: dict[BatchPlace, asyncio.Task[None]] = {}
        self._free_since_s: dict[BatchPlace, float] = {}
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
        runs = set(self._runs.values())
        if runs:
            _, late = await asyncio.wait(runs, timeout=timeout_s)
            for run in late:
                run.cancel()
            if late:
                await asyncio.wait(late, timeout=timeout_s)

    async def _look(self) -> None:
        live = await self._store.live()
        self._free_since_s = {place: since for place, since in self._free_since_s.items() if place in live}
        for place in live:
            if len(self._runs) >= MOST:
                return
            if place not in self._runs:
                await self._take_up(place)

    async def _take_up(self, place: BatchPlace) -> None:
        if await self._store.is_held(place):
            self._free_since_s.pop(place, None)
            return
        batch = await self._store.get(place)
        now_s = asyncio.get_running_loop().time()
        free_since_s = self._free_since_s.setdefault(place, now_s)
        is_new = batch is not None and batch.status == "validating"
        if not is_new and now_s < free_since_s + FREE_S:
            return
        if not await self._store.lease(place).take():
            return
        batch = await self._store.get(place)  # as it is under the lease
        if batch is None or batch.status not in LIVE:
            wall_s = self._services.context.wall_clock()
            await self._store.move(place, "failed", wall_s, {}, is_owner=False)  # takes it off the list
            return
        run = asyncio.create_task(BatchRun(self._services, batch).run(), name=f"batch {place.id}")
        self._runs[place] = run
        run.add_done_callback(lambda done: self._ended(place, done))

    def _ended(self, place: BatchPlace, run: "asyncio.Task[None]") -> None:
        del self._runs[place]
        self._free_since_s.pop(place, None)
        if not run.cancelled() and (error := run.exception()) is not None:
            log.error("batch %s stopped: it is tried again", place.id, exc_info=error)
