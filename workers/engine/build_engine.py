"""Builds an engine: the one place that knows which parts there are and who holds whom.

A new rule of admission is a line in _rules(), a new observer of steps one in _observers(), a new cache that requests
wait for one where `caches` is made.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.configs.schema import EngineSettings
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.base.arrivals import Arrivals
from tandem.workers.engine.base.expert_reports import ExpertReports
from tandem.workers.engine.base.request_figures import RequestFigures
from tandem.workers.engine.base.stats import Collector
from tandem.workers.engine.base.step_observer import StepObserver
from tandem.workers.engine.blocks.block_manager import BlockManager
from tandem.workers.engine.blocks.group_kv import GroupKv
from tandem.workers.engine.blocks.kv_journal import KvJournal
from tandem.workers.engine.drafting.drafting import Drafting
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.executor import Executor, ExecutorReady
from tandem.workers.engine.live_requests import LiveRequests, OnBegun, OutputSink
from tandem.workers.engine.observers.chunk_limiter import ChunkLimiter, StepChunkLimiter
from tandem.workers.engine.observers.step_counts import StepCounts
from tandem.workers.engine.rank_answers import RankAnswers
from tandem.workers.engine.results import ResultApplier
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.engine.step_turns import StepTurns
from tandem.workers.engine.transfers.transfer_manager import TransferManager
from tandem.workers.engine.waiting.admission_rule import AdmissionRule
from tandem.workers.engine.waiting.grammar_cache import GrammarCache
from tandem.workers.engine.waiting.max_loras import MaxLoras
from tandem.workers.engine.waiting.probation import Probation
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue
from tandem.workers.messages.kv_events import KvFacts, index_blocks

if TYPE_CHECKING:
    from tandem.offload.kv.tiered_store import TieredStore
    from tandem.workers.engine.adapters.adapter_cache import AdapterCache
    from tandem.workers.engine.observers.step_log import StepLog
    from tandem.workers.engine.transfers.copy_costs import CopyCosts
    from tandem.workers.engine.transfers.kv_offload import KVOffload


def build_engine(
    settings: EngineSettings,
    facts: ModelFacts,
    executor: Executor,
    ready: ExecutorReady,
    sink: OutputSink,
    clock: Callable[[], float] = time.monotonic,
    on_begun: OnBegun = lambda request, cached_tokens: None,
) -> Engine:
    """Returns an engine over ranks that are ready.

    on_begun(request, cached tokens) is called when a request has got its first row: its prompt is billed from then on.
    """
    journal = _journal(settings, facts)
    manager, collector = _block_manager(settings, facts, ready, journal), _collector(facts, ready)
    waiting = WaitingQueue(clock=clock)
    transfers = TransferManager(executor.transfer, ready.num_ranks, clock)
    costs, offload = _offload(ready, manager, transfers, clock)
    adapters = _adapter_cache(settings, ready, transfers, waiting, clock)
    grammars = GrammarCache(transfers, waiting, clock, settings.scheduler.grammar_timeout_s)
    drafting = Drafting(settings.max_drafts) if settings.max_drafts else None
    chunk_limiter, step_log = _chunk_limiter(settings), _step_log(settings, clock)
    stages = ready.pipeline_parallel_size
    experts = ExpertReports(executor.count_experts, stages, clock) if facts.has_experts else None
    caches = (grammars,) if adapters is None else (adapters, grammars)
    scheduler = _scheduler(
        settings, manager, waiting, clock, chunk_limiter, adapters, grammars, offload, drafting, relay=stages > 1
    )
    eos = frozenset(facts.eos_token_ids)
    results = ResultApplier(scheduler, manager, collector, eos, drafting)
    arrivals = Arrivals(manager, eos, facts.max_len(manager.num_slots), takes_adapters=adapters is not None)
    requests = LiveRequests(settings.scheduler, facts, arrivals, results, caches, sink, clock, on_begun)
    return Engine(
        facts=facts,
        ready=ready,
        executor=executor,
        sink=sink,
        depth=settings.steps_in_flight,
        clock=clock,
        manager=manager,
        scheduler=scheduler,
        results=results,
        requests=requests,
        answers=RankAnswers(executor, transfers, scheduler, requests, caches, offload, experts),
        grammars=grammars,
        experts=experts,
        collector=collector,
        observers=_observers(StepCounts(collector), costs, experts, drafting, chunk_limiter, step_log),
        offload=offload,
        adapters=adapters,
        drafting=drafting,
        step_log=step_log,
        kv=None if journal is None else _group_kv(settings, facts, journal, manager, ready.store),
    )


def _scheduler(
    settings: EngineSettings,
    manager: BlockManager,
    waiting: WaitingQueue,
    clock: Callable[[], float],
    chunk_limiter: ChunkLimiter,
    adapters: "AdapterCache | None",
    grammars: GrammarCache,
    offload: "KVOffload | None",
    drafting: Drafting | None,
    *,
    relay: bool,
) -> Scheduler:
    turns = None if adapters is None else MaxLoras(settings.lora.max_loras, waiting)
    probation = Probation(waiting, settings.max_drafts)
    return Scheduler(
        settings.scheduler,
        manager,
        waiting,
        chunk_limiter,
        _rules(settings, waiting, clock, adapters, grammars, probation, turns),
        probation,
        StepTurns(probation, turns),
        relay=relay,
        depth=settings.steps_in_flight,
        tiers=offload,
        drafting=drafting,
    )


def _offload(
    ready: ExecutorReady, manager: BlockManager, transfers: TransferManager, clock: Callable[[], float]
) -> "tuple[CopyCosts, KVOffload] | tuple[None, None]":
    """Returns the costs of copies and what moves blocks between tiers, where there are tiers."""
    if ready.store is None:
        return None, None
    from tandem.workers.engine.transfers.copy_costs import CopyCosts
    from tandem.workers.engine.transfers.kv_offload import KVOffload

    costs = CopyCosts(ready.block_bytes / ready.num_ranks)
    return costs, KVOffload(manager, ready.store, transfers, costs, clock)


def _adapter_cache(
    settings: EngineSettings,
    ready: ExecutorReady,
    transfers: TransferManager,
    waiting: WaitingQueue,
    clock: Callable[[], float],
) -> "AdapterCache | None":
    if not settings.lora.enable_lora:
        return None
    from tandem.workers.engine.adapters.adapter_cache import AdapterCache

    assert ready.adapter_pages > 0, "--enable-lora, and no rank has room for adapters"
    return AdapterCache(settings.lora, ready.adapter_pages, transfers, waiting, clock)


def _step_log(settings: EngineSettings, clock: Callable[[], float]) -> "StepLog | None":
    if not settings.step_log:
        return None
    from tandem.workers.engine.observers.step_log import StepLog

    return StepLog(settings.step_log, clock)


def _rules(
    settings: EngineSettings,
    waiting: WaitingQueue,
    clock: Callable[[], float],
    adapters: "AdapterCache | None",
    grammars: GrammarCache,
    probation: Probation,
    turns: MaxLoras | None,
) -> list[AdmissionRule]:
    """Returns the rules of admission, in the order in which a sequence is asked about."""
    rules: list[AdmissionRule] = [grammars, probation] if adapters is None else [adapters, grammars, probation]
    if settings.scheduler.batching_policy != "continuous":
        from tandem.workers.engine.waiting.batching_policy import batching_rule

        rules.append(batching_rule(settings.scheduler, waiting, clock))
    return rules if turns is None else [*rules, turns]


def _observers(*parts: object) -> tuple[StepObserver, ...]:
    """Returns those of these parts that watch steps."""
    return tuple(part for part in parts if isinstance(part, StepObserver))


def _journal(settings: EngineSettings, facts: ModelFacts) -> KvJournal | None:
    """Returns the journal of what gateways are told. None where they are told nothing, or no key tells what a prompt
    finds: without prefix caching, or where all layers have windows."""
    cache, groups = settings.cache, facts.kv_groups
    if not (cache.kv_events and cache.enable_prefix_caching) or (groups is not None and None not in groups.windows):
        return None
    return KvJournal(index_blocks(cache.block_size))


def _group_kv(
    settings: EngineSettings,
    facts: ModelFacts,
    journal: KvJournal,
    manager: BlockManager,
    store: "TieredStore | None",
) -> GroupKv:
    if store is not None:
        store.watch(journal.changed)
    told = KvFacts("", facts.model_revision, facts.kv_dtype, settings.cache.block_size, journal.index_blocks)
    return GroupKv(told, journal, manager.pool, store)


def _block_manager(
    settings: EngineSettings, facts: ModelFacts, ready: ExecutorReady, journal: KvJournal | None
) -> BlockManager:
    return BlockManager(
        ready.num_blocks,
        settings.cache.block_size,
        model_revision=facts.model_revision,
        kv_dtype=facts.kv_dtype,
        enable_prefix_caching=settings.cache.enable_prefix_caching,
        groups=facts.kv_groups,
        journal=journal,
    )


def _collector(facts: ModelFacts, ready: ExecutorReady) -> Collector:
    collector = Collector(requests=RequestFigures.for_contexts(facts.max_model_len))
    if ready.captures:
        collector.captures["made"] = min(one.num_captures for one in ready.captures)
        collector.captures["failed"] = max(len(one.failures) for one in ready.captures)
    return collector


def _chunk_limiter(settings: EngineSettings) -> ChunkLimiter:
    limits = settings.scheduler
    if limits.max_itl_ms is None:
        return ChunkLimiter(limits.max_num_batched_tokens)
    return StepChunkLimiter(limits.max_itl_ms / 1000, settings.cache.block_size, limits.max_num_batched_tokens)
