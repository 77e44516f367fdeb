"""A coordinator's adapters: those that are pinned to its devices, and its report of those it holds.

Requests bring their adapters with them, so nothing here is needed to serve one. One event loop; `pin` hands over to the
engine's thread.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.fleet.group_reports import AdapterReport
from tandem.cluster.routing.residency import adapter_key
from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import Commands
from tandem.workers.messages.request import AdapterRef

PERIOD_S = 1.0


class GroupAdapters:
    """One group's view of the list, its residency as the engine's thread last reported, and the requests in flight."""

    def __init__(
        self, redis: Commands, base: str, max_loras: int, pin: Callable[[frozenset[AdapterRef]], None]
    ) -> None:
        self._adapters = AdapterList(redis, base)
        self._max_loras = max_loras
        self._pin = pin
        self._pinned: frozenset[AdapterRef] = frozenset()
        self._in_flight: Counter[AdapterRef] = Counter()
        self.residency: Mapping[str, str] = {}

    async def run(self, changes: Announcements = Announcements(), period_s: float = PERIOD_S) -> None:
        """Follows the list until it is cancelled."""
        await self._adapters.run(self.reconcile, period_s, changes)

    async def refresh(self) -> None:
        """One look at the list. RedisUnavailable."""
        if await self._adapters.refresh():
            self.reconcile()

    def reconcile(self) -> None:
        """Passes the pinned adapters to the engine, when they have changed."""
        pinned = frozenset(entry.ref for entry in self._adapters.entries.values() if entry.pinned)
        if pinned != self._pinned:
            self._pinned = pinned
            self._pin(pinned)

    def enter(self, adapter: AdapterRef | None) -> None:
        """Counts a request that came."""
        if adapter is not None:
            self._in_flight[adapter] += 1

    def leave(self, adapter: AdapterRef | None) -> None:
        """Counts it no more: it has ended."""
        if adapter is not None:
            self._in_flight[adapter] -= 1
            if not self._in_flight[adapter]:
                del self._in_flight[adapter]

    def tiers(self) -> tuple[list[str], list[str]]:
        """Keys of those on the device, and of those in host memory only."""
        residency = self.residency
        on_device = [adapter_key(digest) for digest, tier in residency.items() if tier == "device"]
        return on_device, [adapter_key(digest) for digest, tier in residency.items() if tier != "device"]

    def report(self) -> AdapterReport:
        """The adapters' part of the group's report."""
        on_device, on_host = self.tiers()
        there = set(on_device)
        return AdapterReport(
            on_device=on_device,
            on_host=on_host,
            running=sorted({ref.name for ref in self._in_flight if adapter_key(ref.digest) in there}),
            waiting=sorted({ref.name for ref in self._in_flight if adapter_key(ref.digest) not in there}),
            max_loras=self._max_loras,
        )
