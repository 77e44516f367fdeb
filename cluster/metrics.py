"""/metrics: the groups' statistics as Prometheus text, under vLLM's family names with our prefix.

Rendered by whichever gateway is asked, from the records that groups leave in Redis each second, so that one group that
does not answer costs nothing. Labels come from settings, group ids and the list of tenants, never from a client.
"""

from collections.abc import Iterable, Mapping

import msgspec

from cluster.coordination.registry import GroupRecord
from workers.engine.stats import EngineStats, HistogramStats

GAUGES: tuple[tuple[str, str, str], ...] = (
    ("num_requests_running", "Requests that hold a row.", "running"),
    ("num_requests_waiting", "Requests that wait to be processed.", "waiting"),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_usage"),
)
COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    ("num_preemptions_total", "Sequences that lost their blocks to others.", "preemptions"),
    ("prompt_tokens_total", "Prompt tokens processed.", "prompt_tokens"),
    ("generation_tokens_total", "Tokens generated.", "generation_tokens"),
    ("wasted_tokens_total", "Tokens generated that were neither delivered nor billed.", "wasted_tokens"),
    ("engine_steps_total", "Steps of the engine.", "steps"),
    ("step_schedule_seconds_total", "Step time spent planning and applying.", "schedule_s"),
    ("step_wait_seconds_total", "Step time spent waiting for ranks.", "wait_s"),
    ("step_device_seconds_total", "Step time as the last stage measured it.", "device_s"),
)
HISTOGRAMS: tuple[tuple[str, str, str], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", "time_to_first_token_s"),
    ("inter_token_latency_seconds", "Between two tokens of one choice.", "inter_token_latency_s"),
    ("e2e_request_latency_seconds", "From arrival to the end.", "e2e_latency_s"),
    ("request_queue_time_seconds", "From arrival to the first step.", "queue_time_s"),
    ("iteration_tokens_total", "Tokens in a step.", "iteration_tokens"),
)
OFFLOAD_BYTES: tuple[tuple[str, str, str], ...] = (
    ("load", "KV bytes copied from host memory to the device.", "load"),
    ("store", "KV bytes copied from the device to host memory.", "store"),
    ("spill", "KV bytes written to disk.", "spill"),
    ("fetch", "KV bytes read from disk.", "fetch"),
)
TENANT_FAMILIES: tuple[tuple[str, str, str, str], ...] = (
    ("tenant_queue_time_seconds_total", "Time that tenants' requests waited for a row.", "counter", "queue_s"),
    ("tenant_queued_requests_total", "Requests of tenants that got a row.", "counter", "queued_requests"),
    ("tenant_num_requests_waiting", "Sequences of tenants that wait now.", "gauge", "waiting"),
)
OFFLOAD_FAMILIES: tuple[tuple[str, str, str, str], ...] = (
    ("kv_offload_failed_blocks_total", "Blocks whose copy failed.", "counter", "failed_blocks"),
    ("kv_offload_loaded_tokens_total", "Prompt tokens copied instead of computed.", "counter", "loaded_tokens"),
    ("kv_offload_swapped_out_total", "Preemptions whose KV was kept below the device.", "counter", "swapped_out"),
    ("kv_offload_open_tickets", "Moves of KV blocks that not every rank has answered.", "gauge", "open_tickets"),
    ("kv_host_blocks", "KV blocks held in host memory.", "gauge", "host_blocks"),
    ("kv_host_slots", "KV blocks that host memory can hold.", "gauge", "host_slots"),
)


def render(records: Iterable[GroupRecord], prefix: str, redis_away: bool, *, with_tenants: bool = True) -> str:
    """Prometheus text of all groups whose statistics can be read; one HELP and TYPE per family. with_tenants: the
    families labelled by tenant too."""
    engines = [(labels_of(record), stats) for record in records if (stats := decode_stats(record)) is not None]
    lines: list[str] = []
    for name, text, field in GAUGES:
        family(lines, f"{prefix}:{name}", text, "gauge", ((tags, getattr(s, field)) for tags, s in engines))
    for name, text, field in COUNTERS:
        family(lines, f"{prefix}:{name}", text, "counter", ((tags, getattr(s, field)) for tags, s in engines))
    finished = ((tags | {"finished_reason": r}, n) for tags, s in engines for r, n in s.finished.items())
    family(lines, f"{prefix}:request_success_total", "Choices that ended, by reason.", "counter", finished)
    rejected = ((tags | {"reason": r}, n) for tags, s in engines for r, n in s.rejected.items())
    family(lines, f"{prefix}:admission_rejections_total", "Requests refused, by reason.", "counter", rejected)
    for name, text, field in HISTOGRAMS:
        histogram(lines, f"{prefix}:{name}", text, [(tags, getattr(s, field)) for tags, s in engines])
    _offload_families(lines, prefix, engines)
    for name, text, kind, field in TENANT_FAMILIES if with_tenants else ():
        shares = ((tags | {"tenant": who}, share) for tags, s in engines for who, share in s.tenants.items())
        family(lines, f"{prefix}:{name}", text, kind, ((tags, getattr(share, field)) for tags, share in shares))
    info = ((tags | {"block_size": str(s.block_size), "num_gpu_blocks": str(s.num_blocks)}, 1) for tags, s in engines)
    family(lines, f"{prefix}:cache_config_info", "Shape of each group's KV cache.", "gauge", info)
    family(lines, f"{prefix}:redis_away", "1 while Redis does not answer.", "gauge", [({}, int(redis_away))])
    return "\n".join(lines) + "\n"


def _offload_families(lines: list[str], prefix: str, engines: list[tuple[dict[str, str], EngineStats]]) -> None:
    """Of groups that have tiers below the device."""
    tiers = [(tags, s.offload) for tags, s in engines if s.offload is not None]
    if not tiers:
        return
    for name, text, kind in OFFLOAD_BYTES:
        samples = ((tags, t.blocks[kind] * t.block_bytes) for tags, t in tiers)
        family(lines, f"{prefix}:kv_offload_{name}_bytes", text, "counter", samples)
    seconds = ((tags | {"kind": kind}, value) for tags, t in tiers for kind, value in t.copy_s.items())
    family(lines, f"{prefix}:kv_offload_seconds_total", "Seconds of copying, by kind.", "counter", seconds)
    for name, text, kind, field in OFFLOAD_FAMILIES:
        family(lines, f"{prefix}:{name}", text, kind, ((tags, getattr(t, field)) for tags, t in tiers))
    switched_off = ((tags, int(t.disk_disabled is not None)) for tags, t in tiers)
    family(lines, f"{prefix}:kv_disk_disabled", "1 once the disk tier was switched off.", "gauge", switched_off)


def decode_stats(record: GroupRecord) -> EngineStats | None:
    """A record's statistics; None when there are none yet or they are of another version."""
    try:
        return msgspec.msgpack.decode(record.stats, type=EngineStats) if record.stats else None
    except msgspec.DecodeError:
        return None


def labels_of(record: GroupRecord) -> dict[str, str]:
    return {"model_name": record.model, "engine": record.group}


def family(
    lines: list[str], name: str, text: str, kind: str, samples: Iterable[tuple[Mapping[str, str], float]]
) -> None:
    lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_tags(tags)} {_number(value)}" for tags, value in samples]


def histogram(lines: list[str], name: str, text: str, samples: list[tuple[dict[str, str], HistogramStats]]) -> None:
    lines += [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
    for tags, histogram in samples:
        running = 0
        bounds = [*(_number(b) for b in histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, histogram.counts, strict=True):
            running += count
            lines.append(f"{name}_bucket{_tags(tags | {'le': bound})} {running}")
        lines.append(f"{name}_sum{_tags(tags)} {_number(histogram.total)}")
        lines.append(f"{name}_count{_tags(tags)} {running}")


def _tags(tags: Mapping[str, str]) -> str:
    if not tags:
        return ""
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in tags.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
