"""Lines of a gateway's log: what it has answered in the last ten seconds, if anything. Made of its metrics."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

log = logging.getLogger("tandem.gateway")
PERIOD_S = 10.0
COUNTED = {
    "http_requests": "status",
    "gateway_requests": "outcome",
    "tenant_rejections": "reason",
    "request_migrations": None,
}
"""Families, and the label whose values are told apart."""
WORDS = {
    "http_requests": "answers",
    "gateway_requests": "requests",
    "tenant_rejections": "refused",
    "request_migrations": "moved to another group",
}

Counts = Mapping[str, Mapping[str, int]]


class GatewayLog:
    """The lines of one gateway. in_flight: its HTTP requests now."""

    def __init__(self, registries: tuple[CollectorRegistry, ...], prefix: str, in_flight: Callable[[], int]) -> None:
        self._registries = registries
        self._prefix = prefix
        self._in_flight = in_flight
        self._before: Counts = {}

    async def run(self) -> None:
        """Logs every PERIOD_S, until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await asyncio.to_thread(self.write)  # there are series for each tenant

    def write(self) -> None:
        """Logs what has been answered since the last call, and what is in flight, if there is either."""
        now = self._read()
        parts = [part for name in COUNTED if (part := _grown(WORDS[name], self._before.get(name, {}), now[name]))]
        self._before, in_flight = now, self._in_flight()
        if parts or in_flight:
            log.info("%s", ", ".join([*parts, f"in flight {in_flight}"]))

    def _read(self) -> Counts:
        counts: dict[str, Counter[str]] = {name: Counter() for name in COUNTED}
        wanted = [f"{self._prefix}:{name}_total" for name in COUNTED]
        for registry in self._registries:
            for family in registry.restricted_registry(wanted).collect():
                name = family.name.removeprefix(f"{self._prefix}:")
                label = COUNTED[name]
                for sample in family.samples:
                    counts[name][sample.labels[label] if label else ""] += int(sample.value)
        return counts


def _grown(words: str, before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """Returns what has been added to the counts, in words; empty for nothing."""
    added = [
        f"{name}={more}" if name else str(more) for name in sorted(now) if (more := now[name] - before.get(name, 0))
    ]
    return f"{words} {' '.join(added)}" if added else ""
