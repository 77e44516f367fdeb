"""Orders to drain a group: an entry in Redis, which is announced.

A gateway writes it, at an operator's word. The group that it names takes no new requests from then on, and ends once
its own have (cluster/group/last_requests.py); Serve starts another in its place.
"""

import logging
from collections.abc import Awaitable, Callable

import msgspec

from tandem.cluster.fleet.group_reports import is_cancelled
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Announcements, announcement
from tandem.cluster.state.redis_client import Commands, RedisUnavailable

log = logging.getLogger("tandem.fleet")
POLL_S, SUBSCRIBED_POLL_S = 1.0, 5.0
"""Periods of looks for orders: while they are not announced, and while they are."""


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One order. timeout_s: how long requests may go on where they are; then they are handed over."""

    timeout_s: float


class DrainFollower:
    """A group's side. drain: called with the order, until it does not raise."""

    def __init__(
        self,
        redis: Commands,
        service: str,
        group: str,
        drain: Callable[[DrainOrder], Awaitable[None]],
        changes: Announcements,
    ) -> None:
        self._redis = redis
        self._key, self._group = keys.drains(service), group
        self._drain = drain
        self._changes = changes

    async def run(self) -> None:
        """Looks until there is an order, or until it is cancelled."""
        while not is_cancelled():
            try:
                if await self._obeyed():
                    return
            except RedisUnavailable as error:
                log.debug("orders to drain were not read: %s", error)
            except Exception:
                log.exception("an order to drain was not followed")
            if is_cancelled():
                return
            await self._changes.wait(self._key, SUBSCRIBED_POLL_S if self._changes.is_subscribed else POLL_S)

    async def _obeyed(self) -> bool:
        value = await self._redis.command("HGET", self._key, self._group)
        if not isinstance(value, bytes) or is_cancelled():
            return False
        try:
            order = msgspec.msgpack.decode(value, type=DrainOrder)
        except msgspec.DecodeError as error:
            log.warning("an order to drain cannot be read: %s", error)
            return False
        await self._drain(order)
        return True


async def order_drain(redis: Commands, service: str, group: str, order: DrainOrder) -> None:
    """Orders a group to drain; a later order changes nothing. RedisUnavailable."""
    key = keys.drains(service)
    await redis.pipeline(
        [
            ["HSETNX", key, group, msgspec.msgpack.encode(order)],
            ["EXPIRE", key, keys.DRAINS_TTL_S],
            announcement(key),
        ]
    )
