"""What the engine counts, and the frozen picture of it that metrics and routers read.

Collector is written by the engine's thread only; EngineStats is a copy that may go anywhere. Histogram bounds are
vLLM's, so that dashboards made for it read ours. Knows no Prometheus.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
LOAD_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
ITERATION_BOUNDS_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class HistogramStats:
    """counts[i]: values in (bounds[i-1], bounds[i]]; the last count is of those above every bound. Not cumulative."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> HistogramStats:
        return HistogramStats(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True)
class OffloadStats:
    """The tiers below the device. Blocks and seconds by kind of move, counted from the start.

    block_bytes: of all ranks. host_blocks: blocks that the host holds now. swapped_out, recomputed: preemptions by how
    the sequence comes back. loaded_tokens: prompt tokens that were copied instead of computed. disk_disabled: why the
    disk tier was switched off at run time, None while it works or when there is none. open_tickets: moves under way.
    """

    block_bytes: int
    host_slots: int
    host_blocks: int
    blocks: dict[str, int]
    copy_s: dict[str, float]
    failed_blocks: int
    swapped_out: int
    recomputed: int
    loaded_tokens: int
    disk_disabled: str | None = None
    open_tickets: int = 0


@dataclass(frozen=True)
class AdapterStats:
    """LoRA adapters at one moment. Pages are device memory of each rank. in_use: adapters on the device that a request
    runs with or is queued for. waiting: sequences whose adapter is not there for them. Counted from the start: loads
    (load_s: seconds that their moves took), evictions from the device, adapters refused."""

    num_pages: int
    free_pages: int
    resident: int
    on_host: int
    in_use: int
    waiting: int
    loads: int
    load_s: HistogramStats
    evictions: int
    refused: int


@dataclass(frozen=True)
class TenantStats:
    """One tenant's share. Tokens and queue times (of requests that got a row) count from the start; waiting: its
    sequences that wait now."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    queue_s: float = 0.0
    queued_requests: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class EngineStats:
    """One engine at one moment. Counters (tokens, seconds, events) count from its start.

    running: sequences that hold a row. waiting: sequences queued, preempted and held ones included. waiting_tokens:
    known tokens they still have to compute. kv_usage: share of blocks in use, 0..1. wasted_tokens: generated, but
    neither delivered nor billed. schedule_s, wait_s, device_s: where step time went (planning and applying; waiting
    for ranks; as the last stage measured it).
    """

    running: int
    waiting: int
    waiting_tokens: int
    in_flight_steps: int
    num_blocks: int
    block_size: int
    used_blocks: int
    cached_blocks: int
    kv_usage: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    wasted_tokens: int
    steps: int
    schedule_s: float
    wait_s: float
    device_s: float
    finished: dict[str, int]
    rejected: dict[str, int]
    time_to_first_token_s: HistogramStats
    inter_token_latency_s: HistogramStats
    e2e_latency_s: HistogramStats
    queue_time_s: HistogramStats
    iteration_tokens: HistogramStats
    offload: OffloadStats | None = None
    adapters: AdapterStats | None = None
    tenants: dict[str, TenantStats] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class TenantCounts:
    """The running counts behind TenantStats, but for output tokens (fairness.py has them)."""

    prompt_tokens: int = 0
    queue_s: float = 0.0
    queued_requests: int = 0


@dataclass(slots=True, eq=False)
class Collector:
    """The running counts behind EngineStats. `finished` is by reason and choice, `rejected` by cause and request."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    wasted_tokens: int = 0
    steps: int = 0
    schedule_s: float = 0.0
    wait_s: float = 0.0
    device_s: float = 0.0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))
    rejected: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("queue_full", "context_length", "invalid", "deadline", "adapter"), 0)
    )
    tenants: dict[str, TenantCounts] = field(default_factory=dict)
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(ITL_BOUNDS_S))
    e2e_latency: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    queue_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(ITERATION_BOUNDS_TOKENS))
