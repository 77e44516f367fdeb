"""TimeToLeave: how long a replica that Serve takes down may go on with what it has.

    taken down -> (replaced_s) -> over
               -> the application itself ends -> (ended_s) -> over

A gateway that is replaced lets its streams end, for minutes; when the whole service ends nobody waits that long. Serve
tells a replica only that it goes, and one that goes may outlive the version that replaced it, so the application is
looked at again and again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

LOOK_PERIOD_S = 2.0


class TimeToLeave:
    """replaced_s: the time while the application stays. ended_s: from when it is seen to end, which is less. is_ending:
    whether it does. clock, pause: of tests."""

    def __init__(
        self,
        replaced_s: float,
        ended_s: float,
        is_ending: Callable[[], Awaitable[bool]],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._replaced_s = replaced_s
        self._ended_s = min(ended_s, replaced_s)
        self._is_ending = is_ending
        self._clock = clock
        self._pause = pause

    async def wait(self) -> None:
        """Returns when the time is over, counted from this call."""
        due_s = self._clock() + self._replaced_s
        ends = False
        while (left_s := due_s - self._clock()) > 0:
            if not ends and await self._is_ending():
                ends = True
                due_s = min(due_s, self._clock() + self._ended_s)
                continue
            await self._pause(left_s if ends else min(left_s, LOOK_PERIOD_S))
