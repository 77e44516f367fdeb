"""One engine's EngineStats, composed from those who know the parts. Called by the engine; changes nothing."""

from collections.abc import Iterable

from workers.engine.block_manager import BlockManager
from workers.engine.sequence import RequestState, Sequence, Status
from workers.engine.stats import AdapterStats, Collector, EngineStats, OffloadStats, TenantCounts, TenantStats


def engine_stats(
    requests: Iterable[RequestState],
    manager: BlockManager,
    collector: Collector,
    output_tokens: dict[str, int],
    *,
    in_flight_steps: int,
    preemptions: int,
    offload: OffloadStats | None,
    adapters: AdapterStats | None,
) -> EngineStats:
    """A frozen copy of all counts; O(live sequences). output_tokens: charged by tenant, from the start."""
    pool = manager.pool
    live = [seq for state in requests for seq in state.sequences if seq.status is not Status.FINISHED]
    queued = [seq for seq in live if seq.status is not Status.RUNNING]
    return EngineStats(
        running=len(live) - len(queued),
        waiting=len(queued),
        waiting_tokens=sum(len(seq.tokens) for seq in queued),
        in_flight_steps=in_flight_steps,
        num_blocks=pool.num_blocks,
        block_size=manager.block_size,
        used_blocks=pool.num_used,
        cached_blocks=pool.num_cached,
        kv_usage=pool.num_used / pool.num_blocks,
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
    )


def _tenants(
    live: list[Sequence], counts: dict[str, TenantCounts], output_tokens: dict[str, int]
) -> dict[str, TenantStats]:
    waiting: dict[str, int] = {}
    for seq in live:
        if seq.status is not Status.RUNNING:
            waiting[seq.tenant] = waiting.get(seq.tenant, 0) + 1
        if seq.status is not Status.HELD:
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
