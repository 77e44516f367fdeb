"""The adapter families of /metrics: where each listed adapter lies, who uses it, what the groups and this gateway did.

Adapter labels are names that are listed now, never a client's word. lora_requests_info is vLLM's family: its labels
hold lists of names, its value is the time.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from cluster.adapters.desk import AdapterDesk
from cluster.adapters.entries import AdapterEntry
from cluster.coordination.registry import GroupRecord
from cluster.metrics import decode_stats, family, histogram, labels_of
from cluster.routing.residency import adapter_key

Sample = tuple[Mapping[str, str], float]
OF_A_GROUP: tuple[tuple[str, str, str, str], ...] = (
    ("adapters_on_device", "Adapters in device memory.", "gauge", "resident"),
    ("adapters_on_host", "Adapters in host memory.", "gauge", "on_host"),
    ("adapter_pages", "Pages of device memory for adapters, of each rank.", "gauge", "num_pages"),
    ("adapter_pages_free", "Those that hold nothing.", "gauge", "free_pages"),
    ("adapter_sequences_waiting", "Sequences whose adapter is not on the device for them.", "gauge", "waiting"),
    ("adapter_swaps_total", "Adapters evicted from the device to make room.", "counter", "evictions"),
    ("adapters_refused_total", "Adapters that a group could not load.", "counter", "refused"),
)


def render_adapters(
    records: Iterable[GroupRecord],
    prefix: str,
    desk: AdapterDesk,
    wall_clock: Callable[[], float] = time.time,
    *,
    with_tenants: bool = True,
) -> str:
    """Prometheus text of all groups that serve adapters, and of this gateway's loads. with_tenants: tenants' own
    adapters are named too."""
    listed = [entry for entry in desk.registry.entries.values() if with_tenants or entry.tenant is None]
    serving = [record for record in records if record.adapters is not None]
    lines: list[str] = []
    family(lines, f"{prefix}:lora_requests_info", "Adapters in use.", "gauge", _in_use(serving, listed, wall_clock()))
    text = "1 for each listed adapter that a group holds, and where."
    family(lines, f"{prefix}:adapter_residency", text, "gauge", _residency(serving, listed))
    stats = [(labels_of(r), s.adapters) for r in serving if (s := decode_stats(r)) is not None and s.adapters]
    for name, words, kind, field in OF_A_GROUP:
        family(lines, f"{prefix}:{name}", words, kind, ((tags, getattr(s, field)) for tags, s in stats))
    load_s = [(tags, s.load_s) for tags, s in stats]
    histogram(lines, f"{prefix}:adapter_load_seconds", "From the first move of an adapter to the device.", load_s)
    loads = (({"outcome": outcome}, count) for outcome, count in desk.counts.items())
    family(lines, f"{prefix}:adapter_listings_total", "Changes of the list asked of this gateway.", "counter", loads)
    count = len(desk.registry.entries)
    family(lines, f"{prefix}:adapters_listed", "Adapters that are served now.", "gauge", [({}, count)])
    return "\n".join(lines) + "\n"


def _in_use(records: Iterable[GroupRecord], entries: Iterable[AdapterEntry], now_s: float) -> Iterator[Sample]:
    listed = {entry.name for entry in entries}
    for record in records:
        assert record.adapters is not None
        used = {"running_lora_adapters": record.adapters.running, "waiting_lora_adapters": record.adapters.waiting}
        names = {label: ",".join(name for name in found if name in listed) for label, found in used.items()}
        yield labels_of(record) | {"max_lora": str(record.adapters.max_loras)} | names, now_s


def _residency(records: Iterable[GroupRecord], entries: Iterable[AdapterEntry]) -> Iterator[Sample]:
    by_key: dict[str, list[tuple[str, bool]]] = {}
    for entry in entries:
        by_key.setdefault(adapter_key(entry.digest), []).append((entry.name, entry.pinned))
    for record in records:
        assert record.adapters is not None
        for tier, keys in (("device", record.adapters.on_device), ("host", record.adapters.on_host)):
            for name, pinned in (found for key in keys for found in by_key.get(key, ())):
                tags = {"adapter": name, "tier": tier, "pinned": "true" if pinned else "false"}
                yield labels_of(record) | tags, 1
