"""Numbers what a group reports to routers, so that they know a new report from one that they have seen.

Serve's controller tells all routers when a group's report differs from its last one. A group that owes nothing and has
nothing new to say repeats its number, and an idle service is left asleep.
"""

from typing import Any


class Reports:
    """One group's."""

    def __init__(self) -> None:
        self._number = 0
        self._last: dict[str, Any] = {}

    def numbered(self, report: dict[str, Any]) -> dict[str, Any]:
        """`report` (with "outstanding_tokens") and its "report_number"."""
        # Equal totals may be of other requests, and of another gateway's; no tokens are nobody's.
        if report != self._last or report["outstanding_tokens"]:
            self._number += 1
        self._last = report
        return {"report_number": self._number, **report}
