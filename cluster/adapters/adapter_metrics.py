"""Metric families of adapters: where each listed adapter is, who uses it, counts of the groups and of this gateway.

Values of the label `adapter` are names that are listed now, never a client's. lora_requests_info is vLLM's family: its
labels hold lists of names, its value is the time.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator

from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.fleet.engine_metrics import COUNTER, GAUGE, HISTOGRAM, Families, Table, decode_stats, labels_of
from tandem.cluster.fleet.group_reports import AdapterReport, GroupReport
from tandem.cluster.routing.residency import adapter_key

Reports = list[tuple[tuple[str, str], AdapterReport]]
GROUP_FAMILIES: Table = (
    (GAUGE, "adapters_on_device", "Adapters in device memory.", "resident"),
    (GAUGE, "adapters_on_host", "Adapters in host memory.", "on_host"),
    (GAUGE, "adapter_pages", "Pages of device memory for adapters, of each rank.", "num_pages"),
    (GAUGE, "adapter_pages_free", "Those that hold nothing.", "free_pages"),
    (GAUGE, "adapter_sequences_waiting", "Sequences whose adapter is not on the device for them.", "waiting"),
    (COUNTER, "adapter_swaps_total", "Adapters evicted from the device to make room.", "evictions"),
    (COUNTER, "adapters_refused_total", "Adapters that a group could not load.", "refused"),
    (HISTOGRAM, "adapter_load_seconds", "From the first move of an adapter to the device.", "load_s"),
)


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
    entries, add = dict(adapter_service.adapters.entries), families.add
    listed = [entry for entry in entries.values() if with_tenants or entry.tenant is None]
    serving = [(labels_of(report), report.adapters) for report in reports if report.adapters is not None]
    used, labels = _in_use(serving, listed), ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    add(GAUGE, "lora_requests_info", "Adapters in use.", ((values, wall_clock()) for values in used), *labels)
    held, text = _residency(serving, listed), "1 for each listed adapter that a group holds, and where."
    add(GAUGE, "adapter_residency", text, ((values, 1) for values in held), "adapter", "tier", "pinned")
    decoded = ((labels_of(report), decode_stats(report)) for report in reports if report.adapters is not None)
    families.add_table(GROUP_FAMILIES, [(labels, s.adapters) for labels, s in decoded if s and s.adapters])
    changes = (((outcome,), count) for outcome, count in dict(adapter_service.counts).items())
    text = "Changes of the list asked of this gateway."
    add(COUNTER, "adapter_listings_total", text, changes, "outcome", base=())
    add(GAUGE, "adapters_listed", "Adapters that are served now.", [((), len(entries))], base=())


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
