"""Counts of the engine, and EngineStats, the frozen copy that metrics and routers read.

Only the engine's thread writes a Collector; EngineStats may be read by any thread. Histogram bounds are vLLM's, so that
its dashboards fit. cluster/fleet/engine_metrics.py turns the stats into Prometheus metrics.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.workers.engine.base.drafting import DraftStats
from tandem.workers.engine.base.expert_reports import ExpertStats
from tandem.workers.engine.base.sequence import RequestState, Sequence, SequenceStatus
from tandem.workers.engine.blocks.block_manager import BlockManager

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
    """Frozen copy of a Histogram. counts[i]: values in (bounds[i-1], bounds[i]], the last one those above all bounds.
    Not cumulative. total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts of values by upper bound, and the sum of the values."""

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
    """Counts of the tiers below the device, from the start. blocks, copy_s: by kind of transfer; copy_s in seconds.

    block_bytes: of one block on all ranks together. host_slots, host_blocks: slots of the host tier, and how many hold
    a block now. failed_blocks: blocks whose bytes did not arrive. swapped_out, recomputed: preemptions whose KV is
    loaded or computed again. loaded_tokens: tokens whose KV was loaded from the host. disk_disabled: why the disk tier
    was switched off at run time; None while it works, and without one. open_tickets: transfers in flight.
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
    """LoRA adapters of one engine at one moment.

    num_pages, free_pages: device memory of each rank. resident, on_host: adapters on the device and in host memory.
    in_use: resident adapters that a request uses or is queued for. waiting: sequences that wait for their adapter.
    Counted from the start: loads to the device (load_s: seconds of each), evictions from it, refused adapters.
    """

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
    """One tenant's counts. waiting: sequences that wait now. Counted from the start: generation_tokens; and of requests
    that got a row prompt_tokens, their number (queued_requests) and the sum of their seconds in the queue (queue_s)."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    queue_s: float = 0.0
    queued_requests: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class EngineStats:
    """Counts of one engine at one moment. Tokens, seconds and events count from its start.

    running: sequences with a row. waiting: all other live sequences. waiting_tokens: known tokens of those. kv_tokens:
    that all blocks hold, in contexts as long as the model takes. kv_usage: share of blocks in use, 0 to 1.
    reserved_blocks: those of the others that chunks of running prompts will take. allocated_slots: tokens that the
    blocks with a user can hold. empty_slots: those of them for which no plan has a token yet; their share is the KV
    waste. prefix_cache_queries, prefix_cache_hits: tokens looked up and found. wasted_tokens: generated, but neither
    delivered nor billed. schedule_s: seconds of planning and applying results. wait_s: of waiting for ranks. device_s:
    of steps, measured by the last stage. finished: by reason and choice. rejected: by cause and request.
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
    reserved_blocks: int
    allocated_slots: int
    empty_slots: int
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
    drafts: DraftStats | None = None
    kv_tokens: int = 0
    experts: ExpertStats | None = None


@dataclass(slots=True, eq=False)
class TenantCounts:
    """Counts behind TenantStats. Output tokens are counted in fairness.py."""

    prompt_tokens: int = 0
    queue_s: float = 0.0
    queued_requests: int = 0


@dataclass(slots=True, eq=False)
class Collector:
    """Counts behind EngineStats, written by the engine's thread."""

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
        default_factory=lambda: dict.fromkeys(
            ("queue_full", "context_length", "invalid", "deadline", "adapter", "grammar"), 0
        )
    )
    tenants: dict[str, TenantCounts] = field(default_factory=dict)
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(ITL_BOUNDS_S))
    e2e_latency: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    queue_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(ITERATION_BOUNDS_TOKENS))


def engine_stats(
    requests: Iterable[RequestState],
    manager: BlockManager,
    collector: Collector,
    output_tokens: dict[str, int],
    *,
    max_model_len: int,
    in_flight_steps: int,
    preemptions: int,
    offload: OffloadStats | None,
    adapters: AdapterStats | None,
    drafts: DraftStats | None,
    experts: ExpertStats | None,
) -> EngineStats:
    """Returns a frozen copy of all counts; O(live sequences). output_tokens: charged by tenant, from the start."""
    pool = manager.pool
    live = [seq for state in requests for seq in state.sequences if seq.status is not SequenceStatus.FINISHED]
    queued = [seq for seq in live if seq.status is not SequenceStatus.RUNNING]
    running = (seq for seq in live if seq.status is SequenceStatus.RUNNING)
    return EngineStats(
        running=len(live) - len(queued),
        waiting=len(queued),
        waiting_tokens=sum(len(seq.tokens) for seq in queued),
        in_flight_steps=in_flight_steps,
        num_blocks=pool.num_blocks,
        block_size=manager.block_size,
        kv_tokens=manager.groups.tokens_held(pool.num_blocks, max_model_len),
        used_blocks=pool.num_used,
        cached_blocks=pool.num_cached,
        kv_usage=pool.num_used / pool.num_blocks,
        reserved_blocks=pool.num_reserved,
        allocated_slots=(pool.num_used - pool.num_pending) * manager.block_size,
        empty_slots=sum(seq.table.capacity - seq.num_scheduled for seq in running) * manager.groups.count,
        prefix_cache_queries=collector.prefix_cache_queries,
        prefix_cache_hits=collector.prefix_cache_hits,
        preemptions=preemptions,
        prompt_tokens=collector.prompt_tokens,
        generation_tokens=collector.generation_tokens,
        wasted_tokens=collector.wasted_tokens,
        steps=collector.steps,
        schedule_s=collector.schedule_s,
        wait_s=collector.wait_s,
        device_s=collector.device_s,
        finished=dict(collector.finished),
        rejected=dict(collector.rejected),
        time_to_first_token_s=collector.time_to_first_token.snapshot(),
        inter_token_latency_s=collector.inter_token_latency.snapshot(),
        e2e_latency_s=collector.e2e_latency.snapshot(),
        queue_time_s=collector.queue_time.snapshot(),
        iteration_tokens=collector.iteration_tokens.snapshot(),
        offload=offload,
        adapters=adapters,
        tenants=_tenants(live, collector.tenants, dict(output_tokens)),
        drafts=drafts,
        experts=experts,
    )


def _tenants(
    live: list[Sequence], counts: dict[str, TenantCounts], output_tokens: dict[str, int]
) -> dict[str, TenantStats]:
    waiting: dict[str, int] = {}
    for seq in live:
        if seq.status is not SequenceStatus.RUNNING:
            waiting[seq.tenant] = waiting.get(seq.tenant, 0) + 1
        output_tokens[seq.tenant] = output_tokens.get(seq.tenant, 0) + len(seq.tokens) - seq.num_charged
    none = TenantCounts()
    stats = {}
    for name in {**counts, **output_tokens, **waiting}:
        count = counts.get(name, none)
        stats[name] = TenantStats(
            prompt_tokens=count.prompt_tokens,
            generation_tokens=output_tokens.get(name, 0),
            queue_s=count.queue_s,
            queued_requests=count.queued_requests,
            waiting=waiting.get(name, 0),
        )
    return stats
