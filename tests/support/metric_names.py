"""Names of samples in Prometheus text; those that our dashboard asks for, and stock dashboards of others; those that
the reference has not."""

import inspect
import re

from ray.dashboard.modules.metrics.dashboards import serve_llm_dashboard_panels

from tools import dashboards
from tools.reference import FOLDER

NOT_OURS = re.compile(r"nixl|external_prefix|kv_offload|num_requests_swapped|model_name$")
"""Of Ray Serve LLM's panels: prefill and decode apart, caches beyond the group, LMCache's offload, what vLLM's first
engine had, and a label."""
VLLMS = frozenset(
    {
        *("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
        *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    }
)
"""What the panels of vLLM's examples ask for (examples/online_serving: prometheus_grafana, dashboards/grafana), after
`vllm:` or `vllm_`."""


def stock_names() -> set[str]:
    """Returns the metrics that stock dashboards of vLLM and of Ray Serve LLM ask for, without a prefix: families, or
    samples of histograms."""
    asked = set(re.findall(r"ray_vllm_(\w+)", inspect.getsource(serve_llm_dashboard_panels)))
    return {name for name in asked if not NOT_OURS.search(name)} | VLLMS


def absent_names(asked: set[str], served: set[str]) -> set[str]:
    """Returns the names that are neither samples of a service nor histograms of it."""
    return {name for name in asked if name not in served and f"{name}_bucket" not in served}


def sample_names(text: str, prefix: str = "tandem") -> set[str]:
    """Returns the names of the samples of families with a prefix, without it."""
    names = (line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if line and line[0] != "#")
    return {name.removeprefix(f"{prefix}:") for name in names if name.startswith(f"{prefix}:")}


def not_served(text: str, *rows: str) -> dict[str, set[str]]:
    """Returns the names that panels of the dashboard's rows ask for and a service's metrics lack, by row."""
    served = sample_names(text)
    return {row: absent for row in rows if (absent := dashboards.families(row) - served)}


def not_in_the_reference(text: str, prefix: str = "tandem") -> set[str]:
    """Returns the families of a text that docs/reference/metrics.md has not."""
    known = re.findall(r"^\| `(\w+)`", (FOLDER / "metrics.md").read_text(), re.MULTILINE)
    return set(re.findall(rf"^# TYPE {prefix}:(\w+)", text, re.MULTILINE)) - set(known)
