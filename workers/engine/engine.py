"""The engine of one group: requests in, plans to the ranks, results back, deltas and ends out.

Owned by one thread of the coordinator (or of an offline run), which calls add_request, abort and step; everything else
hangs below it. Torch-free, Ray-free, and blind to transport: ranks are behind Executor, gateways behind OutputSink.
Nothing that a request contains ends the engine; GroupLost from the executor does.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from configs.schema import EngineSettings, SchedulerSettings
from workers.engine.adapter_turns import AdapterTurns
from workers.engine.adapters import AdapterPool
from workers.engine.admission import Deadlines, ModelFacts, QueueLimits, check_request
from workers.engine.arrivals import Arrivals, closing_delta, end_of
from workers.engine.block_manager import BlockManager
from workers.engine.copy_costs import CopyCosts
from workers.engine.executor import Executor, ExecutorReady
from workers.engine.fairness import FairQueue
from workers.engine.kv_offload import KVOffload
from workers.engine.pacing import NoPacer, Pacer, StepPacer
from workers.engine.reporting import engine_stats
from workers.engine.results import ResultApplier
from workers.engine.scheduler import Flight, Scheduler
from workers.engine.sequence import RequestState, Sequence, Status
from workers.engine.stats import Collector, EngineStats, TenantCounts
from workers.engine.step_log import StepLog
from workers.errors import ContextLengthExceeded, QueueFull, RequestRefused
from workers.messages import (
    Abort,
    AdapterRef,
    Ended,
    FinishReason,
    GenerationRequest,
    StepResult,
    TokenDelta,
    TransferDone,
)

__all__ = ["Engine", "ModelFacts", "OutputSink"]

RESULT_WAIT_S = 0.05
"""How long step() waits for a result before its caller gets to take in requests and aborts again."""
ADAPTER_WAIT_S = 0.005
"""The same while only adapters are on their way: their sources may be far, and others should not wait for them."""


class OutputSink(Protocol):
    """Where tokens and ends go; called from the engine's thread."""

    def deltas(self, deltas: list[TokenDelta]) -> None:
        """Once per applied step: all deltas of that step."""
        ...

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        """Exactly once per accepted request, after its last delta."""
        ...


class Engine:
    """Continuous batching over one Executor. `depth` plans may be in flight: one; two when plans are made before the
    tokens of the last step are known (async scheduling); as many as there are stages with pipeline parallelism."""

    def __init__(
        self,
        settings: EngineSettings,
        facts: ModelFacts,
        executor: Executor,
        ready: ExecutorReady,
        sink: OutputSink,
        clock: Callable[[], float] = time.monotonic,
        early_loads: bool = True,
    ) -> None:
        """early_loads=False is for measuring what they are worth (scheduler.py)."""
        self._facts = facts
        self._executor = executor
        self._sink = sink
        self._clock = clock
        stages = ready.pipeline_parallel_size
        self._depth = stages if stages > 1 else 2 if settings.scheduler.async_scheduling else 1
        self._manager = BlockManager(
            ready.num_blocks,
            settings.cache.block_size,
            model_revision=facts.model_revision,
            kv_dtype=facts.kv_dtype,
            enable_prefix_caching=settings.cache.enable_prefix_caching,
        )
        self._pacer = _pacer(settings.scheduler, settings.cache.block_size)
        self._waiting = FairQueue()
        self._costs = CopyCosts(ready.block_bytes / ready.num_ranks)
        self._offload: KVOffload | None = None
        if ready.store is not None:
            send = executor.transfer
            self._offload = KVOffload(self._manager, ready.store, send, ready.num_ranks, self._costs, clock)
        self._adapters = self._open_adapters(settings, ready) if settings.lora.enable_lora else None
        self._block_bytes = ready.block_bytes
        self._scheduler = Scheduler(
            settings.scheduler,
            self._manager,
            self._waiting,
            self._pacer,
            relay=stages > 1,
            depth=self._depth,
            tiers=self._offload,
            turns=AdapterTurns(self._adapters, settings.lora.max_loras, self._waiting),
            early_loads=early_loads,
        )
        self._collector = Collector()
        eos = frozenset(facts.eos_token_ids)
        self._arrivals = Arrivals(self._manager, eos, min(facts.max_model_len, self._manager.num_slots + 1))
        self._results = ResultApplier(self._scheduler, self._manager, self._collector, eos)
        self._limits = QueueLimits(settings.scheduler)
        self._deadlines = Deadlines()
        self._log = StepLog(settings.step_log) if settings.step_log else None
        self._requests: dict[str, RequestState] = {}
        self._born_ended: list[tuple[RequestState, list[TokenDelta]]] = []
        self._flights: deque[Flight] = deque()
        self._arrived: deque[StepResult] = deque()

    # ---- requests ----

    def add_request(self, request: GenerationRequest) -> None:
        """Accepts a request; its tokens and its end come through the sink, from step().

        Raises RequestRefused, ContextLengthExceeded (naming the number that would fit) or QueueFull, and then nothing
        has changed and no end will come. A newer epoch of a live request takes the older one's place.
        """
        older = self._requests.get(request.request_id)
        try:
            check_request(request, self._facts, self._manager.num_slots, has_adapters=self._adapters is not None)
            if request.adapter is not None and self._adapters is not None:
                self._adapters.check(request.adapter)
            if older is not None and older.request.epoch >= request.epoch:
                raise RequestRefused(
                    f"request {request.request_id!r} is already running", code="invalid_value", param="request_id"
                )
            self._limits.enter(request)
        except RequestRefused as refusal:
            self._collector.rejected[_cause(refusal)] += 1
            raise
        if older is not None:
            self._supersede(older)
        state = self._arrivals.state_of(request, self._clock())
        self._requests[request.request_id] = state
        self._deadlines.add(state)
        self._start(state)

    def abort(self, abort: Abort) -> None:
        """Ends a request or one choice; unknown ids, other epochs and repetitions change nothing.

        keep_positions: the gateway found a stop string; tokens from there on are not billed, the reason is "stop".
        """
        state = self._requests.get(abort.request_id)
        if state is None or state.request.epoch != abort.epoch:
            return
        was_live = state.num_live > 0
        for seq in state.sequences:
            if abort.choice is None or abort.choice == seq.choice:
                self._abort_sequence(seq, abort.keep_positions)
        if was_live and state.num_live == 0:
            self._close(state)

    def has_work(self) -> bool:
        """Whether step() has something to do: unfinished requests, or plans whose results are due."""
        return bool(self._requests or self._flights)

    @property
    def is_copying(self) -> bool:
        """Whether KV or adapters are on their way between tiers: call tend_copies() soon, also without work."""
        adapters = self._adapters
        return self._is_copying_kv or (adapters is not None and adapters.is_busy)

    @property
    def idle_s(self) -> float:
        """How long tend_copies() can be left out without work and copies: a refused pin is tried again. Perhaps inf."""
        return math.inf if self._adapters is None else max(0.0, self._adapters.look_again_s - self._clock())

    def tend_copies(self, timeout_s: float = 0.0) -> None:
        """Without work: takes in what ranks say of their copies, waiting at most timeout_s for it; and begins copies
        whose moment has come."""
        assert not self._flights, "step() does it"
        if self._adapters is not None:
            self._tend_adapters([])
        if self.is_copying:
            self._executor.wait(timeout_s)
            self._take_transfers()

    def settle(self, timeout_s: float) -> None:
        """Before an end without work: lets copies of KV come to theirs, so that what can be kept is kept."""
        deadline_s = self._clock() + timeout_s
        while self._is_copying_kv and self._clock() < deadline_s and not self._flights:
            self.tend_copies(RESULT_WAIT_S)

    # ---- tenants and adapters, from the rest of the cluster ----

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Tenants' weights from now on, above 0; those not named have 1."""
        self._waiting.set_weights(weights)

    def take_charges(self) -> dict[str, float]:
        """What each tenant's work here cost since the last call, in prompt tokens (fairness.py)."""
        self._scheduler.charge_running()
        return self._waiting.take_charges()

    def charge_elsewhere(self, charges: Mapping[str, float]) -> None:
        """Adds what tenants' work cost in other groups since the last call, so that it counts once everywhere."""
        self._waiting.charge_elsewhere(charges)

    def set_pinned_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """These and no others: on the device when there is room, the last to be evicted. Without --enable-lora there
        are none."""
        if self._adapters is not None:
            self._adapters.set_pinned(refs)
            self._tend_adapters([])

    # ---- steps ----

    def step(self) -> bool:
        """Submits plans while fewer than `depth` are in flight, waits (bounded) for one result, applies it.

        Returns whether anything was submitted, applied or ended; False means: nothing to do, or the ranks are busy.
        """
        progress = self._end_early() | self._take_transfers()
        started_s = self._clock()
        while len(self._flights) < self._depth and (scheduled := self._scheduler.schedule()) is not None:
            flight, plan = scheduled
            self._flights.append(flight)
            self._executor.submit(plan)
            self._count_plan(flight, started_s)
            if self._log is not None:
                self._log.write(plan)
            progress = True
        submitted_s = self._clock()
        self._collector.schedule_s += submitted_s - started_s
        if not self._flights and (progress or not self.is_copying):
            return progress
        result = self._next_result()
        now_s = self._clock()
        self._collector.wait_s += now_s - submitted_s
        if result is None:
            return self._take_transfers() or progress
        flight = self._flights.popleft()
        deltas, ended = self._results.apply(flight, result, now_s)
        self._collector.device_s += result.device_s
        self._pacer.observe(flight.num_prompt_tokens, result.device_s)
        self._costs.observe_step(flight.num_prompt_tokens, flight.num_decode, result.device_s)
        if deltas:
            self._sink.deltas(deltas)
        for state in ended:
            self._close(state)
        self._collector.schedule_s += self._clock() - now_s
        return True

    def close(self) -> None:
        """Closes the step log. The executor belongs to whoever started it."""
        if self._log is not None:
            self._log.close()

    # ---- what it knows ----

    def stats(self) -> EngineStats:
        """A frozen copy of all counts; O(live sequences)."""
        return engine_stats(
            self._requests.values(),
            self._manager,
            self._collector,
            self._waiting.output_tokens(),
            in_flight_steps=len(self._flights),
            preemptions=self._scheduler.num_preemptions,
            offload=None if self._offload is None else self._offload.stats(self._block_bytes),
            adapters=None if self._adapters is None else self._adapters.stats(),
        )

    def adapter_residency(self) -> dict[str, str]:
        """The nearest tier that has an adapter, "device" or "host", by digest."""
        return {} if self._adapters is None else self._adapters.residency()

    def check_laws(self) -> None:
        """Asserts the laws of blocks, queue and adapters over all live sequences; for tests. O(blocks + sequences)."""
        self._scheduler.check_laws()
        self._waiting.check_laws()
        if self._adapters is not None:
            running = (seq for state in self._requests.values() for seq in state.sequences if seq.row >= 0)
            self._adapters.check_laws(running)
        tables = (seq.table for state in self._requests.values() for seq in state.sequences)
        if self._offload is None:
            self._manager.check_laws(tables)
            return
        self._manager.check_laws(tables, self._offload.table_uses(), self._offload.held())
        self._offload.check_laws()

    # ---- inside ----

    def _open_adapters(self, settings: EngineSettings, ready: ExecutorReady) -> AdapterPool:
        assert ready.adapter_pages > 0, "--enable-lora, and no rank has room for adapters"
        return AdapterPool(
            settings.lora,
            ready.adapter_pages,
            self._executor.transfer,
            ready.num_ranks,
            self._clock,
            turn=self._waiting.counter,
            on_swap=self._waiting.charge_swap,
        )

    def _next_result(self) -> StepResult | None:
        """The oldest result, once it is known whether the loads that its plan waited for have arrived on every rank."""
        arrived, offload = self._arrived, self._offload
        if not arrived or (offload is not None and offload.is_open(self._flights[0].awaits)):
            result = self._executor.wait(RESULT_WAIT_S if self._flights or self._is_copying_kv else ADAPTER_WAIT_S)
            if result is not None:
                arrived.append(result)
            if offload is not None and arrived and self._flights[0].awaits:
                self._take_transfers()
                if offload.is_open(self._flights[0].awaits):
                    return None
        return arrived.popleft() if arrived else None

    @property
    def _is_copying_kv(self) -> bool:
        return self._offload is not None and self._offload.is_busy

    def _take_transfers(self) -> bool:
        """Applies what ranks said of their transfers; sequences whose wait is over go on to the queue."""
        adapters = self._adapters
        if self._offload is None and adapters is None:
            return False
        messages = self._executor.transfers_done() if self.is_copying else []
        progress = bool(messages)
        if adapters is not None:
            progress |= self._tend_adapters([message for message in messages if adapters.owns(message.ticket)])
            messages = [message for message in messages if not adapters.owns(message.ticket)]
        if self._is_copying_kv:
            self._take_kv_transfers(messages)
        return progress

    def _take_kv_transfers(self, messages: list[TransferDone]) -> None:
        offload = self._offload
        assert offload is not None
        ready = [seq for message in messages for seq in offload.done(message)]
        for seq in offload.take_misled():
            self._scheduler.roll_back(seq)
        for seq in [*ready, *offload.overdue()]:
            self._scheduler.requeue(seq)

    def _tend_adapters(self, messages: list[TransferDone]) -> bool:
        """Moves adapters on; whether somebody's wait for one has changed."""
        assert self._adapters is not None
        turnover = self._adapters.tend(messages, self._scheduler.done_step)
        for seq in turnover.withdrawn:
            self._scheduler.withdraw(seq)
        for seq in turnover.ready:
            self._scheduler.requeue(seq)
        for state, refusal in turnover.refused:
            self._collector.rejected["adapter"] += 1
            self._refuse(state, (refusal.status, refusal.code, refusal.param, str(refusal)))
        return any(turnover)

    def _supersede(self, older: RequestState) -> None:
        """Ends an older epoch of a request: whoever sent the newer one has given the older one up."""
        self.abort(Abort(request_id=older.request.request_id, epoch=older.request.epoch))
        if older.request.request_id in self._requests:
            self._close(older)

    def _start(self, state: RequestState) -> None:
        """Ends the choices that another group had already brought to their end; queues the first of the others."""
        deltas: list[TokenDelta] = []
        for seq in state.sequences:
            reason = end_of(seq)
            if reason is not None:
                state.held.remove(seq)
                seq.status, seq.finish_reason = Status.FINISHED, reason
                self._collector.finished[reason] += 1
                state.num_live -= 1
                deltas.append(closing_delta(seq, reason))
        if state.held:
            self._scheduler.add(state.held.pop(0))
        if deltas:
            self._born_ended.append((state, deltas))

    def _end_early(self) -> bool:
        """Ends that need no step: choices that were complete when they came, and deadlines that passed in the queue."""
        expired = self._deadlines.pop_expired(self._clock())
        born_ended, self._born_ended = self._born_ended, []
        for state, deltas in born_ended:
            if self._requests.get(state.request.request_id) is state:
                self._sink.deltas(deltas)
                if state.num_live == 0:
                    self._close(state)
        for state in expired:
            self._collector.rejected["deadline"] += 1
            message = f"the request waited {state.request.deadline_s} s without being served"
            self._refuse(state, (503, "service_unavailable", None, message))
        return bool(born_ended or expired)

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
        if self._adapters is not None:
            self._adapters.leave(state)
        self._collector.e2e_latency.observe(self._clock() - state.arrival_s)
        self._sink.ended(state.ended(refused), state.request)

    def _count_plan(self, flight: Flight, now_s: float) -> None:
        collector = self._collector
        collector.steps += 1
        collector.iteration_tokens.observe(flight.num_decode + flight.num_prompt_tokens)
        for seq, num_cached in flight.admitted:
            state = seq.state
            if not state.admitted:
                state.admitted = True
                state.cached_tokens = min(num_cached, seq.prompt_len)
                self._limits.leave(state.request)
                collector.queue_time.observe(now_s - state.arrival_s)
                collector.prompt_tokens += seq.prompt_len
                collector.prefix_cache_queries += len(seq.tokens)
                collector.prefix_cache_hits += num_cached
                tenant = collector.tenants.setdefault(seq.tenant, TenantCounts())
                tenant.prompt_tokens += seq.prompt_len
                tenant.queue_s += now_s - state.arrival_s
                tenant.queued_requests += 1


def _pacer(settings: SchedulerSettings, block_size: int) -> Pacer:
    if settings.max_itl_ms is None:
        return NoPacer(settings.max_num_batched_tokens)
    return StepPacer(settings.max_itl_ms / 1000, block_size, settings.max_num_batched_tokens)


def _cause(refusal: RequestRefused) -> str:
    if isinstance(refusal, QueueFull):
        return "queue_full"
    return "context_length" if isinstance(refusal, ContextLengthExceeded) else "invalid"
