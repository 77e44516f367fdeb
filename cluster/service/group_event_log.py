"""Lines on the launcher's terminal about groups that are lost, replaced or ended while the service runs.

A thread of its own waits for announcements in Redis. It starts when the service is ready; events of the start are
dropped.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from tandem.cluster.fleet.group_events import GroupEvent, take_events
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Changes
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable

log = logging.getLogger("tandem.launcher")
POLL_S = 60.0
"""Between two reads without an announcement: a Redis user may lack the right to the channel."""
STOP_S = 3.0
MOST_ENDED = 1000


class Lines:
    """Turns events into lines: one for each end of a group, whichever process reported it first. most_groups: so many
    serve at the same time at most."""

    def __init__(self, most_groups: int) -> None:
        self._ended: dict[str, None] = {}
        new = "the new one that Serve starts"
        self._next = f"wait for {new}" if most_groups == 1 else f"go on with another that serves, or with {new}"

    def of(self, event: GroupEvent) -> str | None:
        """The event's line; None for one that repeats."""
        if event.kind == "serving":
            return f"group {event.group} serves"
        if event.kind == "returned":
            return f"group {event.group} is back" if self._ended.pop(event.group, True) is None else None
        if event.kind == "not_updated":
            return f"a new version did not start: {event.reason}"
        if event.group in self._ended:
            return None
        self._ended[event.group] = None
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        if event.kind == "left":
            return f"group {event.group} has ended"
        if event.kind == "failed":
            return f"group {event.group} did not start: {event.reason}; Serve tries another"
        return f"{event.loss}; its requests {self._next}"


class GroupEventLog:
    """The thread. most_groups: as of Lines. print_line is called on it, between start() and stop()."""

    def __init__(self, redis_url: str, service: str, most_groups: int, print_line: Callable[[str], None]) -> None:
        self._url = redis_url
        self._service = service
        self._print_line = print_line
        self._lines = Lines(most_groups)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tandem-group-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, also one that has not started or has failed; groups end on purpose from now on."""
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
            log.exception("the ends of groups are no longer reported")
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
                        self._print_line(line)
        finally:
            await changes.close()
            await redis.close()

    async def _take(self, redis: BackgroundClient) -> list[GroupEvent]:
        try:
            return await take_events(redis, self._service)
        except RedisUnavailable as error:
            log.info("group events cannot be read: %s", error)
            return []
