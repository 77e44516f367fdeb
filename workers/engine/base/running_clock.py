"""Clock that leaves out time in which this process was stopped, for timeouts on other processes.

A process that was stopped (SIGSTOP, a paused container, swapping) finds on waking that much time has passed while
messages of others lie unread. That time must not count against them. Used by liveness.py and transfer_manager.py.
"""

from collections.abc import Callable


class RunningClock:
    """Clock that advances by tick() only, by at most longest_tick_s seconds each. For one thread."""

    def __init__(self, clock: Callable[[], float], longest_tick_s: float) -> None:
        self._clock = clock
        self._longest_tick_s = longest_tick_s
        self._ticked_s = clock()
        self.now_s = 0.0

    def tick(self) -> float:
        """Adds the time since the last tick, at most longest_tick_s; returns the new now_s. Called regularly."""
        ticked_s = self._clock()
        self.now_s += min(ticked_s - self._ticked_s, self._longest_tick_s)
        self._ticked_s = ticked_s
        return self.now_s
