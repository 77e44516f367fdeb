"""Groups whose records go missing, and those that come back, as one gateway sees them; with what ended their process,
where that was on this machine and the kernel tells.

The gateway calls changes() after each read of the fleet, and writes what it returns as events for the operator.
"""

import logging

from tandem.cluster.fleet.fleet_view import FleetView
from tandem.cluster.fleet.group_events import GroupEvent
from tandem.cluster.process.exit_watch import ExitWatch

log = logging.getLogger("tandem.fleet")
MISSING_S = 1.0
"""Time after a record's end before its group is called missing."""


class MissingGroups:
    """The groups that are missing now. node: the id of this Ray node."""

    def __init__(self, fleet: FleetView, exits: ExitWatch, node: str) -> None:
        self._fleet = fleet
        self._exits = exits
        self._node = node
        self._missing: set[str] = set()

    def changes(self) -> list[GroupEvent]:
        """Returns an event for each group that is missing since the last call, or back."""
        here = {record.pid for record in self._fleet.records.values() if record.host == self._node}
        gone = {record.group: record for record in self._fleet.missing_for(MISSING_S)}
        back = self._missing & self._fleet.records.keys()
        events = [GroupEvent("returned", group) for group in sorted(back)]
        for group in sorted(gone.keys() - self._missing):
            record = gone[group]
            how = self._exits.how_it_ended(record.pid) if record.host == self._node else None
            events.append(GroupEvent("missing", group, f"its coordinator {how}" if how else ""))
        self._missing = (self._missing | gone.keys()) - back
        self._exits.watch_only(here | {record.pid for record in gone.values() if record.host == self._node})
        for event in events:
            log.warning("group %s is %s%s", event.group, event.kind, f": {event.reason}" if event.reason else "")
        return events
