"""The engine of one group: requests in, plans to the ranks, results back, deltas and ends out.

Owned by one thread (engine_loop.py), which calls add_request, abort and turn; everything else hangs below it.
Torch-free, Ray-free, and without transport: ranks are behind Executor, gateways behind OutputSink.
No content of a request ends the engine; GroupLost from the executor does.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from tandem.configs.schema import EngineSettings, SchedulerSettings
from tandem.workers.engine.admission import Deadlines, ModelFacts, QueueLimits, check_request
from tandem.workers.engine.base.arrivals import Arrivals, closing_delta, end_of
from tandem.workers.engine.base.blockers import Blocker
from tandem.workers.engine.base.drafting import Drafting
from tandem.workers.engine.base.expert_reports import ExpertReports
from tandem.workers.engine.base.sequence import RequestState, Sequence, Status
from tandem.workers.engine.base.stats import Collector, EngineStats, TenantCounts, engine_stats
from tandem.workers.engine.blocks.block_manager import BlockManager
from tandem.workers.engine.chunk_limiter import ChunkLimiter, NoChunkLimiter, StepChunkLimiter
from tandem.workers.engine.executor import Executor, ExecutorReady
from tandem.workers.engine.first_blocks import check_reservations
from tandem.workers.engine.in_flight_step import InFlightStep
from tandem.workers.engine.results import ResultApplier
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.engine.step_log import StepLog
from tandem.workers.engine.transfers.copy_costs import CopyCosts
from tandem.workers.engine.transfers.kv_offload import KVOffload
from tandem.workers.engine.transfers.transfer_manager import TransferManager
from tandem.workers.engine.waiting.adapter_cache import AdapterCache
from tandem.workers.engine.waiting.batching_policy import batching_policy
from tandem.workers.engine.waiting.grammar_cache import GrammarCache
from tandem.workers.engine.waiting.max_loras import MaxLorasGate
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue
from tandem.workers.messages.errors import ContextLengthExceeded, QueueFull, RequestRefused
from tandem.workers.messages.request import (
    DEFAULT_TENANT,
    Abort,
    AdapterRef,
    Ended,
    FinishReason,
    GenerationRequest,
    Loss,
    TokenDelta,
)
from tandem.workers.messages.step import ExpertTokens, StepResult
from tandem.workers.messages.transfer import TransferResult

__all__ = ["Engine", "ModelFacts", "OutputSink"]

FLUSH_POLL_S = 0.05
ADAPTER_WAIT_S = 0.005
"""The longest wait while only adapters move: their sources may be slow, and requests should not wait for them."""
TENANT_IDLE_S = 600.0
"""A tenant without requests is forgotten after that, and its counts begin again when it is back."""


class OutputSink(Protocol):
    """Receiver of tokens and ends; called from the engine's thread."""

    def deltas(self, deltas: list[TokenDelta]) -> None:
        """Once per applied step: all deltas of that step."""
        ...

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        """Exactly once per accepted request, after its last delta."""
        ...


class Engine:
    """Continuous batching over one Executor. `depth` plans may be in flight: one; two when plans are made before the
    tokens of the last step are known (async scheduling); as many as there are stages with pipeline parallelism.

    on_begun(request, cached tokens) is called when a request has got its first row: its prompt is billed from then on.
    """

    def __init__(
        self,
        settings: EngineSettings,
        facts: ModelFacts,
        executor: Executor,
        ready: ExecutorReady,
        sink: OutputSink,
        clock: Callable[[], float] = time.monotonic,
        on_begun: Callable[[GenerationRequest, int], None] = lambda request, cached_tokens: None,
    ) -> None:
        self._facts = facts
        self._executor = executor
        self._sink = sink
        self._on_begun = on_begun
        self._clock = clock
        stages = ready.pipeline_parallel_size
        self._depth = stages if stages > 1 else 2 if settings.scheduler.async_scheduling else 1
        self._manager = BlockManager(
            ready.num_blocks,
            settings.cache.block_size,
            model_revision=facts.model_revision,
            kv_dtype=facts.kv_dtype,
            enable_prefix_caching=settings.cache.enable_prefix_caching,
            groups=facts.kv_groups,
        )
        self._chunk_limiter = _chunk_limiter(settings.scheduler, settings.cache.block_size)
        self._waiting = WaitingQueue()
        self._costs = CopyCosts(ready.block_bytes / ready.num_ranks)
        self._transfers = TransferManager(executor.transfer, ready.num_ranks, clock)
        self._offload: KVOffload | None = None
        if ready.store is not None:
            self._offload = KVOffload(self._manager, ready.store, self._transfers, self._costs, clock)
        self._adapters = self._open_adapters(settings, ready) if settings.lora.enable_lora else None
        self._grammars = GrammarCache(self._transfers, self._waiting, clock, settings.scheduler.grammar_timeout_s)
        self._block_bytes = ready.block_bytes
        self._drafting = Drafting(settings.max_drafts) if settings.max_drafts else None
        self._scheduler = Scheduler(
            settings.scheduler,
            self._manager,
            self._waiting,
            self._chunk_limiter,
            relay=stages > 1,
            depth=self._depth,
            tiers=self._offload,
            gate=MaxLorasGate(self._adapters, settings.lora.max_loras, self._waiting),
            drafting=self._drafting,
            batching=batching_policy(settings.scheduler, self._waiting, clock),
            grammars=self._grammars,
        )
        self._experts = ExpertReports(executor.count_experts, stages if facts.has_experts else 0, clock)
        self._collector = Collector()
        self._forget_at_s = 0.0
        eos = frozenset(facts.eos_token_ids)
        self._arrivals = Arrivals(self._manager, eos, self.max_len)
        self._results = ResultApplier(self._scheduler, self._manager, self._collector, eos, self._drafting)
        self._limits = QueueLimits(settings.scheduler)
        self._deadlines = Deadlines()
        self._log = StepLog(settings.step_log) if settings.step_log else None
        self._requests: dict[str, RequestState] = {}
        self._complete_at_start: list[tuple[RequestState, list[TokenDelta]]] = []
        self._in_flight_steps: deque[InFlightStep] = deque()
        self._applied: InFlightStep | None = None
        self._arrived: deque[StepResult] = deque()
        self._answers: list[TransferResult] = []

    # ---- requests ----

    def add_request(self, request: GenerationRequest) -> None:
        """Accepts a request; its tokens and its end come through the sink, from turn().

        Raises RequestRefused, ContextLengthExceeded (naming the number that would fit) or QueueFull. After these and
        any other error nothing is left of the request, and no end will come. A newer attempt of a live request
        replaces the older one.
        """
        older = self._requests.get(request.request_id)
        try:
            check_request(request, self._facts, self._manager.num_slots, has_adapters=self._adapters is not None)
            if request.adapter is not None and self._adapters is not None:
                self._adapters.check(request.adapter)
            if older is not None and older.request.attempt >= request.attempt:
                raise RequestRefused(
                    f"request {request.request_id!r} is already running", code="invalid_value", param="request_id"
                )
            state = self._arrivals.state_of(request, self._clock())
            if state.grammar is not None:
                self._grammars.check(state.grammar)
            self._limits.enter(request)
        except RequestRefused as refusal:
            self._collector.rejected[_cause(refusal)] += 1
            raise
        self._forget_idle_tenants()
        try:
            if older is not None:
                self._supersede(older)
            self._requests[request.request_id] = state
            self._deadlines.add(state)
            if state.grammar is not None:
                self._grammars.enter(state)
            self._start(state)
        except Exception:
            self._discard(state)
            raise

    def abort(self, abort: Abort) -> None:
        """Ends a request or one choice; unknown ids, other attempts and repetitions change nothing.

        keep_positions: the gateway found a stop string; tokens from there on are not billed, the reason is "stop".
        """
        state = self._requests.get(abort.request_id)
        if state is None or state.request.attempt != abort.attempt:
            return
        was_live = state.num_live > 0
        for seq in state.sequences:
            if abort.choice is None or abort.choice == seq.choice:
                self._abort_sequence(seq, abort.keep_positions)
        if was_live and state.num_live == 0:
            self._close(state)

    def has_work(self) -> bool:
        """Whether turn() has something to do: unfinished requests, or plans whose results are due."""
        return bool(self._requests or self._in_flight_steps)

    @property
    def is_copying(self) -> bool:
        """Whether transfers of KV or adapters, or questions to the ranks, are in flight: call turn() soon, also without
        work."""
        return self._transfers.is_busy or self._experts.is_open

    @property
    def idle_s(self) -> float:
        """Seconds until turn() is needed without work and transfers; inf: never."""
        adapters_s = math.inf if self._adapters is None else self._adapters.look_again_s
        return max(0.0, min(adapters_s, self._experts.look_again_s) - self._clock())

    def flush_transfers(self, timeout_s: float) -> None:
        """Waits at most timeout_s for transfers of KV to end, so that lower tiers keep their blocks. Called before
        close(); with unfinished requests it does nothing, as turns would go on with them."""
        deadline_s = self._clock() + timeout_s
        while self._is_copying_kv and self._clock() < deadline_s and not self.has_work():
            self.turn(FLUSH_POLL_S)

    # ---- tenants and adapters, from the rest of the cluster ----

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Tenants' weights from now on, above 0; those not named have 1."""
        self._waiting.tenants.set_weights(weights)

    def drain_charges(self) -> dict[str, float]:
        """What each tenant's work here cost since the last call, in prompt tokens (fairness.py)."""
        self._scheduler.charge_running()
        return self._waiting.tenants.drain_charges()

    def merge_remote_charges(self, charges: Mapping[str, float]) -> None:
        """Adds what tenants' work cost in other groups since the last call, so that it counts once everywhere."""
        self._forget_idle_tenants()
        self._waiting.tenants.merge_remote_charges(charges)

    def set_pinned_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """Replaces the pinned adapters, which are loaded when there is room and evicted last. Without --enable-lora it
        does nothing."""
        if self._adapters is not None:
            self._adapters.set_pinned(refs)
            self._poll_adapter_moves(())

    # ---- steps ----

    def turn(self, timeout_s: float) -> bool:
        """Submits plans while fewer than `depth` are in flight, waits at most timeout_s for one answer of the ranks,
        applies it. Also called without work, for transfers.

        Returns whether anything was submitted, applied or ended; False means: nothing to do, or the ranks are busy.
        """
        progress = self._end_early() | self._take_transfers()
        started_s = self._clock()
        while len(self._in_flight_steps) < self._depth and (scheduled := self._scheduler.schedule()) is not None:
            step, plan = scheduled
            self._in_flight_steps.append(step)
            self._executor.submit(plan)
            self._experts.note_step()
            self._count_plan(step, started_s)
            if self._log is not None:
                self._log.write(plan)
            progress = True
        self._experts.poll()
        submitted_s = self._clock()
        self._collector.schedule_s += submitted_s - started_s
        if not self._in_flight_steps and (progress or not self.is_copying):
            return progress
        result = self._next_result(timeout_s)
        now_s = self._clock()
        self._collector.wait_s += now_s - submitted_s
        if result is None:
            return self._take_transfers() or progress
        step = self._applied = self._in_flight_steps.popleft()
        if result.failure is None:
            deltas, ended = self._results.apply(step, result, now_s)
            self._costs.observe_step(step.num_prefill_tokens, step.num_decode, result.device_s)
            num_drafts = 0
            if self._drafting is not None:
                num_drafts = sum(row.num_drafts for row in result.rows) + result.num_unguessed
                num_tokens = step.num_decode + step.num_prefill_tokens + num_drafts
                self._drafting.observe_step(num_tokens, step.num_prefill_tokens, result.device_s)
            self._chunk_limiter.observe(step.num_prefill_tokens + num_drafts, result.device_s)
            self._collector.iteration_tokens.observe(step.num_decode + step.num_prefill_tokens + num_drafts)
        else:
            deltas, ended = self._results.undo(step, result.failure)
        self._applied = None
        self._collector.device_s += result.device_s
        if deltas:
            self._sink.deltas(deltas)
        for state in ended:
            self._close(state)
        self._collector.schedule_s += self._clock() - now_s
        return True

    def close(self) -> None:
        """Closes the step log. The executor belongs to its creator."""
        if self._log is not None:
            self._log.close()

    # ---- queries ----

    def stats(self) -> EngineStats:
        """A frozen copy of all counts; O(live sequences)."""
        return engine_stats(
            self._requests.values(),
            self._manager,
            self._collector,
            self._waiting.tenants.output_tokens(),
            max_model_len=self._facts.max_model_len,
            in_flight_steps=len(self._in_flight_steps),
            preemptions=self._scheduler.num_preemptions,
            offload=None if self._offload is None else self._offload.stats(self._block_bytes),
            adapters=None if self._adapters is None else self._adapters.stats(),
            drafts=None if self._drafting is None else self._drafting.stats(),
            experts=self._experts.stats,
        )

    @property
    def max_len(self) -> int:
        """The most tokens of a sequence, prompt and output. The last one needs no KV."""
        return min(self._facts.max_model_len, self._manager.num_slots + 1)

    def losses(self) -> dict[str, Loss]:
        """What the end of the group now says of each unfinished request, by id. Suspect is each row of the step whose
        result could not be applied; else of a step that the ranks have not answered; if there is none, each row."""
        failing = list(self._in_flight_steps)[len(self._arrived) :] if self._applied is None else [self._applied]
        rows = {seq.state for step in failing for seq in step.sequences}
        if not failing:
            rows = {s for s in self._requests.values() if any(seq.status is Status.RUNNING for seq in s.sequences)}
        alone = self._scheduler.alone if failing and rows == {self._scheduler.alone} else None
        return {
            name: "alone" if state is alone else "suspect" if state in rows else "bystander"
            for name, state in self._requests.items()
        }

    def adapter_residency(self) -> dict[str, str]:
        """The nearest tier that has an adapter, "device" or "host", by digest."""
        return {} if self._adapters is None else self._adapters.residency()

    def check_invariants(self) -> None:
        """Asserts the invariants of blocks, queue and adapters over all live sequences; for tests. O(all of them)."""
        self._scheduler.check_invariants()
        self._waiting.check_invariants()
        if self._adapters is not None:
            running = (seq for state in self._requests.values() for seq in state.sequences if seq.row >= 0)
            self._adapters.check_invariants(running)
        self._grammars.check_invariants(self._requests.values())
        sequences = [seq for state in self._requests.values() for seq in state.sequences]
        check_reservations(self._manager, sequences)
        tables = (seq.table for seq in sequences)
        if self._offload is None:
            self._manager.check_invariants(tables)
            return
        self._manager.check_invariants(tables, self._offload.table_uses(), self._offload.held())
        self._offload.check_invariants(self._waiting.keys_of(Blocker.KV))

    # ---- inside ----

    def _open_adapters(self, settings: EngineSettings, ready: ExecutorReady) -> AdapterCache:
        assert ready.adapter_pages > 0, "--enable-lora, and no rank has room for adapters"
        return AdapterCache(
            settings.lora,
            ready.adapter_pages,
            self._transfers,
            self._waiting,
            lambda seq: self._scheduler.withdraw(seq),
            self._clock,
        )

    def _next_result(self, timeout_s: float) -> StepResult | None:
        """Returns the oldest result, once every rank has answered the loads that its plan awaits; None if not yet."""
        arrived, transfers = self._arrived, self._transfers
        if not arrived or transfers.is_open(self._in_flight_steps[0].awaits):
            is_soon = self._in_flight_steps or self._is_copying_kv
            self._poll(timeout_s if is_soon else min(timeout_s, ADAPTER_WAIT_S))
            if arrived and transfers.is_open(self._in_flight_steps[0].awaits):
                return None  # the answers that came before it are taken first
        return arrived.popleft() if arrived else None

    def _poll(self, timeout_s: float) -> None:
        """Waits for a message of the ranks; takes it and what else is there, up to the next result."""
        message = self._executor.poll(timeout_s)
        while isinstance(message, TransferResult | ExpertTokens):
            if isinstance(message, TransferResult):
                self._answers.append(message)
            else:
                self._experts.take(message)
            message = self._executor.poll(0.0)
        if message is not None:
            self._arrived.append(message)

    @property
    def _is_copying_kv(self) -> bool:
        return self._offload is not None and self._offload.is_busy

    def _take_transfers(self) -> bool:
        """Applies answers of ranks to transfers, and enqueues the sequences that waited for them."""
        answers, self._answers = self._answers, []
        is_copying_kv = self._is_copying_kv
        for answer in answers:
            self._transfers.take(answer)
        late = self._transfers.overdue() if self.is_copying else []
        progress = bool(answers)
        if self._adapters is not None:
            progress |= self._poll_adapter_moves(late)
        progress |= self._poll_grammars(late)
        if is_copying_kv:
            self._take_kv_transfers(late)
        return progress

    def _take_kv_transfers(self, late: list[int]) -> None:
        offload = self._offload
        assert offload is not None
        events = offload.take_events(late)
        for seq in offload.take_failed_loads():
            self._scheduler.roll_back(seq)
        for event in events:
            self._scheduler.unblock(event)

    def _poll_adapter_moves(self, late: Collection[int]) -> bool:
        """Applies the ends of adapter moves and starts new ones; returns whether that concerned any sequence."""
        assert self._adapters is not None
        events = self._adapters.advance(self._scheduler.done_step, late)
        for seq in events.ready:
            self._scheduler.enqueue(seq)
        for state, refusal in events.refused:
            self._collector.rejected["adapter"] += 1
            self._refuse(state, (refusal.status, refusal.code, refusal.param, str(refusal)))
        return any(events)

    def _poll_grammars(self, late: Collection[int]) -> bool:
        """Applies what the ranks say of grammars and orders more; returns whether that concerned any sequence."""
        events = self._grammars.advance(late)
        for seq in events.ready:
            self._scheduler.enqueue(seq)
        for state, refusal in events.refused:
            self._collector.rejected["grammar"] += 1
            self._refuse(state, (refusal.status, refusal.code, refusal.param, str(refusal)))
        return any(events)

    def _forget_idle_tenants(self) -> None:
        """Drops counts and counters of tenants that had nothing here for TENANT_IDLE_S, and at most twice that, and are
        not known: they have no weight, and are not the one of requests without a tenant."""
        now_s = self._clock()
        if now_s < self._forget_at_s:
            return
        self._forget_at_s = now_s + TENANT_IDLE_S
        busy = {DEFAULT_TENANT, *(state.request.tenant for state in self._requests.values())}
        for tenant in self._waiting.tenants.forget_idle(busy):
            self._collector.tenants.pop(tenant, None)

    def _supersede(self, older: RequestState) -> None:
        """Ends an older attempt of a request, which the sender of the newer one has given up."""
        self.abort(Abort(request_id=older.request.request_id, attempt=older.request.attempt))
        if older.request.request_id in self._requests:
            self._close(older)

    def _discard(self, state: RequestState) -> None:
        """Removes a request that could not be taken in, however far it came. It has no end."""
        for seq in state.sequences:
            self._scheduler.finish(seq)
        state.num_live = 0  # its deadline finds nobody
        if self._requests.get(state.request.request_id) is state:
            del self._requests[state.request.request_id]
        self._limits.leave(state.request)
        self._grammars.leave(state)  # it is no user of its adapter yet, as it has had no row

    def _start(self, state: RequestState) -> None:
        """Ends choices that were complete when they were resumed; queues the first of the others."""
        deltas: list[TokenDelta] = []
        for seq in state.sequences:
            reason = end_of(seq)
            if reason is not None:
                seq.status, seq.finish_reason = Status.FINISHED, reason
                self._collector.finished[reason] += 1
                state.num_live -= 1
                deltas.append(closing_delta(seq, reason))
        live = [seq for seq in state.sequences if seq.status is not Status.FINISHED]
        for seq in live[1:]:
            self._waiting.block(seq, Blocker.FORK, state)
        for seq in live[:1]:
            self._scheduler.enqueue(seq)
        if deltas:
            self._complete_at_start.append((state, deltas))

    def _end_early(self) -> bool:
        """Ends requests without a step: choices that were complete when they were resumed, and passed deadlines."""
        expired = self._deadlines.pop_expired(self._clock())
        complete, self._complete_at_start = self._complete_at_start, []
        for state, deltas in complete:
            if self._requests.get(state.request.request_id) is state:
                self._sink.deltas(deltas)
                if state.num_live == 0:
                    self._close(state)
        for state in expired:
            self._collector.rejected["deadline"] += 1
            message = f"the request waited {state.request.deadline_s} s without being served"
            self._refuse(state, (503, "service_unavailable", None, message))
        return bool(complete or expired)

    def _refuse(self, state: RequestState, refused: tuple[int, str, str | None, str]) -> None:
        """Ends an accepted request that never ran."""
        for seq in state.sequences:
            self._abort_sequence(seq, None)
        self._close(state, refused)

    def _abort_sequence(self, seq: Sequence, keep_positions: int | None) -> None:
        produced = seq.num_billed
        if keep_positions is not None and keep_positions < produced:
            seq.kept = max(0, keep_positions)
            self._collector.wasted_tokens += produced - seq.kept
        reason: FinishReason = "abort" if keep_positions is None else "stop"
        if seq.status is not Status.FINISHED:
            self._results.finish(seq, reason)
        elif keep_positions is not None and keep_positions < produced:
            seq.finish_reason = reason

    def _close(self, state: RequestState, refused: tuple[int, str, str | None, str] | None = None) -> None:
        """The one end of an accepted request."""
        del self._requests[state.request.request_id]
        if not state.admitted:
            self._limits.leave(state.request)
        self._grammars.leave(state)
        if self._adapters is not None:
            self._adapters.leave(state)
        self._collector.e2e_latency_s.observe(self._clock() - state.arrival_s)
        self._sink.ended(state.ended(refused), state.request)

    def _count_plan(self, step: InFlightStep, now_s: float) -> None:
        collector = self._collector
        collector.steps += 1
        for seq, num_cached in step.admitted:
            state = seq.state
            if not state.admitted:
                state.admitted = True
                state.cached_tokens = min(num_cached, seq.prompt_len)
                self._limits.leave(state.request)
                self._on_begun(state.request, state.cached_tokens)
                if state.request.begun:
                    continue  # an earlier group has counted it
                collector.queue_time_s.observe(now_s - state.arrival_s)
                collector.prompt_tokens += seq.prompt_len
                collector.prefix_cache_queries += len(seq.tokens)
                collector.prefix_cache_hits += num_cached
                tenant = collector.tenants.setdefault(seq.tenant, TenantCounts())
                tenant.prompt_tokens += seq.prompt_len
                tenant.queue_s += now_s - state.arrival_s
                tenant.queued_requests += 1


def _chunk_limiter(settings: SchedulerSettings, block_size: int) -> ChunkLimiter:
    if settings.max_itl_ms is None:
        return NoChunkLimiter(settings.max_num_batched_tokens)
    return StepChunkLimiter(settings.max_itl_ms / 1000, block_size, settings.max_num_batched_tokens)


def _cause(refusal: RequestRefused) -> str:
    if isinstance(refusal, QueueFull):
        return "queue_full"
    return "context_length" if isinstance(refusal, ContextLengthExceeded) else "invalid"
