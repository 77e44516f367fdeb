"""Announcements of changes in Redis: a process that follows a key reads it when it changed, and polls less often.

Writers publish on the channel that has the key's name, within the transaction or script that changes it. Readers never
rely on it: a message may be lost, Redis may refuse to publish or to subscribe, and the poll that each of them keeps
sees the change then. One connection per process, used by nothing else.

    unsubscribed --subscribe--> subscribed --connection lost, or silent--> unsubscribed   (each wakes every waiter)
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Final

from tandem.cluster.state.redis_client import Part, RedisUnavailable, published

log = logging.getLogger("tandem.redis")
SILENT_S = 10.0
"""Time without a message after which the server gets a PING, and has as long again to answer."""
LEAST_PERIOD_S = 0.05
"""Time between two returns of wait() for changes of one key: a burst of changes is read once."""
LEAST_PAUSE_S, MOST_PAUSE_S = 0.1, 5.0
"""Pauses between two tries to subscribe."""
CLOSE_S = 2.0

ANNOUNCE: Final = "redis.pcall('PUBLISH', KEYS[1], '')"
"""A script, or a line of one, that has changed its first key. pcall: a user who may not publish may still write."""


def announcement(key: str) -> list[Part]:
    """The last command of a transaction that changes `key`. A bare PUBLISH that is refused would undo the others."""
    return ["EVAL", ANNOUNCE, 1, key]


class Announcements:
    """Announcements that a follower of keys waits for. As it is, without Redis or a subscription, there are none."""

    @property
    def is_subscribed(self) -> bool:
        """True while changes are announced, so that polls can be rare."""
        return False

    async def wait(self, key: str, timeout_s: float) -> None:
        """Returns when `key` has changed since the last wait for it, or may have; at the latest after timeout_s. Only
        one task waits for a key."""
        del key
        await asyncio.sleep(timeout_s)


class Changes(Announcements):
    """Announcements over Redis, from start() to close(). One event loop. `where`: the URL of now; never waits."""

    def __init__(
        self,
        where: Callable[[], str],
        keys: Iterable[str],
        subscribe: Callable[[str, list[str], float], AsyncGenerator[str | None, None]] = published,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._where = where
        self._subscribe = subscribe
        self._clock = clock
        self._news = {key: asyncio.Event() for key in keys}
        self._told_s = dict.fromkeys(self._news, -LEAST_PERIOD_S)
        self._is_subscribed = False
        self._has_said = False
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_subscribed(self) -> bool:
        return self._is_subscribed

    async def wait(self, key: str, timeout_s: float) -> None:
        news = self._news[key]
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await news.wait()
        if news.is_set():
            await asyncio.sleep(max(0.0, self._told_s[key] + LEAST_PERIOD_S - self._clock()))
            self._told_s[key] = self._clock()
            news.clear()

    def start(self) -> None:
        """Starts to subscribe, again and again until close()."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="changes")

    async def close(self) -> None:
        """Ends the connection. Waiters go on until their timeout."""
        self._is_closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_S)

    # ---- inside --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause_s = LEAST_PAUSE_S
        while True:
            began_s = self._clock()
            try:
                await self._listen()
            except RedisUnavailable as error:
                if not self._has_said:
                    log.info("Redis does not announce changes (%s): they are seen by polls", error)
                self._has_said = True
            except Exception:
                if not self._has_said:
                    log.exception("no subscription to changes: they are seen by polls")
                self._has_said = True
            if self._is_closing:  # an error of the client library's may take the place of the cancellation
                return
            lasted = self._clock() - began_s > 2 * MOST_PAUSE_S
            pause_s = LEAST_PAUSE_S if lasted else min(2 * pause_s, MOST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _listen(self) -> None:
        """Receives announcements until the URL of Redis changes. Raises RedisUnavailable."""
        url = self._where()
        async with aclosing(self._subscribe(url, list(self._news), SILENT_S)) as channels:
            try:
                async for key in channels:
                    if not self._is_subscribed:
                        self._set_subscribed(True)
                        self._has_said = False
                    if key in self._news:
                        self._news[key].set()
                    if self._where() != url or self._is_closing:
                        return
            finally:
                if self._is_subscribed:
                    self._set_subscribed(False)

    def _set_subscribed(self, is_subscribed: bool) -> None:
        self._is_subscribed = is_subscribed
        for news in self._news.values():
            news.set()
