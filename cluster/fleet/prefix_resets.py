"""Orders to all groups to forget their prefix caches: a counter in Redis, which is announced.

A gateway raises it. Each group that sees a new number tells its engine, and then names the number in its record. The
counter begins at the wall clock's milliseconds, so that no number comes twice even when Redis has lost it.
"""

import logging
import time
from collections.abc import Awaitable, Callable

from tandem.cluster.fleet.group_reports import is_cancelled
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Announcements, announcement
from tandem.cluster.state.redis_client import Commands, RedisUnavailable

log = logging.getLogger("tandem.fleet")
POLL_S, SUBSCRIBED_POLL_S = 1.0, 5.0
"""Periods of looks for orders: while they are not announced, and while they are."""


class ResetFollower:
    """A group's side. forget: has the engine forget its prefix cache, and returns once it has. done: the number of the
    last order that was obeyed; on_done is called then."""

    def __init__(
        self,
        redis: Commands,
        service: str,
        forget: Callable[[], Awaitable[object]],
        on_done: Callable[[], None],
        changes: Announcements,
    ) -> None:
        self._redis = redis
        self._key = keys.prefix_resets(service)
        self._forget = forget
        self._on_done = on_done
        self._changes = changes
        self.done = 0

    async def run(self) -> None:
        """Obeys until it is cancelled."""
        while not is_cancelled():
            try:
                await self.look()
            except RedisUnavailable as error:
                log.debug("orders to forget prefix caches were not read: %s", error)
            except Exception:
                log.exception("an order to forget the prefix cache was not followed")
            if is_cancelled():
                return
            await self._changes.wait(self._key, SUBSCRIBED_POLL_S if self._changes.is_subscribed else POLL_S)

    async def look(self) -> None:
        """Obeys the newest order, if it is a new one. RedisUnavailable."""
        value = await self._redis.command("GET", self._key)
        number = int(value) if isinstance(value, bytes) else 0
        if number > self.done:
            await self._forget()
            self.done = number
            self._on_done()


async def order_reset(redis: Commands, service: str) -> int:
    """Orders all groups to forget their prefix caches. Returns the order's number. RedisUnavailable."""
    key = keys.prefix_resets(service)
    _, _, number, _ = await redis.pipeline(
        [
            ["EXPIRE", key, keys.PREFIX_RESETS_TTL_S],
            ["SET", key, time.time_ns() // 1_000_000, "EX", keys.PREFIX_RESETS_TTL_S, "NX"],
            ["INCR", key],
            announcement(key),
        ]
    )
    assert isinstance(number, int), number
    return number
