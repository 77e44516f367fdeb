"""The figures of `tandem top`: rates between two readings of a service, beside what it has at the moment.

They are plain values, as `--json` prints them. A rate is None until there are two readings of the same life of a group.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem.cluster.cli.client.service_reading import ServiceReading, losses
from tandem.cluster.fleet.engine_metrics import decode_stats
from tandem.cluster.routing.residency import adapter_key

if TYPE_CHECKING:
    from tandem.cluster.fleet.fleet_view import GroupRecord
    from tandem.workers.engine.base.stats import EngineStats

RATES = ("prompt_tokens_per_s", "generation_tokens_per_s")


def figures(before: ServiceReading | None, now: ServiceReading, seconds: float) -> dict[str, Any]:
    """Returns the figures of a service. before: the reading `seconds` earlier, None without one."""
    old = {} if before is None else _known_stats(before)
    new = _known_stats(now)
    groups = [_group(record, now, old, new, seconds) for record in sorted(now.groups, key=lambda one: one.group)]
    return {
        "redis_unavailable": bool(now.redis_state),
        "redis_state": now.redis_state or None,
        "group_losses": None if now.tally is None else now.tally.losses,
        "losses": losses(now),
        "running": sum(group["running"] for group in groups),
        "waiting": sum(group["waiting"] for group in groups),
        "held": sum(gateway.held for gateway in now.gateways),
        **{name: _sum(group[name] for group in groups) for name in RATES},
        "groups": groups,
        "groups_wanted": None if now.scaling is None else {"groups": now.scaling.groups, "why": now.scaling.why},
        "gateways": [
            {"gateway": g.gateway, "node": g.host, "pid": g.pid, "in_flight": g.in_flight, "held": g.held,
             "leaving": g.is_leaving} for g in now.gateways
        ],
        "adapters": [_adapter(entry, now) for entry in now.adapters],
        "tenants": _tenants(now, list(old.values()), list(new.values()), seconds),
    }  # fmt: skip


def _known_stats(reading: ServiceReading) -> dict[tuple[str, int], "EngineStats"]:
    """The statistics of groups, by id and life: counts of another life say nothing of this one."""
    lives = {record.group: record.life for record in reading.groups}
    found = {group: decode_stats(report) for group, report in reading.reports.items() if group in lives}
    return {(group, lives[group]): stats for group, stats in found.items() if stats is not None}


def _group(
    record: "GroupRecord",
    now: ServiceReading,
    old: Mapping[tuple[str, int], "EngineStats"],
    new: Mapping[tuple[str, int], "EngineStats"],
    seconds: float,
) -> dict[str, Any]:
    report = now.reports.get(record.group)
    key = (record.group, record.life)
    return {
        "group": record.group,
        "state": record.state,
        "node": record.host,
        "pid": record.pid,
        "ranks": [] if report is None else list(report.rank_pids),
        "running": record.running,
        "waiting": record.waiting,
        "outstanding_tokens": record.outstanding_tokens,
        "stalled_s": record.stalled_s,
        "kv_usage": record.kv_used,
        "kv_tokens": record.kv_tokens,
        "loaded": record.loaded_bytes / record.total_bytes if record.total_bytes else None,
        **_rates(old.get(key), new.get(key), seconds),
        **_tiers(new.get(key)),
    }


def _rates(old: "EngineStats | None", new: "EngineStats | None", seconds: float) -> dict[str, float | None]:
    """Tokens a second, milliseconds of a step, the share of prompts that the prefix cache had, and of drafts that were
    accepted, all since the reading before."""
    if old is None or new is None or seconds <= 0:
        return dict.fromkeys((*RATES, "step_ms", "prefix_hits", "drafts_accepted"))
    drafts = [
        (0, 0) if each is None else (each.num_accepted, each.num_draft_tokens) for each in (old.drafts, new.drafts)
    ]
    waited_s = new.schedule_s + new.wait_s - old.schedule_s - old.wait_s
    return {
        "prompt_tokens_per_s": (new.prompt_tokens - old.prompt_tokens) / seconds,
        "generation_tokens_per_s": (new.generation_tokens - old.generation_tokens) / seconds,
        "step_ms": _share(1e3 * waited_s, new.steps - old.steps),
        "prefix_hits": _share(
            new.prefix_cache_hits - old.prefix_cache_hits, new.prefix_cache_queries - old.prefix_cache_queries
        ),
        "drafts_accepted": _share(drafts[1][0] - drafts[0][0], drafts[1][1] - drafts[0][1]),
    }


def _tiers(stats: "EngineStats | None") -> dict[str, Any]:
    """Blocks in host memory and adapters by tier; None where a group has no such tier."""
    offload, adapters = (None, None) if stats is None else (stats.offload, stats.adapters)
    return {
        "host_blocks": None if offload is None else offload.host_blocks,
        "host_slots": None if offload is None else offload.host_slots,
        "disk_disabled": None if offload is None else offload.disk_disabled,
        "adapters_on_device": None if adapters is None else adapters.resident,
        "adapters_on_host": None if adapters is None else adapters.on_host,
    }


def _adapter(entry: Any, now: ServiceReading) -> dict[str, Any]:
    """A listed adapter, and the number of groups that hold it, by tier."""
    reports = [report.adapters for report in now.reports.values() if report.adapters is not None]
    return {
        "name": entry.name,
        "digest": entry.digest,
        "tenant": entry.tenant,
        "pinned": entry.pinned,
        "on_device": sum(adapter_key(entry.digest) in report.on_device for report in reports),
        "on_host": sum(adapter_key(entry.digest) in report.on_host for report in reports),
        "running": sum(entry.name in report.running for report in reports),
    }


def _tenants(
    now: ServiceReading, old: Sequence["EngineStats"], new: Sequence["EngineStats"], seconds: float
) -> list[dict[str, Any]]:
    """The tenants, over all groups. running: None where no limit needs them counted."""
    names = sorted({*now.running, *(name for stats in new for name in stats.tenants)})
    rows = []
    for name in names:
        after = [stats.tenants[name] for stats in new if name in stats.tenants]
        before = [stats.tenants[name] for stats in old if name in stats.tenants]
        row: dict[str, Any] = {"tenant": name, "running": now.running.get(name)}
        row["waiting"] = sum(counts.waiting for counts in after)
        for rate, field in zip(RATES, ("prompt_tokens", "generation_tokens"), strict=True):
            grown = sum(getattr(counts, field) for counts in after) - sum(getattr(counts, field) for counts in before)
            row[rate] = max(0, grown) / seconds if old and seconds > 0 else None
        rows.append(row)
    return rows


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _sum(values: Any) -> float | None:
    """The sum of the known ones; None when none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
