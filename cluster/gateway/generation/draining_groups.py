"""DrainingGroups: groups that Serve is taking down (scaling in, a new version), whose requests are handed over in time,
and those that an operator drains, which hand them over themselves. Neither gets new requests.

Serve's router no longer lists a group that Serve takes down while it still serves; at the end of --shutdown-timeout
Serve kills it. One that is drained says so in its record.
"""

from collections.abc import Callable, Collection, Iterable

from tandem.cluster.fleet.fleet_view import GroupRecord

HAND_OVER_S = 2.0
"""Before the end of the timeout: requests that are still running are moved."""


class DrainingGroups:
    """running: the groups that Serve's router lists, None before it lists any. timeout_s: how long Serve lets a group
    finish its requests."""

    def __init__(
        self, running: Callable[[], Collection[str] | None], timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._running = running
        self._after_s = max(timeout_s - HAND_OVER_S, timeout_s / 2)
        self._clock = clock
        self._known: set[str] = set()
        self._since_s: dict[str, float] = {}
        self._told: set[str] = set()

    @property
    def groups(self) -> Collection[str]:
        """The ids of these groups."""
        return self._since_s.keys() | self._told

    def refresh(self, records: Iterable[GroupRecord]) -> None:
        """Looks which of these groups the router no longer lists, or say that they drain. One that the router never
        listed is about to be."""
        states = {record.group: record.state for record in records}
        self._told = {group for group, state in states.items() if state == "draining"}
        running = self._running()
        if running is None:
            return
        self._known |= set(running)
        serving = states.keys()
        leaving = (serving & self._known) - set(running)
        self._known &= serving | set(running)
        self._since_s = {group: self._since_s.get(group, self._clock()) for group in leaving}

    def is_due(self, group: str) -> bool:
        """True if requests in this group must move now."""
        since_s = self._since_s.get(group)
        return since_s is not None and self._clock() - since_s >= self._after_s
