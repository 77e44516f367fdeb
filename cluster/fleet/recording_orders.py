"""Orders to groups to write what they have recorded: an entry of a list in Redis, which is announced.

An order is a fresh name and a group. The group writes its recording, and answers under that name where it is or why
there is none; the gateway that gave the order looks for the answer.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable

from tandem.cluster.fleet.group_reports import is_cancelled
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Announcements, announcement
from tandem.cluster.state.redis_client import Commands, RedisUnavailable

log = logging.getLogger("tandem.fleet")
ANSWER_S = 30.0
"""Time for an answer: hiding the ids of a large recording takes a while."""
FIRST_LOOK_S, MOST_PAUSE_S = 0.01, 0.2
POLL_S, SUBSCRIBED_POLL_S = 1.0, 5.0
"""Periods of looks for orders: while they are not announced, and while they are."""
MOST_ORDERS = 64
NAME_BYTES = 8


class RecordingFollower:
    """A group's side. write: writes the recording, and returns the answer."""

    def __init__(
        self,
        redis: Commands,
        service: str,
        group: str,
        write: Callable[[], Awaitable[bytes]],
        changes: Announcements,
    ) -> None:
        self._redis, self._service, self._group = redis, service, group
        self._write = write
        self._changes = changes
        self._seen: set[bytes] = set()

    async def run(self) -> None:
        """Obeys until it is cancelled."""
        while not is_cancelled():
            try:
                await self.look()
            except RedisUnavailable as error:
                log.debug("orders to write a recording were not read: %s", error)
            except Exception:
                log.exception("an order to write a recording was not followed")
            if is_cancelled():
                return
            period_s = SUBSCRIBED_POLL_S if self._changes.is_subscribed else POLL_S
            await self._changes.wait(keys.recordings_asked(self._service), period_s)

    async def look(self) -> None:
        """Obeys the orders that are new and for this group. RedisUnavailable."""
        asked = await self._redis.command("LRANGE", keys.recordings_asked(self._service), 0, -1)
        assert isinstance(asked, list), asked
        new = [entry for entry in asked if entry not in self._seen]
        self._seen = set(asked)
        for entry in new:
            name, _, group = entry.decode(errors="replace").partition(" ")
            if group == self._group:
                key = keys.recording_answer(self._service, name)
                await self._redis.command("SET", key, await self._write(), "PX", keys.RECORDING_ANSWER_TTL_MS)


async def order_recording(redis: Commands, service: str, group: str, timeout_s: float = ANSWER_S) -> bytes | None:
    """Orders a group to write its recording, and returns its answer; None if there was none in time.
    RedisUnavailable."""
    name, key = secrets.token_hex(NAME_BYTES), keys.recordings_asked(service)
    await redis.pipeline(
        [
            ["RPUSH", key, f"{name} {group}"],
            ["LTRIM", key, -MOST_ORDERS, -1],
            ["EXPIRE", key, keys.RECORDINGS_ASKED_TTL_S],
            announcement(key),
        ]
    )
    pause_s, now = FIRST_LOOK_S, asyncio.get_running_loop().time
    until_s = now() + timeout_s
    while now() < until_s:
        answer = await redis.command("GET", keys.recording_answer(service, name))
        if isinstance(answer, bytes):
            return answer
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MOST_PAUSE_S)
    return None
