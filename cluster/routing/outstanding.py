"""How many tokens each group still owes: counted exactly for this gateway, estimated for the others.

A group reports its total now and then. What was reported, less what this gateway had outstanding there when the report
was first seen, belongs to other gateways. Kept by the Serve router; one per gateway process, one thread.
"""

from collections.abc import Iterable


class Outstanding:
    """Tokens by group. Unknown groups and unknown calls count as nothing."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[str, int, float]] = {}
        self._here: dict[str, int] = {}
        self._reports: dict[str, tuple[int, int]] = {}

    def begin(self, call_id: str, group: str, tokens: int, now_s: float) -> None:
        """A call goes to a group. A call that is routed again leaves its first group."""
        self.end(call_id)
        self._calls[call_id] = (group, tokens, now_s)
        self._here[group] = self._here.get(group, 0) + tokens

    def end(self, call_id: str) -> None:
        """A call ended, however it did."""
        group, tokens, _ = self._calls.pop(call_id, ("", 0, 0.0))
        if group in self._here:
            self._here[group] -= tokens

    def holds(self, call_id: str) -> bool:
        """Is this call counted?"""
        return call_id in self._calls

    def forget_older_than(self, began_s: float) -> None:
        """Ends calls that began before that time. Calls are kept in the order of their beginning."""
        while self._calls:
            call_id, (_, _, began) = next(iter(self._calls.items()))
            if began >= began_s:
                return
            self.end(call_id)

    def report(self, group: str, total: int, report_number: int) -> None:
        """A group's own count; the same report may be seen many times."""
        if self._reports.get(group, (-1, 0))[0] != report_number:
            self._reports[group] = (report_number, max(0, total - self.here(group)))

    def here(self, group: str) -> int:
        return self._here.get(group, 0)

    def elsewhere(self, group: str) -> int:
        return self._reports.get(group, (-1, 0))[1]

    def keep_only(self, groups: Iterable[str]) -> None:
        """Forgets groups that are gone, and the calls that went to them."""
        alive = set(groups)
        self._here = {g: n for g, n in self._here.items() if g in alive}
        self._reports = {g: r for g, r in self._reports.items() if g in alive}
        self._calls = {c: entry for c, entry in self._calls.items() if entry[0] in alive}
