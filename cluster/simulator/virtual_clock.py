"""VirtualClock: simulated time, and the one heap of what is due in it.

Two things that are due at one moment happen in the order in which they were asked for, so a run depends on nothing but
what is in it.
"""

from collections.abc import Callable
from heapq import heappop, heappush


class VirtualClock:
    """Seconds from the start of the simulation. Called, it says the time, as time.monotonic() does."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def __call__(self) -> float:
        return self.now_s

    def at(self, when_s: float, run: Callable[[], None]) -> None:
        """Has `run` called at that time, or now if that has passed."""
        self._count += 1
        heappush(self._due, (when_s if when_s > self.now_s else self.now_s, self._count, run))

    def after(self, delay_s: float, run: Callable[[], None]) -> None:
        """Has `run` called so many seconds from now."""
        self.at(self.now_s + delay_s, run)

    def advance(self) -> bool:
        """Goes on to what is due next, and does it. Returns False where nothing is due any more."""
        if not self._due:
            return False
        self.now_s, _, run = heappop(self._due)
        run()
        return True
