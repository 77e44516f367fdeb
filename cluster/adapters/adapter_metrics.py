"""Metric families of adapters: where each listed adapter is, who uses it, counts of the groups and of this gateway.

Values of the label `adapter` are names that are listed now, never a client's. lora_requests_info is vLLM's family: its
labels hold lists of names, its value is the time.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator

from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.fleet.engine_metrics import Families, decode_stats, labels_of
from tandem.cluster.fleet.group_reports import AdapterReport, GroupReport
from tandem.cluster.routing.residency import adapter_key
from tandem.workers.engine.base.metric_rows import Metric
from tandem.workers.engine.base.stats import AdapterStats

Reports = list[tuple[tuple[str, str], AdapterReport]]
IN_USE = Metric("gauge", "lora_requests_info", "Adapters in use.")
RESIDENCY = Metric("gauge", "adapter_residency", "1 for each listed adapter that a group holds, and where.")
LISTINGS = Metric("counter", "adapter_listings_total", "Changes of the list asked of this gateway.")
LISTED = Metric("gauge", "adapters_listed", "Adapters that are served now.")


def add_adapters(
    families: Families,
    reports: Collection[GroupReport],
    adapter_service: AdapterService,
    wall_clock: Callable[[], float] = time.time,
    *,
    with_tenants: bool = True,
) -> None:
    """Adds the families of all groups that serve adapters, and of this gateway's changes of the list. with_tenants:
    tenants' own adapters are named too. May be called on a thread."""
    entries = dict(adapter_service.adapters.entries)
    listed = [entry for entry in entries.values() if with_tenants or entry.tenant is None]
    serving = [(labels_of(report), report.adapters) for report in reports if report.adapters is not None]
    in_use = ((values, wall_clock()) for values in _in_use(serving, listed))
    families.add(IN_USE, in_use, "max_lora", "running_lora_adapters", "waiting_lora_adapters")
    held = ((values, 1) for values in _residency(serving, listed))
    families.add(RESIDENCY, held, "adapter", "tier", "pinned")
    decoded = ((labels_of(report), decode_stats(report)) for report in reports if report.adapters is not None)
    families.add_rows(AdapterStats, [(labels, s.adapters) for labels, s in decoded if s and s.adapters])
    changes = (((outcome,), count) for outcome, count in dict(adapter_service.counts).items())
    families.add(LISTINGS, changes, "outcome", base=())
    families.add(LISTED, [((), len(entries))], base=())


def _in_use(reports: Reports, entries: Iterable[AdapterEntry]) -> Iterator[tuple[str, ...]]:
    """Label values of lora_requests_info for each group."""
    listed = {entry.name for entry in entries}
    for labels, report in reports:
        names = (",".join(name for name in used if name in listed) for used in (report.running, report.waiting))
        yield (*labels, str(report.max_loras), *names)


def _residency(reports: Reports, entries: Iterable[AdapterEntry]) -> Iterator[tuple[str, ...]]:
    """Label values of adapter_residency for each listed adapter and group that holds it."""
    by_key: dict[str, list[tuple[str, bool]]] = {}
    for entry in entries:
        by_key.setdefault(adapter_key(entry.digest), []).append((entry.name, entry.pinned))
    for labels, report in reports:
        for tier, keys in (("device", report.on_device), ("host", report.on_host)):
            for name, pinned in (found for key in keys for found in by_key.get(key, ())):
                yield (*labels, name, tier, str(pinned).lower())
