"""Metric families of the groups, under vLLM's names with our prefix, and their exposition as Prometheus text.

Their rows stand on the fields of the statistics (workers/engine/base/metric_rows.py). A gateway makes them from the
reports for which it asks the groups, or from their last ones. Label values come from settings, group ids and the list
of tenants, never from a client.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import msgspec
from prometheus_client import Metric as Family
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from tandem.cluster.fleet.group_events import GroupTally
from tandem.cluster.fleet.group_reports import GroupReport
from tandem.workers.engine.base.draft_record import DraftStats
from tandem.workers.engine.base.expert_reports import ExpertStats
from tandem.workers.engine.base.metric_rows import Histogram, Metric, metrics_of
from tandem.workers.engine.base.request_figures import RequestFigures
from tandem.workers.engine.base.stats import (
    EngineCounts,
    EngineStats,
    OffloadStats,
    TenantCounts,
    TenantStats,
)

KINDS = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
GROUP_LABELS = ("model_name", "engine")
Sample = tuple[Sequence[str], float | Histogram]
"""Values of the family's labels, and its value."""

OFFLOAD_BYTES = {
    "load": Metric("counter", "kv_offload_load_bytes", "KV bytes copied from host memory to the device."),
    "store": Metric("counter", "kv_offload_store_bytes", "KV bytes copied from the device to host memory."),
    "spill": Metric("counter", "kv_offload_spill_bytes", "KV bytes written to disk."),
    "fetch": Metric("counter", "kv_offload_fetch_bytes", "KV bytes read from disk."),
}
DISK_DISABLED = Metric("gauge", "kv_disk_disabled", "1 once the disk tier was switched off.")
CACHE_CONFIG = Metric("gauge", "cache_config_info", "Shape of each group's KV cache.")
REDIS_AWAY = Metric("gauge", "redis_away", "1 while Redis does not answer, or not in time.")
GROUPS = Metric("gauge", "groups", "Worker groups by state: loading, serving or draining.", "state")
STATES = ("loading", "serving", "draining")
STARTS = Metric("counter", "group_starts_total", "Groups that came to serve, those that replace others too.")
START_FAILURES = Metric("counter", "group_start_failures_total", "Groups that did not start.")
LOSSES = Metric("counter", "group_losses_total", "Groups that died or gave no sign of life, with requests or without.")
WITHOUT_TOTAL = re.compile(r":kv_offload_\w+_bytes$")
_NO_TOTAL = re.compile(r"^((?:# \w+ )?[^\s{]+:kv_offload_\w+_bytes)_total\b", re.M)
"""Counters that are served without the _total that prometheus_client gives to every counter."""


class Families(Collector):
    """A collector of metric families whose names begin with a prefix."""

    def __init__(self, prefix: str = "", made: Iterable[Family] = ()) -> None:
        self._prefix = prefix
        self._made = list(made)

    def collect(self) -> list[Family]:
        return self._made

    def add(self, row: Metric, samples: Iterable[Sample], *labels: str, base: tuple[str, ...] = GROUP_LABELS) -> None:
        """Adds one family. base, labels: the names that every sample has values for, in this order."""
        family = KINDS[row.kind](f"{self._prefix}:{row.name}", row.help, labels=(*base, *labels))
        for values, value in samples:
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(value, Histogram), row.name
                bounds = [*(f"{bound:.15g}" for bound in value.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(value.counts), strict=True))
                family.add_metric(values, buckets, value.total)
            else:
                assert not isinstance(value, Histogram), row.name
                family.add_metric(values, value)
        self._made.append(family)

    def add_rows(self, kind: type, sources: Sequence[tuple[Sequence[str], object]], *labels: str) -> None:
        """Adds a family for each field of the class `kind` that is a row, with what each source has in that field.
        sources: their values of the labels, and the object."""
        for field, row in metrics_of(kind):
            values = ((known, getattr(source, field)) for known, source in sources)
            if row.label is None:
                self.add(row, values, *labels)
            else:
                parts = (((*known, str(key)), part) for known, many in values for key, part in _parts(many))
                self.add(row, parts, *labels, row.label)

    def text(self) -> str:
        """The families as Prometheus text."""
        return _NO_TOTAL.sub(r"\1", generate_latest(self).decode())


def _parts(many: Mapping[object, float] | Sequence[float]) -> Iterable[tuple[object, float]]:
    return many.items() if isinstance(many, Mapping) else enumerate(many)


def add_engines(
    families: Families, reports: Iterable[GroupReport], redis_unavailable: bool, *, with_tenants: bool = True
) -> None:
    """Adds the families of all groups whose statistics can be read. with_tenants: those labelled by tenant too. What no
    group has, as tiers below the device, drafts or experts, has no family."""
    engines = [(labels_of(report), stats) for report in reports if (stats := decode_stats(report)) is not None]
    families.add_rows(EngineStats, engines)
    families.add_rows(EngineCounts, engines)
    if ended := [(labels, s.requests) for labels, s in engines if s.requests is not None]:
        families.add_rows(RequestFigures, ended)
    if tiers := [(labels, s.offload) for labels, s in engines if s.offload is not None]:
        _add_offload(families, tiers)
    if drafting := [(labels, s.drafts) for labels, s in engines if s.drafts is not None]:
        families.add_rows(DraftStats, drafting)
    if loads := [(labels, s.experts) for labels, s in engines if s.experts is not None]:
        families.add_rows(ExpertStats, loads)
    if with_tenants:
        shares = [((*labels, tenant), share) for labels, s in engines for tenant, share in s.tenants.items()]
        families.add_rows(TenantCounts, shares, "tenant")
        families.add_rows(TenantStats, shares, "tenant")
    info = (((*labels, str(s.block_size), str(s.num_blocks)), 1) for labels, s in engines)
    families.add(CACHE_CONFIG, info, "block_size", "num_gpu_blocks")
    families.add(REDIS_AWAY, [((), int(redis_unavailable))], base=())


def add_groups(families: Families, states: Iterable[str], tally: GroupTally) -> None:
    """Adds the families about the groups as a whole. states: of those that there are. The counts are the service's,
    whichever gateway shows them; each is there from 0 on, so that its first growth is seen."""
    there = Counter(states)
    families.add(GROUPS, (((state,), there[state]) for state in STATES), "state", base=())
    for row, count in ((STARTS, tally.starts), (START_FAILURES, tally.start_failures), (LOSSES, tally.losses)):
        families.add(row, [((), count)], base=())


def _add_offload(families: Families, tiers: list[tuple[tuple[str, str], OffloadStats]]) -> None:
    """Adds the families of groups that have tiers below the device."""
    for kind, row in OFFLOAD_BYTES.items():
        families.add(row, ((labels, t.blocks[kind] * t.block_bytes) for labels, t in tiers))
    families.add_rows(OffloadStats, tiers)
    families.add(DISK_DISABLED, ((labels, int(t.disk_disabled is not None)) for labels, t in tiers))


def decode_stats(report: GroupReport) -> EngineStats | None:
    """A report's statistics; None when there are none yet or they are of another version."""
    try:
        return msgspec.msgpack.decode(report.stats, type=EngineStats) if report.stats else None
    except msgspec.DecodeError:
        return None


def labels_of(report: GroupReport) -> tuple[str, str]:
    """Values of GROUP_LABELS."""
    return report.model, report.group
