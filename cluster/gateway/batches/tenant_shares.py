"""Shares of tenants: of a gateway's places for batches, and of a tenant's own requests at once for lines. No clock, no
Redis.

A gateway runs so many batches. A tenant with fewer of them comes before one with more, and of two with as many the one
whose last turn was earlier. Where all places are taken, a batch of the tenant with the most gives its place up: at once
for a tenant with at least two fewer, else after a while.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from tandem.cluster.gateway.batches.batch_store import BatchPlace

TURN_S = 60.0
"""Time for which a batch keeps its place from a tenant with one batch less here."""


def next_place(
    waiting: Collection[BatchPlace], running: Collection[BatchPlace], last_s: Mapping[str, float]
) -> BatchPlace:
    """Returns the batch whose turn it is. waiting: oldest first. last_s: when a tenant last had a turn."""
    counts = Counter(place.tenant for place in running)
    return min(waiting, key=lambda place: (counts[place.tenant], last_s.get(place.tenant, 0.0)))


def giver(tenant: str, running: Mapping[BatchPlace, float], now_s: float) -> BatchPlace | None:
    """Returns the batch that gives its place to a tenant; None while nobody has to. running: since when each runs."""
    counts = Counter(place.tenant for place in running)
    most = max(counts.values(), default=0)
    having = [place for place in running if counts[place.tenant] == most]
    longest = min(having, key=lambda place: running[place], default=None)
    if longest is None or most <= counts[tenant]:
        return None
    is_due = most > counts[tenant] + 1 or now_s - running[longest] >= TURN_S
    return longest if is_due else None


class LineShares:
    """Lines that each tenant with a limit of requests at once may have in this gateway: together those of all gateways
    are at most half of it."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._holders: dict[str, set[str]] = {}

    def note(self, holders: Iterable[tuple[BatchPlace, str]]) -> None:
        """Takes over which gateway holds which batch, "" for none."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for place, holder in holders:
            if holder:
                found[place.tenant].add(holder)
        self._holders = found

    def most(self, tenant: str, limit: int | None) -> int | None:
        """The most lines of a tenant here at once; None: any number. limit: its requests at once. The half that lines
        may have is dealt out to the gateways that hold a batch of it, the first ones in their order have one more."""
        if limit is None:
            return None
        half, holders = max(1, limit // 2), sorted(self._holders.get(tenant, set()) | {self._gateway})
        each, more = divmod(half, len(holders))
        return each + (holders.index(self._gateway) < more)
