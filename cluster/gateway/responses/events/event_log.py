"""EventLog: the events of one response on their way to Redis, from the gateway that makes it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tandem.cluster.gateway.responses.events.event_batch import ENDS, Batch, batch_of
from tandem.cluster.state.redis_client import RedisUnavailable

log = logging.getLogger("tandem.gateway")
BATCH_BYTES = 64 * 1024
MOST_BYTES = 4 * 2**20
"""Events that may wait for Redis; beyond them the response waits too, as a stream does for a client."""
RETRY_S = 1.0


class EventLog:
    """Gathers events and appends them in batches, one after the other; while Redis is away they wait here. first: those
    that begin the response, which are stored with it. Used by two tasks: one writes, one runs it."""

    def __init__(self, first: bytes) -> None:
        self.first = first
        self._number = first.count(ENDS)
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._some = asyncio.Event()
        self._in_hurry = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._give_up_s: float | None = None
        self._is_over = False

    async def write(self, events: bytes) -> None:
        """Takes whole events. Waits while too many do."""
        while self._bytes > MOST_BYTES and not self._is_over:
            self._has_room.clear()
            await self._has_room.wait()
        if not self._is_over:
            self._pieces.append(events)
            self._bytes += len(events)
            self._some.set()
            if self._bytes >= BATCH_BYTES:
                self._in_hurry.set()

    def close(self, patience_s: float) -> None:
        """No more come. patience_s: time for what waits."""
        self._give_up_s = asyncio.get_running_loop().time() + patience_s
        self._some.set()
        self._in_hurry.set()

    async def run(self, append: Callable[[Batch], Awaitable[str | None]], pause_s: Callable[[], float]) -> bool:
        """Appends what was written until all is, and returns True; False where the response is over before, or Redis is
        away for too long. append: returns None, or why the response is over, or raises RedisUnavailable. pause_s: time
        in which events gather."""
        try:
            while await self._gather(pause_s()):
                batch = await self._next()
                if not await self._append(append, batch):
                    return False
                self._number = batch.number
                self._has_room.set()
            return True
        finally:
            self._is_over = True
            self._has_room.set()

    async def _gather(self, pause_s: float) -> bool:
        """Waits for a batch; False when none will come."""
        await self._some.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._in_hurry.wait()
        return bool(self._pieces)

    async def _next(self) -> Batch:
        """The next batch, which is taken out."""
        end, size = 0, 0
        while end < len(self._pieces) and size < BATCH_BYTES:
            size += len(self._pieces[end])
            end += 1
        events = b"".join(self._pieces[:end])
        del self._pieces[:end]
        self._bytes -= size
        if self._give_up_s is None:
            if not self._pieces:
                self._some.clear()
            if self._bytes < BATCH_BYTES:
                self._in_hurry.clear()
        return await batch_of(events, self._number)

    async def _append(self, append: Callable[[Batch], Awaitable[str | None]], batch: Batch) -> bool:
        """Appends a batch, which may be there already when a reply was lost."""
        while True:
            try:
                return await append(batch) is None
            except RedisUnavailable as error:
                if self._give_up_s is not None and asyncio.get_running_loop().time() >= self._give_up_s:
                    log.warning("the events of a response are not stored: %s", error)
                    return False
                await asyncio.sleep(RETRY_S)
