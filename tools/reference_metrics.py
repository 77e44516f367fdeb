"""The page of all metrics: name, type, labels and help, as /metrics has them."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from unittest.mock import Mock

from prometheus_client import CollectorRegistry

from tandem.cluster.adapters import adapter_metrics
from tandem.cluster.fleet import engine_metrics
from tandem.cluster.fleet.engine_metrics import GROUP_LABELS
from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics
from tandem.cluster.tenants.tenant_service import TenantService
from tandem.workers.engine.base.draft_record import DraftStats
from tandem.workers.engine.base.expert_reports import ExpertStats
from tandem.workers.engine.base.metric_rows import Metric, metrics_of
from tandem.workers.engine.base.request_figures import RequestFigures
from tandem.workers.engine.base.stats import (
    AdapterStats,
    EngineCounts,
    EngineStats,
    OffloadStats,
    TenantCounts,
    TenantStats,
)
from tandem.workers.messages.request import Usage
from tools.reference_cli import cell

HEAD = """# Metrics

<!-- Written by tools/reference.py (make reference). -->

All families of `/metrics`, with the prefix `tandem:` before each, or what `--metrics-prefix` says.
[Operations](../operations.md#metrics) and [tenants and adapters](../multi-tenancy.md#metrics) say what to read from
them, who may, and which dashboards and alerts there are. Names that vLLM has are vLLM's, with its labels and buckets. A
histogram has the series `_bucket`, `_sum` and `_count`. Where a service has several gateways, each series of them has
the label `gateway` too.
"""
TABLE = "| metric | type | labels | meaning |\n|---|---|---|---|\n"
TENANT = (*GROUP_LABELS, "tenant")
GROUPS: tuple[tuple[str, tuple[tuple[type, tuple[str, ...]], ...]], ...] = (
    ("Groups", ((EngineStats, GROUP_LABELS), (EngineCounts, GROUP_LABELS))),
    ("Requests that have ended, in groups", ((RequestFigures, GROUP_LABELS),)),
    ("KV offload, in groups that have it", ((OffloadStats, GROUP_LABELS),)),
    ("Speculative decoding, in groups that have it", ((DraftStats, GROUP_LABELS),)),
    ("Experts, in groups of models that have them", ((ExpertStats, GROUP_LABELS),)),
    ("Adapters", ((AdapterStats, GROUP_LABELS),)),
    ("Tenants", ((TenantCounts, TENANT), (TenantStats, TENANT))),
)
OF_ADAPTERS = (
    (adapter_metrics.IN_USE, (*GROUP_LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters")),
    (adapter_metrics.RESIDENCY, (*GROUP_LABELS, "adapter", "tier", "pinned")),
    (adapter_metrics.LISTINGS, ("outcome",)),
    (adapter_metrics.LISTED, ()),
)
OF_OFFLOAD = (
    *((row, GROUP_LABELS) for row in engine_metrics.OFFLOAD_BYTES.values()),
    (engine_metrics.DISK_DISABLED, GROUP_LABELS),
)
OF_GROUPS = (
    (engine_metrics.CACHE_CONFIG, (*GROUP_LABELS, "block_size", "num_gpu_blocks")),
    (engine_metrics.GROUPS, ("state",)),
    (engine_metrics.STARTS, ()),
    (engine_metrics.START_FAILURES, ()),
    (engine_metrics.LOSSES, ()),
    (engine_metrics.REDIS_AWAY, ()),
)
BESIDE = {"Groups": OF_GROUPS, "KV offload, in groups that have it": OF_OFFLOAD, "Adapters": OF_ADAPTERS}
"""Rows that are made of no field, by section."""


class Shown(NamedTuple):
    """A family of the page. name: of its samples, without the prefix and without what a histogram adds."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def families() -> dict[str, list[Shown]]:
    """All families, by section."""
    found = {}
    for title, kinds in GROUPS:
        rows = [
            _shown(row, (*labels, *([] if row.label is None else [row.label])))
            for kind, labels in kinds
            for _, row in metrics_of(kind)
        ]
        found[title] = [*rows, *(_shown(row, labels) for row, labels in BESIDE.get(title, ()))]
    of_gateways, of_tenants = _gateway_families()
    return {**found, "Gateways": of_gateways, "Tenants": [*found["Tenants"], *of_tenants]}


def metrics_page() -> str:
    """Return the text of docs/reference/metrics.md."""
    return HEAD + "".join(f"\n## {title}\n\n{TABLE}{''.join(map(_row, rows))}" for title, rows in families().items())


def _row(one: Shown) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels) or "none"
    return f"| `{one.name}` | {one.kind} | {labels} | {cell(one.help)} |\n"


def _shown(row: Metric, labels: Iterable[str]) -> Shown:
    return Shown(row.name, row.kind, tuple(labels), row.help)


def _gateway_families() -> tuple[list[Shown], list[Shown]]:
    """Families of a gateway that has counted one of everything, without and with those of tenants."""
    metrics = GatewayMetrics(CollectorRegistry(), "tandem", "m")
    metrics.http_answered("/", 200)
    metrics.generation_began()
    metrics.generation_ended("stop", 1.0)
    metrics.response_stored("stored")
    metrics.batch_ended("completed")
    metrics.batch_line("output")
    for waited_s in (None, 1.0):
        metrics.text_worked("t", 1.0, waited_s=waited_s)
    metrics.tenant_billed("t", Mock(spec=Usage, prompt_tokens=1, cached_tokens=1, completion_tokens=1))
    metrics.tenant_rejected("t", "tokens")
    usage = Mock(ledger=Mock(late_rows=0), usage_cap=Mock(summed_rows=0))
    TenantService.expose(usage, metrics.registry, "tandem")
    return list(_collected(metrics.registry)), list(_collected(metrics.tenants))


def _collected(registry: CollectorRegistry) -> Iterator[Shown]:
    for family in registry.collect():
        if not family.samples:
            raise LookupError(f"{family.name}: _gateway_families counts nothing of it")
        name = family.name.removeprefix("tandem:") + ("_total" if family.type == "counter" else "")
        yield Shown(
            name, family.type, tuple(key for key in family.samples[0].labels if key != "le"), family.documentation
        )
