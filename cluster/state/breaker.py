"""Circuit breaker for Redis calls: after a few failures in a row it refuses calls for a while. Pure; takes a clock.

closed --3 failures in a row--> open --1 s--> half-open (one probe) --success--> closed
                                 ^---------------failure------------'
"""

from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]


class Breaker:
    """The breaker of one event loop. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], failures_to_open: int = 3, probe_period_s: float = 1.0) -> None:
        self._clock = clock
        self._failures_to_open = failures_to_open
        self._probe_period_s = probe_period_s
        self._failures = 0
        self._state: State = "closed"
        self._probe_at_s = 0.0

    @property
    def state(self) -> State:
        return self._state

    def admit(self, may_probe: bool = True) -> bool:
        """True when a call may go out now. While open, one call per probe period may, the probe (half-open).
        may_probe: the caller can wait for a server that does not answer."""
        if self._state == "closed":
            return True
        if not may_probe or self._clock() < self._probe_at_s:
            return False
        self._state = "half-open"
        self._probe_at_s = self._clock() + self._probe_period_s
        return True

    def record_success(self) -> None:
        self._failures = 0
        self._state = "closed"

    def record_failure(self) -> None:
        """Counts a timeout or a broken connection that Redis caused."""
        self._failures += 1
        if self._state == "half-open" or self._failures >= self._failures_to_open:
            self._state = "open"
            self._probe_at_s = self._clock() + self._probe_period_s
