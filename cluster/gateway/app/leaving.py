"""Leaving: the end of one gateway's streams, by whichever of three ways it ends.

- `tandem serve` ends the service: drain() refuses new work, and what is in flight has --shutdown-timeout.
- Serve takes this gateway down, or its process gets SIGTERM: begin(). Work that still comes is taken, as Serve's
  proxies may not know yet; streams go on for --gateway-drain-timeout if another gateway takes this one's place, for
  --shutdown-timeout if the application ends.
- finish() is the last step of both: new work is refused, and streams end or are cut off.

Streams that are cut off get an error as their last event.
"""

import asyncio
import logging
from collections.abc import Callable

from tandem.cluster.gateway.http.draining import LAST_WORDS_S, Draining, shutting_down
from tandem.cluster.process.time_to_leave import TimeToLeave
from tandem.workers.messages.errors import RequestRefused

log = logging.getLogger("tandem.gateway")


class Leaving:
    """refuse_all: ends what the groups still compute. timeout_s: --shutdown-timeout. time: of a gateway that goes while
    the service may stay. One event loop."""

    def __init__(
        self,
        draining: Draining,
        refuse_all: Callable[[RequestRefused], None],
        timeout_s: float,
        time: TimeToLeave,
    ) -> None:
        self._draining = draining
        self._refuse_all = refuse_all
        self._timeout_s = timeout_s
        self._time = time
        self._going: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """True once this gateway is on its way out."""
        return self._going is not None or self._draining.begun

    def begin(self) -> None:
        """Starts the time to leave. Idempotent; called on the loop."""
        if self._going is None:
            self._going = asyncio.get_running_loop().create_task(self._cut_off_late(), name="gateway is taken down")

    async def drain(self) -> int:
        """Refuses new work, waits until the requests in flight have ended or --shutdown-timeout is over, and returns
        how many were cut off."""
        self._draining.begin()
        if await self._draining.wait_idle(self._timeout_s):
            return 0
        log.warning("%d requests are cut off by --shutdown-timeout", self._draining.in_flight)
        return await self.cut_off()

    async def cut_off(self) -> int:
        """Ends the requests in flight, each with an error as its last event, and returns how many they were."""
        self._draining.begin()
        count = self._draining.in_flight
        self._draining.cut_off()
        self._refuse_all(shutting_down())
        await self._draining.wait_idle(LAST_WORDS_S)
        return count

    async def finish(self) -> None:
        """Refuses new work, and returns when no request is in flight or the time to leave is over."""
        if self._going is None:
            await self.drain()
            return
        self._draining.begin()
        idle = asyncio.get_running_loop().create_task(self._draining.wait_idle(None), name="gateway is idle")
        try:
            await asyncio.wait((idle, self._going), return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()

    def close(self) -> None:
        """Nothing is left to wait for."""
        if self._going is not None:
            self._going.cancel()

    async def _cut_off_late(self) -> None:
        await self._time.wait()
        if count := self._draining.in_flight:
            log.warning("%d requests are cut off: they were given the time of a gateway that leaves", count)
            await self.cut_off()
