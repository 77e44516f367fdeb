"""Seconds that this process was there to see. For judging others by their silence (rank_pulse.py, step_bound.py).

A process that was itself stopped (SIGSTOP, a paused container, a machine that swaps) finds on waking that much time has
passed, and what the others said meanwhile lies unread. That time must not count against them.
"""

from collections.abc import Callable


class RunningClock:
    """Advances by turn() only, at most `longest_turn_s` a turn. One thread."""

    def __init__(self, clock: Callable[[], float], longest_turn_s: float) -> None:
        self._clock = clock
        self._longest_turn_s = longest_turn_s
        self._turned_s = clock()
        self.now_s = 0.0

    def turn(self) -> float:
        """The owner came round: what has passed since its last turn counts, up to the longest. The new now_s."""
        turned_s = self._clock()
        self.now_s += min(turned_s - self._turned_s, self._longest_turn_s)
        self._turned_s = turned_s
        return self.now_s
