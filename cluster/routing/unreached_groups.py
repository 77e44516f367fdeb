"""Groups that calls of this gateway do not reach, by its own experience: a proxy, a firewall or a dead machine between.

    call fails -> unreached --- call arrives, or none has failed for AGAIN_S --> reached

Serve tries a call that did not arrive again at once and for ever. The router holds it a moment first, and the dispatch
ends it with an error when no group has been reached for a while.
"""

import time
from collections.abc import Callable, Iterable

import msgspec

AGAIN_S = 5.0
FIRST_PAUSE_S, MOST_PAUSE_S = 0.02, 0.5


class _Failures(msgspec.Struct):
    """Calls that failed one after the other."""

    first_s: float
    last_s: float
    count: int = 1


class UnreachedGroups:
    """The groups to which the last calls failed. One thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[str, _Failures] = {}

    def failed(self, group: str) -> bool:
        """Notes a call that did not arrive. Returns True if it is the first of a series."""
        now_s, before = self._clock(), self._failures.get(group)
        if before is None or now_s - before.last_s > AGAIN_S:
            self._failures[group] = _Failures(now_s, now_s)
            return True
        before.last_s, before.count = now_s, before.count + 1
        return False

    def reached(self, group: str) -> None:
        """Notes a call that did arrive."""
        self._failures.pop(group, None)

    def for_s(self, group: str) -> float:
        """Seconds for which no call has reached the group; 0 if none has failed of late."""
        series = self._series(group)
        return 0.0 if series is None else self._clock() - series.first_s

    def pause_s(self, groups: Iterable[str]) -> float:
        """Seconds to wait before another call to these groups: 0 while one of them may be reached, else longer with
        each failure."""
        if not self._failures:
            return 0.0
        counts = [0 if (series := self._series(group)) is None else series.count for group in groups]
        least = min(counts, default=0)
        return 0.0 if least == 0 else float(min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(least - 1, 16)))

    def keep_only(self, groups: Iterable[str]) -> None:
        """Forgets groups that are gone."""
        alive = set(groups)
        self._failures = {group: series for group, series in self._failures.items() if group in alive}

    def _series(self, group: str) -> _Failures | None:
        series = self._failures.get(group)
        return None if series is None or self._clock() - series.last_s > AGAIN_S else series
