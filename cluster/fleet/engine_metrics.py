"""Metric families of the groups, under vLLM's names with our prefix, and their exposition as Prometheus text.

A gateway makes them from the reports for which it asks the groups, or from their last ones. Label
values come from settings, group ids and the list of tenants, never from a client.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec
from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from tandem.cluster.fleet.group_reports import GroupReport
from tandem.workers.engine.base.drafting import DraftStats
from tandem.workers.engine.base.expert_reports import ExpertStats
from tandem.workers.engine.base.stats import EngineStats, HistogramStats, OffloadStats

GAUGE, COUNTER, HISTOGRAM = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily
Kind = type[GaugeMetricFamily] | type[CounterMetricFamily] | type[HistogramMetricFamily]
Table = tuple[tuple[Kind, str, str, str], ...]
"""Rows of a family's kind, name, help, and the field of its source that has the value."""
Sample = tuple[Sequence[str], float | HistogramStats]
"""Values of the family's labels, and its value."""
GROUP_LABELS = ("model_name", "engine")

ENGINE_FAMILIES: Table = (
    (GAUGE, "num_requests_running", "Requests that hold a row.", "running"),
    (GAUGE, "num_requests_waiting", "Requests that wait to be processed.", "waiting"),
    (GAUGE, "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_usage"),
    (GAUGE, "kv_allocated_slots", "Tokens that the KV blocks with a user can hold.", "allocated_slots"),
    (GAUGE, "kv_empty_slots", "Those of the allocated slots that hold no token.", "empty_slots"),
    (COUNTER, "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    (COUNTER, "prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    (COUNTER, "num_preemptions_total", "Sequences that lost their blocks to others.", "preemptions"),
    (COUNTER, "prompt_tokens_total", "Prompt tokens processed.", "prompt_tokens"),
    (COUNTER, "generation_tokens_total", "Tokens generated.", "generation_tokens"),
    (COUNTER, "wasted_tokens_total", "Tokens generated that were neither delivered nor billed.", "wasted_tokens"),
    (COUNTER, "engine_steps_total", "Steps of the engine.", "steps"),
    (COUNTER, "step_schedule_seconds_total", "Step time spent planning and applying.", "schedule_s"),
    (COUNTER, "step_wait_seconds_total", "Step time spent waiting for ranks.", "wait_s"),
    (COUNTER, "step_device_seconds_total", "Step time as the last stage measured it.", "device_s"),
    (HISTOGRAM, "time_to_first_token_seconds", "From arrival to the first token.", "time_to_first_token_s"),
    (HISTOGRAM, "inter_token_latency_seconds", "Between two tokens of one choice.", "inter_token_latency_s"),
    (HISTOGRAM, "e2e_request_latency_seconds", "From arrival to the end.", "e2e_latency_s"),
    (HISTOGRAM, "request_queue_time_seconds", "From arrival to the first step.", "queue_time_s"),
    (HISTOGRAM, "iteration_tokens_total", "Tokens in a step.", "iteration_tokens"),
)
OFFLOAD_BYTES: tuple[tuple[str, str], ...] = (
    ("load", "KV bytes copied from host memory to the device."),
    ("store", "KV bytes copied from the device to host memory."),
    ("spill", "KV bytes written to disk."),
    ("fetch", "KV bytes read from disk."),
)
TENANT_FAMILIES: Table = (
    (COUNTER, "tenant_queue_time_seconds_total", "Time that tenants' requests waited for a row.", "queue_s"),
    (COUNTER, "tenant_queued_requests_total", "Requests of tenants that got a row.", "queued_requests"),
    (GAUGE, "tenant_num_requests_waiting", "Sequences of tenants that wait now.", "waiting"),
)
OFFLOAD_FAMILIES: Table = (
    (COUNTER, "kv_offload_failed_blocks_total", "Blocks whose copy failed.", "failed_blocks"),
    (COUNTER, "kv_offload_loaded_tokens_total", "Prompt tokens copied instead of computed.", "loaded_tokens"),
    (COUNTER, "kv_offload_swapped_out_total", "Preemptions whose KV was kept below the device.", "swapped_out"),
    (GAUGE, "kv_offload_open_tickets", "Moves of KV blocks that not every rank has answered.", "open_tickets"),
    (GAUGE, "kv_host_blocks", "KV blocks held in host memory.", "host_blocks"),
    (GAUGE, "kv_host_slots", "KV blocks that host memory can hold.", "host_slots"),
)
DRAFT_FAMILIES: Table = (
    (COUNTER, "spec_decode_num_drafts_total", "Rows of steps that had drafts.", "num_drafts"),
    (COUNTER, "spec_decode_num_draft_tokens_total", "Draft tokens.", "num_draft_tokens"),
    (COUNTER, "spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted.", "num_accepted"),
)
_NO_TOTAL = re.compile(r"^((?:# \w+ )?[^\s{]+:kv_offload_\w+_bytes)_total\b", re.M)
"""Counters that are served without the _total that prometheus_client gives to every counter."""


class Families(Collector):
    """A collector of metric families whose names begin with a prefix."""

    def __init__(self, prefix: str = "", made: Iterable[Metric] = ()) -> None:
        self._prefix = prefix
        self._made = list(made)

    def collect(self) -> list[Metric]:
        return self._made

    def add(
        self,
        kind: Kind,
        name: str,
        text: str,
        samples: Iterable[Sample],
        *labels: str,
        base: tuple[str, ...] = GROUP_LABELS,
    ) -> None:
        """Adds one family. base, labels: the names that every sample has values for, in this order."""
        family = kind(f"{self._prefix}:{name}", text, labels=(*base, *labels))
        for values, value in samples:
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(value, HistogramStats), name
                bounds = [*(f"{bound:.15g}" for bound in value.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(value.counts), strict=True))
                family.add_metric(values, buckets, value.total)
            else:
                assert not isinstance(value, HistogramStats), name
                family.add_metric(values, value)
        self._made.append(family)

    def add_table(self, rows: Table, sources: Sequence[tuple[Sequence[str], object]], *labels: str) -> None:
        """Adds a family for each row, with a sample of each source."""
        for kind, name, text, field in rows:
            self.add(kind, name, text, ((values, getattr(source, field)) for values, source in sources), *labels)

    def text(self) -> str:
        """The families as Prometheus text."""
        return _NO_TOTAL.sub(r"\1", generate_latest(self).decode())


def add_engines(
    families: Families, reports: Iterable[GroupReport], redis_unavailable: bool, *, with_tenants: bool = True
) -> None:
    """Adds the families of all groups whose statistics can be read. with_tenants: those labelled by tenant too."""
    engines = [(labels_of(report), stats) for report in reports if (stats := decode_stats(report)) is not None]
    add = families.add
    families.add_table(ENGINE_FAMILIES, engines)
    ended = (((*labels, reason), n) for labels, s in engines for reason, n in s.finished.items())
    add(COUNTER, "request_success_total", "Choices that ended, by reason.", ended, "finished_reason")
    rejected = (((*labels, reason), n) for labels, s in engines for reason, n in s.rejected.items())
    add(COUNTER, "admission_rejections_total", "Requests refused, by reason.", rejected, "reason")
    _add_offload(families, [(labels, s.offload) for labels, s in engines if s.offload is not None])
    _add_drafts(families, [(labels, s.drafts) for labels, s in engines if s.drafts is not None])
    _add_experts(families, [(labels, s.experts) for labels, s in engines if s.experts is not None])
    if with_tenants:
        shares = [((*labels, tenant), share) for labels, s in engines for tenant, share in s.tenants.items()]
        families.add_table(TENANT_FAMILIES, shares, "tenant")
    info = (((*labels, str(s.block_size), str(s.num_blocks)), 1) for labels, s in engines)
    add(GAUGE, "cache_config_info", "Shape of each group's KV cache.", info, "block_size", "num_gpu_blocks")
    add(GAUGE, "redis_away", "1 while Redis does not answer.", [((), int(redis_unavailable))], base=())


def _add_offload(families: Families, tiers: list[tuple[tuple[str, str], OffloadStats]]) -> None:
    """Adds the families of groups that have tiers below the device, none when no group has."""
    if not tiers:
        return
    for kind, text in OFFLOAD_BYTES:
        copied = ((labels, t.blocks[kind] * t.block_bytes) for labels, t in tiers)
        families.add(COUNTER, f"kv_offload_{kind}_bytes", text, copied)
    seconds = (((*labels, kind), value) for labels, t in tiers for kind, value in t.copy_s.items())
    families.add(COUNTER, "kv_offload_seconds_total", "Seconds of copying, by kind.", seconds, "kind")
    families.add_table(OFFLOAD_FAMILIES, tiers)
    disabled = ((labels, int(t.disk_disabled is not None)) for labels, t in tiers)
    families.add(GAUGE, "kv_disk_disabled", "1 once the disk tier was switched off.", disabled)


def _add_drafts(families: Families, drafting: list[tuple[tuple[str, str], DraftStats]]) -> None:
    """Adds the families of groups with speculative decoding, none when no group has."""
    if not drafting:
        return
    families.add_table(DRAFT_FAMILIES, drafting)
    name, text = "spec_decode_num_accepted_tokens_per_pos_total", "Draft tokens that were accepted, by place."
    places = (((*labels, str(at)), n) for labels, d in drafting for at, n in enumerate(d.accepted_per_position))
    families.add(COUNTER, name, text, places, "position")


def _add_experts(families: Families, loads: list[tuple[tuple[str, str], ExpertStats]]) -> None:
    """Adds the families of groups whose model has experts, none when no group's has. A sample for each expert and for
    each layer, not for each expert of each layer, which would be thousands."""
    if not loads:
        return
    tokens = (((*labels, str(expert)), count) for labels, s in loads for expert, count in enumerate(s.tokens))
    families.add(COUNTER, "expert_tokens_total", "Tokens that experts got, added over layers.", tokens, "expert")
    name, text = "expert_imbalance", "Tokens of a layer's busiest expert over the mean of its experts."
    layers = (((*labels, str(layer)), ratio) for labels, s in loads for layer, ratio in s.imbalance.items())
    families.add(GAUGE, name, text, layers, "layer")


def decode_stats(report: GroupReport) -> EngineStats | None:
    """A report's statistics; None when there are none yet or they are of another version."""
    try:
        return msgspec.msgpack.decode(report.stats, type=EngineStats) if report.stats else None
    except msgspec.DecodeError:
        return None


def labels_of(report: GroupReport) -> tuple[str, str]:
    """Values of GROUP_LABELS."""
    return report.model, report.group
