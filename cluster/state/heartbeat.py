"""A process's record in Redis, written again each period; it expires when it is not renewed.

What the two kinds of records have in common: a group's (fleet_view.py) and a gateway's (gateway_records.py).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

import msgspec

from tandem.cluster.state.redis_client import Commands, RedisUnavailable

log = logging.getLogger("tandem.fleet")
LEAST_PERIOD_S = 0.1
SET_TTL_S = 3600
R = TypeVar("R", bound=msgspec.Struct)


class RecordPlace(NamedTuple):
    """The place of a record: its key, and its id in the set of live records."""

    key: str
    ids: str
    own_id: str
    ttl_ms: int


class Heartbeat(Generic[R]):
    """Writes one record each period until it is cancelled."""

    def __init__(
        self, redis: Commands, place: Callable[[R], RecordPlace], read: Callable[[], R], period_s: float = 1.0
    ) -> None:
        self._redis = redis
        self._place = place
        self._read = read
        self._period_s = period_s
        self._triggered = asyncio.Event()

    async def send_heartbeat(self) -> None:
        """Writes the record now."""
        record = self._read()
        place = self._place(record)
        await self._redis.pipeline(
            [
                ["SET", place.key, msgspec.msgpack.encode(record), "PX", place.ttl_ms],
                ["SADD", place.ids, place.own_id],
                ["EXPIRE", place.ids, SET_TTL_S],
            ]
        )

    async def run(self) -> None:
        """Writes the record each period until cancelled; a write that fails is skipped."""
        while True:
            self._triggered.clear()
            try:
                await self.send_heartbeat()
            except RedisUnavailable as error:
                log.warning("heartbeat skipped: %s", error)
            except Exception:
                log.exception("heartbeat skipped")
            soonest_s = time.monotonic() + LEAST_PERIOD_S
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._triggered.wait()
            await asyncio.sleep(max(0.0, soonest_s - time.monotonic()))

    def trigger(self) -> None:
        """Brings the next heartbeat forward to now, for a change that others wait for (at most ten a second)."""
        self._triggered.set()

    async def leave(self) -> None:
        """Removes the record: the process leaves on purpose."""
        place = self._place(self._read())
        await self._redis.pipeline([["DEL", place.key], ["SREM", place.ids, place.own_id]])


async def read_live(redis: Commands, ids: Sequence[str], key: Callable[[str], str], ids_key: str) -> list[bytes]:
    """Reads the records with these ids, which the set `ids_key` has; ids whose record has expired leave the set: a live
    process writes its id with its next record. RedisUnavailable."""
    if not ids:
        return []
    values = await redis.command("MGET", *map(key, ids))
    assert isinstance(values, list), values
    if dead := [i for i, value in zip(ids, values, strict=True) if value is None]:
        await redis.command("SREM", ids_key, *dead)
    return [value for value in values if isinstance(value, bytes)]
