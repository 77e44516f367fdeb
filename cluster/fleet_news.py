"""The launcher's ear while it serves: a line when a group dies, when another takes its place, when the fleet shrinks.

A thread of its own that sleeps until something is announced in Redis. It starts when the service is ready, so the
groups of the start are no news.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from cluster.coordination import keys
from cluster.coordination.changes import Changes
from cluster.coordination.client import BackgroundClient, RedisAway
from cluster.coordination.events import Event, take_events

log = logging.getLogger("tandem.launcher")
POLL_S = 60.0
"""Between two looks when nothing is announced: a user of Redis may be refused the channel."""
STOP_S = 3.0
MOST_ENDED = 1000


class Lines:
    """What there is to say of events: of a group's end once, whoever tells of it."""

    def __init__(self) -> None:
        self._ended: dict[str, None] = {}

    def of(self, event: Event) -> str | None:
        if event.kind == "serving":
            return f"group {event.group} serves"
        if event.kind == "returned":
            return f"group {event.group} is back" if self._ended.pop(event.group, True) is None else None
        if event.group in self._ended:
            return None
        self._ended[event.group] = None
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        if event.kind == "left":
            return f"group {event.group} has ended"
        if event.kind == "failed":
            return f"group {event.group} did not start: {event.reason}; Serve tries another"
        what = f"is lost: {event.reason}" if event.kind == "lost" else "has vanished: it was killed or is frozen"
        return f"group {event.group} {what}; its requests go on with another, Serve starts one in its place"


class FleetNews:
    """`say` is called on the thread, between start() and stop()."""

    def __init__(self, redis_url: str, service: str, say: Callable[[str], None]) -> None:
        self._url = redis_url
        self._service = service
        self._say = say
        self._lines = Lines()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tandem-news", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """From now on groups end because they are told to. Whatever became of the thread."""
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._cancel)
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._follow())
        except asyncio.CancelledError:
            pass
        except Exception:
            log.exception("deaths of groups are no longer said")
        finally:
            self._loop.close()

    async def _follow(self) -> None:
        redis = BackgroundClient(self._url, timeout_s=1.0, retries=1)
        key = keys.events(self._service)
        changes = Changes(lambda: self._url, (key,))
        try:
            await self._take(redis)
            changes.start()
            while True:
                await changes.wait(key, POLL_S)
                for event in await self._take(redis):
                    if (line := self._lines.of(event)) is not None:
                        self._say(line)
        finally:
            await changes.close()
            await redis.close()

    async def _take(self, redis: BackgroundClient) -> list[Event]:
        try:
            return await take_events(redis, self._service)
        except RedisAway as error:
            log.info("what becomes of groups is not known: %s", error)
            return []
