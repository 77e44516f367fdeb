"""Counts of the engine, and EngineStats, the copy of a moment that metrics and routers read.

A field with a Metric is a row of /metrics: it is named here and counted where it happens, and nothing else names it
(metric_rows.py; cluster/fleet/engine_metrics.py makes the text). Only the engine's thread writes a Collector; nobody
writes EngineStats, which any thread may read. Histogram bounds are vLLM's, so that its dashboards fit.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from tandem.workers.engine.base.draft_record import DraftStats
from tandem.workers.engine.base.expert_reports import ExpertStats
from tandem.workers.engine.base.metric_rows import Histogram, Metric
from tandem.workers.engine.base.request_figures import ITL_BOUNDS_S, REQUEST_BOUNDS_S, RequestFigures
from tandem.workers.engine.base.sequence import RequestState, Sequence, SequenceStatus, is_idle_work
from tandem.workers.engine.blocks.block_manager import NO_BLOCK, BlockManager
from tandem.workers.engine.blocks.block_pool import BlockPool

TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
LOAD_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
ITERATION_BOUNDS_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, kw_only=True)
class OffloadStats:
    """Counts of the tiers below the device, from the start."""

    block_bytes: int  # of one block on all ranks together
    blocks: dict[str, int]  # copied, by kind of transfer
    copy_s: Annotated[
        dict[str, float], Metric("counter", "kv_offload_seconds_total", "Seconds of copying, by kind.", "kind")
    ]
    failed_blocks: Annotated[int, Metric("counter", "kv_offload_failed_blocks_total", "Blocks whose copy failed.")]
    loaded_tokens: Annotated[
        int, Metric("counter", "kv_offload_loaded_tokens_total", "Prompt tokens copied instead of computed.")
    ]
    swapped_out: Annotated[
        int, Metric("counter", "kv_offload_swapped_out_total", "Preemptions whose KV was kept below the device.")
    ]
    open_tickets: Annotated[
        int, Metric("gauge", "kv_offload_open_tickets", "Moves of KV blocks that not every rank has answered.")
    ] = 0
    host_blocks: Annotated[int, Metric("gauge", "kv_host_blocks", "KV blocks held in host memory.")]
    host_slots: Annotated[int, Metric("gauge", "kv_host_slots", "KV blocks that host memory can hold.")]
    recomputed: int  # preemptions whose KV is computed again
    # seconds to load a token's KV from host memory over seconds to compute it; None before both were measured
    copy_share: float | None = None
    disk_disabled: str | None = None  # why the disk tier was switched off at run time; None while it works


@dataclass(frozen=True, kw_only=True)
class AdapterStats:
    """LoRA adapters of one engine at one moment. loads, load_s, evictions and refused count from the start."""

    resident: Annotated[int, Metric("gauge", "adapters_on_device", "Adapters in device memory.")]
    on_host: Annotated[int, Metric("gauge", "adapters_on_host", "Adapters in host memory.")]
    num_pages: Annotated[int, Metric("gauge", "adapter_pages", "Pages of device memory for adapters, of each rank.")]
    free_pages: Annotated[int, Metric("gauge", "adapter_pages_free", "Those that hold nothing.")]
    waiting: Annotated[
        int, Metric("gauge", "adapter_sequences_waiting", "Sequences whose adapter is not on the device for them.")
    ]
    evictions: Annotated[
        int, Metric("counter", "adapter_swaps_total", "Adapters evicted from the device to make room.")
    ]
    refused: Annotated[int, Metric("counter", "adapters_refused_total", "Adapters that a group could not load.")]
    load_s: Annotated[
        Histogram, Metric("histogram", "adapter_load_seconds", "From the first move of an adapter to the device.")
    ]
    loads: int  # to the device
    in_use: int  # resident adapters that a request uses or is queued for


@dataclass(slots=True, eq=False)
class TenantCounts:
    """Requests of one tenant that got a row, counted from the start. Output tokens are counted in fairness.py."""

    prompt_tokens: int = 0
    queue_s: Annotated[
        float,
        Metric("counter", "tenant_queue_time_seconds_total", "Time that tenants' requests waited for a row."),
    ] = 0.0
    queued_requests: Annotated[
        int, Metric("counter", "tenant_queued_requests_total", "Requests of tenants that got a row.")
    ] = 0


@dataclass(slots=True)
class TenantStats(TenantCounts):
    """One tenant's counts, and what it has at the moment."""

    generation_tokens: int = 0  # from the start
    waiting: Annotated[int, Metric("gauge", "tenant_num_requests_waiting", "Sequences of tenants that wait now.")] = 0


@dataclass(slots=True, eq=False)
class EngineCounts:
    """Tokens, seconds and events of one engine, counted from its start, in the order of /metrics."""

    prefix_cache_queries: Annotated[
        int, Metric("counter", "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.")
    ] = 0
    prefix_cache_hits: Annotated[
        int, Metric("counter", "prefix_cache_hits_total", "Prompt tokens found in the prefix cache.")
    ] = 0
    # 0 in a Collector: the scheduler counts them
    preemptions: Annotated[
        int,
        Metric(
            "counter",
            "num_preemptions_total",
            "Sequences that lost their row to others; those that pause keep their blocks.",
        ),
    ] = 0
    prompt_tokens: Annotated[int, Metric("counter", "prompt_tokens_total", "Prompt tokens processed.")] = 0
    cached_tokens: Annotated[
        int, Metric("counter", "prompt_tokens_cached_total", "Those of them that were found in the prefix cache.")
    ] = 0
    generation_tokens: Annotated[int, Metric("counter", "generation_tokens_total", "Tokens generated.")] = 0
    wasted_tokens: Annotated[
        int, Metric("counter", "wasted_tokens_total", "Tokens generated that were neither delivered nor billed.")
    ] = 0
    steps: Annotated[int, Metric("counter", "engine_steps_total", "Steps of the engine.")] = 0
    # of those that succeeded, by whether their layers were a capture's
    launches: Annotated[
        dict[str, int],
        Metric("counter", "step_launches_total", "Steps by launch of their layers: replayed or eager.", "launch"),
    ] = field(default_factory=lambda: dict.fromkeys(("replayed", "eager"), 0))
    # of the stage that has the fewest; set at the start, where a device makes all of them
    captures: Annotated[
        dict[str, int],
        Metric("gauge", "step_captures", "Kinds of steps captured at the start: made or failed.", "outcome"),
    ] = field(default_factory=lambda: dict.fromkeys(("made", "failed"), 0))
    schedule_s: Annotated[
        float, Metric("counter", "step_schedule_seconds_total", "Step time spent planning and applying.")
    ] = 0.0
    wait_s: Annotated[float, Metric("counter", "step_wait_seconds_total", "Step time spent waiting for ranks.")] = 0.0
    device_s: Annotated[
        float, Metric("counter", "step_device_seconds_total", "Step time as the last stage measured it.")
    ] = 0.0
    time_to_first_token_s: Annotated[
        Histogram, Metric("histogram", "time_to_first_token_seconds", "From arrival to the first token.")
    ] = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))
    inter_token_latency_s: Annotated[
        Histogram, Metric("histogram", "inter_token_latency_seconds", "Between two tokens of one choice.")
    ] = field(default_factory=lambda: Histogram(ITL_BOUNDS_S))
    e2e_latency_s: Annotated[
        Histogram, Metric("histogram", "e2e_request_latency_seconds", "From arrival to the end.")
    ] = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    queue_time_s: Annotated[
        Histogram, Metric("histogram", "request_queue_time_seconds", "From arrival to the first step.")
    ] = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    iteration_tokens: Annotated[Histogram, Metric("histogram", "iteration_tokens_total", "Tokens in a step.")] = field(
        default_factory=lambda: Histogram(ITERATION_BOUNDS_TOKENS)
    )
    # by reason and choice
    finished: Annotated[
        dict[str, int],
        Metric("counter", "request_success_total", "Choices that ended, by reason.", "finished_reason"),
    ] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))
    # by cause and request
    rejected: Annotated[
        dict[str, int], Metric("counter", "admission_rejections_total", "Requests refused, by reason.", "reason")
    ] = field(
        default_factory=lambda: dict.fromkeys(
            ("queue_full", "context_length", "invalid", "deadline", "adapter", "grammar"), 0
        )
    )


@dataclass(slots=True, eq=False)
class IdleCounts:
    """Prompt tokens and first tokens of idle work, counted from the start."""

    prompt_tokens: int = 0
    first_tokens: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))


@dataclass(frozen=True, kw_only=True)
class IdleWork:
    """The part of an engine's work that is for idle rows only. running, waiting: sequences. waiting_tokens: known
    tokens of the latter. kv_usage: share of the KV blocks that no other work uses. prompt_tokens, first_tokens: from
    the start, the latter by TTFT_BOUNDS_S."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    prompt_tokens: int = 0
    first_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class Collector(EngineCounts):
    """Counts of an engine so far, written by its thread."""

    requests: RequestFigures
    tenants: dict[str, TenantCounts] = field(default_factory=dict)
    idle: IdleCounts = field(default_factory=IdleCounts)
    # for the courses of requests: steps that have returned, and the sequences in them
    returned_steps: int = 0
    returned_rows: int = 0


@dataclass(slots=True, kw_only=True)
class EngineStats(EngineCounts):
    """The counts of one engine so far, and its state at one moment."""

    # sequences with a row
    running: Annotated[int, Metric("gauge", "num_requests_running", "Requests that hold a row.")]
    # all other live sequences
    waiting: Annotated[int, Metric("gauge", "num_requests_waiting", "Requests that wait to be processed.")]
    # capacity: for a row or for blocks; deferred: for something else, such as an adapter or the copy of a prefix
    waiting_for: Annotated[
        dict[str, int],
        Metric("gauge", "num_requests_waiting_by_reason", "Requests that wait, for capacity or deferred.", "reason"),
    ] = field(default_factory=dict)
    kv_usage: Annotated[float, Metric("gauge", "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")]
    allocated_slots: Annotated[
        int, Metric("gauge", "kv_allocated_slots", "Tokens that the KV blocks with a user can hold.")
    ]
    # no plan has a token for them yet; their share of the allocated ones is the KV waste
    empty_slots: Annotated[int, Metric("gauge", "kv_empty_slots", "Those of the allocated slots that hold no token.")]
    waiting_tokens: int  # known tokens of those that wait
    in_flight_steps: int
    num_blocks: int
    block_size: int
    used_blocks: int
    cached_blocks: int
    reserved_blocks: int  # of those without a user, how many chunks of running prompts will take
    kv_tokens: int = 0  # that all blocks hold, in contexts as long as the model takes
    idle: IdleWork = field(default_factory=IdleWork)  # of all that is counted here
    offload: OffloadStats | None = None
    adapters: AdapterStats | None = None
    tenants: dict[str, TenantStats] = field(default_factory=dict)
    drafts: DraftStats | None = None
    experts: ExpertStats | None = None
    requests: RequestFigures | None = None


def engine_stats(
    requests: Iterable[RequestState],
    manager: BlockManager,
    collector: Collector,
    is_deferred: Callable[[Sequence], bool],
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
    """Returns a copy of all counts; O(live sequences). is_deferred: of a sequence without a row, whether it waits for
    something else than room. output_tokens: charged by tenant, from the start."""
    pool = manager.pool
    live = [seq for state in requests for seq in state.sequences if seq.status is not SequenceStatus.FINISHED]
    queued = [seq for seq in live if seq.status is not SequenceStatus.RUNNING]
    running = (seq for seq in live if seq.status is SequenceStatus.RUNNING)
    counts = _copied(collector) | {"preemptions": preemptions}
    deferred = sum(map(is_deferred, queued))
    return EngineStats(
        **counts,
        running=len(live) - len(queued),
        waiting=len(queued),
        waiting_for={"capacity": len(queued) - deferred, "deferred": deferred},
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
        idle=_idle_work(live, pool, collector.idle),
        offload=offload,
        adapters=adapters,
        tenants=_tenants(live, collector.tenants, dict(output_tokens)),
        drafts=drafts,
        experts=experts,
        requests=collector.requests.snapshot(),
    )


def _idle_work(live: Iterable[Sequence], pool: BlockPool, counts: IdleCounts) -> IdleWork:
    """The idle work among the live sequences; O(its blocks)."""
    idle = list(filter(is_idle_work, live))
    waiting = [seq for seq in idle if seq.status is not SequenceStatus.RUNNING]
    users = Counter(block_id for seq in idle for block_id in seq.table.block_ids if block_id != NO_BLOCK)
    return IdleWork(
        running=len(idle) - len(waiting),
        waiting=len(waiting),
        waiting_tokens=sum(len(seq.tokens) for seq in waiting),
        kv_usage=sum(pool.num_users(block_id) <= count for block_id, count in users.items()) / pool.num_blocks,
        prompt_tokens=counts.prompt_tokens,
        first_tokens=counts.first_tokens.counts.copy(),
    )


def _copied(collector: Collector) -> dict[str, Any]:
    """The counts of a collector, by their names in EngineCounts; nothing is counted in them any more."""
    counts: dict[str, Any] = {}
    for each in fields(EngineCounts):
        value = getattr(collector, each.name)
        if isinstance(value, Histogram):
            value = value.snapshot()
        counts[each.name] = value.copy() if isinstance(value, dict) else value
    return counts


def _tenants(
    live: list[Sequence], counts: dict[str, TenantCounts], output_tokens: dict[str, int]
) -> dict[str, TenantStats]:
    waiting: dict[str, int] = {}
    for seq in live:
        if seq.status is not SequenceStatus.RUNNING:
            waiting[seq.tenant] = waiting.get(seq.tenant, 0) + 1
        output_tokens[seq.tenant] = output_tokens.get(seq.tenant, 0) + len(seq.tokens) - seq.num_charged
    none, counted = TenantCounts(), [each.name for each in fields(TenantCounts)]
    stats = {}
    for tenant in {**counts, **output_tokens, **waiting}:
        count = counts.get(tenant, none)
        stats[tenant] = TenantStats(
            **{name: getattr(count, name) for name in counted},
            generation_tokens=output_tokens.get(tenant, 0),
            waiting=waiting.get(tenant, 0),
        )
    return stats
