"""UpdateWatch: tells the operator when a new version of an application under Serve does not start, and follows numbers
that change without a restart.

Serve gives up after three tries and keeps the version before; that version's gateways see it in Serve's status, and
write one line in the log and one event. `tandem status --app` says the same for as long as it lasts.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tandem.cluster.fleet.group_events import GroupEvent
from tandem.cluster.ray_private.application_state import ApplicationState

log = logging.getLogger("tandem.gateway")
LOOK_PERIOD_S = 10.0


class UpdateWatch:
    """ask: for the state of the application; None: not known. tell: writes an event. follow: is called at each look."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[ApplicationState | None]],
        tell: Callable[[GroupEvent], Awaitable[None]],
        follow: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._ask = ask
        self._tell = tell
        self._follow = follow
        self._told: str | None = None

    async def look(self) -> None:
        """Tells of a failure that was not told of before; follows what has changed."""
        if self._follow is not None:
            await self._follow()
        if (state := await self._ask()) is None:
            return
        if (why := state.why_failed) is not None and why != self._told:
            log.warning("a new version did not start, the one before serves on: %s", why)
            await self._tell(GroupEvent("not_updated", "", why))
        self._told = why

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            try:
                await self.look()
            except Exception:
                log.exception("the state of the application was not looked at")
