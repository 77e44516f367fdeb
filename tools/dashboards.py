"""Grafana's dashboard, configs/grafana/tandem.json, from the table of panels below.

    python -m tools.dashboards

One file for every prefix: the dashboard's variable `prefix` is `tandem`, or what `--metrics-prefix` says. Rows name the
part of a service that has their metrics; tests compare them with what services serve.
"""

import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

PLACE: Final = Path(__file__).resolve().parents[1] / "configs" / "grafana" / "tandem.json"
MINE: Final = 'model_name=~"$model_name", engine=~"$engine"'
RATE: Final = "[$__rate_interval]"


class Query(NamedTuple):
    """One line, or one for each label, of a panel. expr: PromQL, in which a family of ours begins with a colon."""

    expr: str
    legend: str


class Panel(NamedTuple):
    """One panel. unit: Grafana's word for what its axis counts."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    about: str = ""


def _quantiles(family: str, title: str, about: str, labels: str = MINE) -> Panel:
    lines = (
        Query(
            f"histogram_quantile({share}, sum by (le) (rate(:{family}_bucket{{{labels}}}{RATE})))",
            f"p{round(100 * share)}",
        )
        for share in (0.5, 0.95, 0.99)
    )
    return Panel(title, "s", tuple(lines), about)


def _mean(family: str) -> str:
    parts = (f"sum(rate(:{family}_{part}{{{MINE}}}{RATE}))" for part in ("sum", "count"))
    return " / ".join(parts)


def _rate(family: str, by: str = "") -> str:
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate(:{family}{{{MINE}}}{RATE}))"


def _now(family: str, by: str = "engine") -> str:
    return f"sum by ({by}) (:{family}{{{MINE}}})"


OF_MODEL: Final = 'model_name=~"$model_name"'
ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "Requests": (
        Panel("Running", "short", (Query(_now("num_requests_running"), "{{engine}}"),), "Requests that hold a row."),
        Panel("Waiting", "short", (Query(_now("num_requests_waiting"), "{{engine}}"),)),
        Panel("Waiting by reason", "short", (Query(_now("num_requests_waiting_by_reason", "reason"), "{{reason}}"),)),
        Panel(
            "Choices ended",
            "reqps",
            (Query(_rate("request_success_total", "finished_reason"), "{{finished_reason}}"),),
        ),
        Panel("Refused", "reqps", (Query(_rate("admission_rejections_total", "reason"), "{{reason}}"),)),
        Panel(
            "HTTP answers",
            "reqps",
            (Query(f"sum by (route, status) (rate(:http_requests_total{RATE}))", "{{route}} {{status}}"),),
        ),
    ),
    "Latency": (
        _quantiles("time_to_first_token_seconds", "Time to first token", "In the engine, from arrival."),
        _quantiles("inter_token_latency_seconds", "Inter-token latency", "Between two tokens of one choice."),
        _quantiles("e2e_request_latency_seconds", "Whole requests", "In the engine, from arrival to the end."),
        _quantiles(
            "gateway_time_to_first_token_seconds", "Time to first token, at the gateway", "With text work.", OF_MODEL
        ),
        Panel(
            "Where requests spend their time",
            "s",
            (
                Query(_mean("request_queue_time_seconds"), "queue"),
                Query(_mean("request_prefill_time_seconds"), "prefill"),
                Query(_mean("request_decode_time_seconds"), "decode"),
            ),
            "Means of requests that ended.",
        ),
        Panel("Time per output token", "s", (Query(_mean("request_time_per_output_token_seconds"), "mean"),)),
    ),
    "Tokens": (
        Panel(
            "Tokens a second",
            "short",
            (
                Query(_rate("prompt_tokens_total"), "prompt"),
                Query(_rate("prompt_tokens_cached_total"), "prompt, from the prefix cache"),
                Query(_rate("generation_tokens_total"), "generation"),
                Query(_rate("wasted_tokens_total"), "wasted"),
            ),
        ),
        Panel(
            "Sizes of requests",
            "short",
            (
                Query(_mean("request_prompt_tokens"), "prompt tokens"),
                Query(_mean("request_generation_tokens"), "generation tokens"),
                Query(_mean("request_params_max_tokens"), "max_tokens"),
            ),
            "Means of requests that ended.",
        ),
        Panel("Tokens in a step", "short", (Query(_mean("iteration_tokens_total"), "mean"),)),
    ),
    "KV cache": (
        Panel("In use", "percentunit", (Query(_now("kv_cache_usage_perc"), "{{engine}}"),)),
        Panel(
            "Prompt tokens found",
            "percentunit",
            (Query(f"{_rate('prefix_cache_hits_total')} / {_rate('prefix_cache_queries_total')}", "share"),),
        ),
        Panel("Preemptions", "ops", (Query(_rate("num_preemptions_total", "engine"), "{{engine}}"),)),
        Panel(
            "Slots without a token",
            "percentunit",
            (Query(f"{_now('kv_empty_slots')} / {_now('kv_allocated_slots')}", "{{engine}}"),),
            "Of those that blocks in use have room for.",
        ),
    ),
    "Steps": (
        Panel("Steps a second", "ops", (Query(_rate("engine_steps_total", "engine"), "{{engine}}"),)),
        Panel(
            "Where step time goes",
            "s",
            (
                Query(_rate("step_schedule_seconds_total"), "planning"),
                Query(_rate("step_wait_seconds_total"), "waiting for ranks"),
                Query(_rate("step_device_seconds_total"), "the device"),
            ),
            "Seconds a second, over all groups.",
        ),
        Panel("Launches", "ops", (Query(_rate("step_launches_total", "launch"), "{{launch}}"),)),
    ),
    "Service": (
        Panel("Groups", "short", (Query("max by (state) (:groups)", "{{state}}"),)),
        Panel(
            "Groups started and lost",
            "short",
            (
                Query("max(increase(:group_starts_total" + RATE + "))", "started"),
                Query("max(increase(:group_losses_total" + RATE + "))", "lost"),
                Query("max(increase(:group_start_failures_total" + RATE + "))", "did not start"),
            ),
            "Lost: died, or gave no sign of life. Not those that ended as planned.",
        ),
        Panel(
            "Requests that moved to another group",
            "ops",
            (Query("sum(rate(:request_migrations_total" + RATE + "))", "moved"),),
        ),
        Panel("Requests in gateways", "short", (Query("sum(:gateway_requests_open)", "open"),)),
        Panel(
            "Gateways' text work",
            "s",
            (Query(f"sum by (place) (rate(:gateway_text_seconds_total{RATE}))", "{{place}}"),),
            "CPU seconds a second.",
        ),
        Panel("Redis away", "bool", (Query("max(:redis_away)", "away"),)),
    ),
    "Speculative decoding": (
        Panel(
            "Drafts accepted",
            "percentunit",
            (
                Query(
                    f"{_rate('spec_decode_num_accepted_tokens_total')} / {_rate('spec_decode_num_draft_tokens_total')}",
                    "share",
                ),
            ),
        ),
        Panel(
            "Accepted by position",
            "ops",
            (Query(_rate("spec_decode_num_accepted_tokens_per_pos_total", "position"), "{{position}}"),),
        ),
    ),
    "LoRA adapters": (
        Panel("On the device", "short", (Query(_now("adapters_on_device"), "{{engine}}"),)),
        Panel("Sequences that wait for one", "short", (Query(_now("adapter_sequences_waiting"), "{{engine}}"),)),
        _quantiles("adapter_load_seconds", "Loads", "From the first move of an adapter to the device."),
        Panel("Evictions", "ops", (Query(_rate("adapter_swaps_total", "engine"), "{{engine}}"),)),
    ),
    "KV offload": (
        Panel(
            "Bytes a second",
            "Bps",
            (
                Query(_rate("kv_offload_store_bytes"), "to the host"),
                Query(_rate("kv_offload_load_bytes"), "to the device"),
                Query(_rate("kv_offload_spill_bytes"), "to disk"),
                Query(_rate("kv_offload_fetch_bytes"), "from disk"),
            ),
        ),
        Panel(
            "Host memory in use",
            "percentunit",
            (Query(f"{_now('kv_host_blocks')} / {_now('kv_host_slots')}", "{{engine}}"),),
        ),
        Panel(
            "Prompt tokens copied instead of computed",
            "short",
            (Query(_rate("kv_offload_loaded_tokens_total"), "a second"),),
        ),
        Panel(
            "Failures",
            "short",
            (
                Query(_rate("kv_offload_failed_blocks_total"), "blocks a second"),
                Query("sum(:kv_disk_disabled)", "disks switched off"),
            ),
        ),
    ),
}
"""Panels by row."""
EXTRA: Final = ("Speculative decoding", "LoRA adapters", "KV offload")
"""Rows of services with drafts, with adapters and with tiers below the device; closed at first."""
FAMILY: Final = re.compile(r"(?<![\w}]):([a-z_0-9]+)")


def families(row: str) -> set[str]:
    """Returns the names that a row's panels ask for, without a prefix, as samples have them."""
    return {name for panel in ROWS[row] for query in panel.queries for name in FAMILY.findall(query.expr)}


def dashboard() -> dict[str, Any]:
    """Returns the dashboard in Grafana's form."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in ROWS.items():
        is_extra = row in EXTRA
        header = {"type": "row", "title": row, "collapsed": is_extra, "panels": [], "gridPos": _at(0, y, 24, 1)}
        made = [_panel(panel, 8 * (at % 3), y + 1 + 8 * (at // 3)) for at, panel in enumerate(members)]
        panels.append(header | ({"panels": made} if is_extra else {}))
        panels += [] if is_extra else made
        y += 1 + 8 * -(-len(members) // 3)
    _number(panels)
    return {
        "uid": "tandem",
        "title": "Tandem",
        "tags": ["tandem", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    found = [
        {
            "name": name,
            "type": "query",
            "datasource": source,
            "query": f'label_values({{__name__="${{prefix}}:num_requests_running"}}, {name})',
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        for name in ("model_name", "engine")
    ]
    prefix = {"name": "prefix", "type": "textbox", "query": "tandem", "current": {"text": "tandem", "value": "tandem"}}
    return [{"name": "datasource", "type": "datasource", "query": "prometheus"}, prefix, *found]


def _panel(panel: Panel, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + at), "expr": FAMILY.sub(r"${prefix}:\1", query.expr), "legendFormat": query.legend}
        for at, query in enumerate(panel.queries)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": _at(x, y, 8, 8),
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _at(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _number(panels: list[dict[str, Any]]) -> None:
    inside = (inner for panel in panels for inner in (panel, *panel.get("panels", ())))
    for number, panel in enumerate(inside, 1):
        panel["id"] = number


def text() -> str:
    """Returns the file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    PLACE.write_text(text())
    print(f"{PLACE.name}: {sum(map(len, ROWS.values()))} panels in {len(ROWS)} rows")
