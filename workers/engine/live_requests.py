"""LiveRequests: the requests that an engine has accepted, from their arrival to the one end of each.

Part of an Engine (engine.py), which calls it from its thread.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from tandem.configs.schema import SchedulerSettings
from tandem.workers.engine.admission import Deadlines, ModelFacts, QueueLimits, check_request
from tandem.workers.engine.base.arrivals import Arrivals, closing_delta, end_of
from tandem.workers.engine.base.blockers import Blocker
from tandem.workers.engine.base.sequence import RequestState, Sequence, SequenceStatus, is_idle_work
from tandem.workers.engine.base.stats import Collector, TenantCounts
from tandem.workers.engine.observers.request_course import mark, take_course
from tandem.workers.engine.results import ResultApplier
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.engine.waiting.waited import WaitedCache
from tandem.workers.messages.errors import ContextLengthExceeded, QueueFull, RequestRefused
from tandem.workers.messages.request import (
    DEFAULT_TENANT,
    Abort,
    Ended,
    FinishReason,
    GenerationRequest,
    TokenDelta,
)

TENANT_IDLE_S = 600.0
"""A tenant without requests is forgotten after that, and its counts begin again when it is back."""
Refused = tuple[int, str, str | None, str]


class OutputSink(Protocol):
    """Receiver of tokens and ends; called from the engine's thread."""

    def deltas(self, deltas: list[TokenDelta]) -> None:
        """Called once per applied step with all its deltas."""
        ...

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        """Called exactly once per accepted request, after its last delta."""
        ...


OnBegun = Callable[[GenerationRequest, int], None]


class LiveRequests:
    """Requests by id. caches: those that requests wait for. on_begun: see build_engine()."""

    def __init__(
        self,
        settings: SchedulerSettings,
        facts: ModelFacts,
        arrivals: Arrivals,
        results: ResultApplier,
        caches: tuple[WaitedCache, ...],
        sink: OutputSink,
        clock: Callable[[], float],
        on_begun: OnBegun,
    ) -> None:
        self._facts = facts
        self._arrivals = arrivals
        self._results = results
        self._scheduler: Scheduler = results.scheduler
        self.collector: Collector = results.collector
        self._caches = caches
        self._sink = sink
        self._clock = clock
        self._on_begun = on_begun
        # idle work stands behind all others, and takes none of their places in the queue
        self._limits, self._idle_limits = QueueLimits(settings), QueueLimits(settings)
        self._deadlines = Deadlines()
        self._states: dict[str, RequestState] = {}
        self._complete_at_start: list[tuple[RequestState, list[TokenDelta]]] = []
        self._forget_at_s = 0.0

    # ---- queries ----

    def __bool__(self) -> bool:
        """True if any request is unfinished."""
        return bool(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def get(self, request_id: str) -> RequestState | None:
        """Returns an unfinished request."""
        return self._states.get(request_id)

    # ---- beginnings ----

    def add(self, request: GenerationRequest) -> None:
        """Accepts a request; see Engine.add_request()."""
        older = self._states.get(request.request_id)
        try:
            state = self._check(request, older)
            self._limits_of(request).enter(request)
        except RequestRefused as refusal:
            self.collector.rejected[_cause(refusal)] += 1
            raise
        self.forget_idle_tenants()
        try:
            if older is not None:
                self._supersede(older)
            self._states[request.request_id] = state
            self._deadlines.add(state)
            for cache in self._caches:
                cache.enter(state)
            self._start(state)
        except Exception:
            self._discard(state)
            raise

    def _check(self, request: GenerationRequest, older: RequestState | None) -> RequestState:
        """Returns the state of a request that can be served here. RequestRefused for another one."""
        check_request(request, self._facts, self._arrivals.num_slots, has_adapters=self._arrivals.takes_adapters)
        if older is not None and older.request.attempt >= request.attempt:
            raise RequestRefused(
                f"request {request.request_id!r} is already running", code="invalid_value", param="request_id"
            )
        state = self._arrivals.state_of(request, self._clock())
        for cache in self._caches:
            cache.check(state)
        return state

    def _start(self, state: RequestState) -> None:
        """Ends choices that were complete when they were resumed; queues the first of the others."""
        deltas: list[TokenDelta] = []
        for seq in state.sequences:
            reason = end_of(seq)
            if reason is not None:
                seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason
                self.collector.finished[reason] += 1
                state.num_live -= 1
                deltas.append(closing_delta(seq, reason))
        live = [seq for seq in state.sequences if seq.status is not SequenceStatus.FINISHED]
        for seq in live[1:]:
            self._scheduler.waiting.block(seq, Blocker.FORK, state)
        for seq in live[:1]:
            self._scheduler.admission.enqueue(seq)
        if deltas:
            self._complete_at_start.append((state, deltas))

    def begin_rows(self, admitted: Iterable[tuple[Sequence, int]], now_s: float) -> None:
        """Notes sequences that have got their first row, and how many of their tokens were found in the prefix
        cache."""
        collector = self.collector
        for seq, num_cached in admitted:
            state = seq.state
            if state.admitted:
                continue
            state.admitted, state.first_step_s, state.first_step = True, now_s, mark(collector)
            state.cached_tokens = min(num_cached, seq.prompt_len)
            self._limits_of(state.request).leave(state.request)
            self._on_begun(state.request, state.cached_tokens)
            if state.request.begun:
                continue  # an earlier group has counted it
            collector.queue_time_s.observe(now_s - state.arrival_s)
            collector.prompt_tokens += seq.prompt_len
            if is_idle_work(seq):
                collector.idle.prompt_tokens += seq.prompt_len
            collector.cached_tokens += state.cached_tokens
            collector.prefix_cache_queries += len(seq.tokens)
            collector.prefix_cache_hits += num_cached
            tenant = collector.tenants.setdefault(seq.tenant, TenantCounts())
            tenant.prompt_tokens += seq.prompt_len
            tenant.queue_s += now_s - state.arrival_s
            tenant.queued_requests += 1

    # ---- ends ----

    def abort(self, abort: Abort) -> None:
        """Ends a request or one choice; see Engine.abort()."""
        state = self._states.get(abort.request_id)
        if state is None or state.request.attempt != abort.attempt:
            return
        was_live = state.num_live > 0
        for seq in state.sequences:
            if abort.choice is None or abort.choice == seq.choice:
                self._abort_sequence(seq, abort.keep_positions)
        if was_live and state.num_live == 0:
            self.close(state)

    def end_early(self) -> bool:
        """Ends requests without a step: choices that were complete when they were resumed, and passed deadlines.
        Returns whether there were any."""
        expired = self._deadlines.pop_expired(self._clock())
        complete, self._complete_at_start = self._complete_at_start, []
        for state, deltas in complete:
            if self._states.get(state.request.request_id) is state:
                self._sink.deltas(deltas)
                if state.num_live == 0:
                    self.close(state)
        for state in expired:
            self.collector.rejected["deadline"] += 1
            message = f"the request waited {state.request.deadline_s} s without being served"
            self._refuse(state, (503, "service_unavailable", None, message))
        return bool(complete or expired)

    def refuse(self, state: RequestState, refusal: RequestRefused, cause: str) -> None:
        """Ends an accepted request that cannot run, or after a pause not again. cause: the word for metrics."""
        self.collector.rejected[cause] += 1
        self._refuse(state, (refusal.status, refusal.code, refusal.param, str(refusal)))

    def close(self, state: RequestState, refused: Refused | None = None) -> None:
        """Ends an accepted request, all of whose choices are FINISHED. Everything that ends one comes here."""
        del self._states[state.request.request_id]
        if not state.admitted:
            self._limits_of(state.request).leave(state.request)
        for cache in self._caches:
            cache.leave(state)
        now_s = self._clock()
        self.collector.e2e_latency_s.observe(now_s - state.arrival_s)
        self.collector.requests.observe(state, now_s)
        take_course(state, self.collector, now_s)
        self._sink.ended(state.ended(refused), state.request)

    def forget_idle_tenants(self) -> None:
        """Drops counts and counters of tenants that had nothing here for TENANT_IDLE_S, and at most twice that, and are
        not known: they have no weight, and are not the one of requests without a tenant."""
        now_s = self._clock()
        if now_s < self._forget_at_s:
            return
        self._forget_at_s = now_s + TENANT_IDLE_S
        busy = {DEFAULT_TENANT, *(state.request.tenant for state in self)}
        for tenant in self._scheduler.waiting.tenants.forget_idle(busy):
            self.collector.tenants.pop(tenant, None)

    # ---- inside ----

    def _limits_of(self, request: GenerationRequest) -> QueueLimits:
        return self._idle_limits if request.is_idle_work else self._limits

    def _refuse(self, state: RequestState, refused: Refused) -> None:
        for seq in state.sequences:
            self._abort_sequence(seq, None)
        self.close(state, refused)

    def _supersede(self, older: RequestState) -> None:
        """Ends an older attempt of a request, which the sender of the newer one has given up."""
        self.abort(Abort(request_id=older.request.request_id, attempt=older.request.attempt))
        if older.request.request_id in self._states:
            self.close(older)

    def _discard(self, state: RequestState) -> None:
        """Removes a request that could not be taken in, however far it came. It has no end."""
        for seq in state.sequences:
            self._scheduler.finish(seq)
        state.num_live = 0  # its deadline finds nobody
        if self._states.get(state.request.request_id) is state:
            del self._states[state.request.request_id]
        self._limits_of(state.request).leave(state.request)
        for cache in self._caches:
            cache.leave(state)

    def _abort_sequence(self, seq: Sequence, keep_positions: int | None) -> None:
        produced = seq.num_billed
        if keep_positions is not None and keep_positions < produced:
            seq.kept = max(0, keep_positions)
            self.collector.wasted_tokens += produced - seq.kept
        reason: FinishReason = "abort" if keep_positions is None else "stop"
        if seq.status is not SequenceStatus.FINISHED:
            self._results.finish(seq, reason)
        elif keep_positions is not None and keep_positions < produced:
            seq.finish_reason = reason


def _cause(refusal: RequestRefused) -> str:
    if isinstance(refusal, QueueFull):
        return "queue_full"
    return "context_length" if isinstance(refusal, ContextLengthExceeded) else "invalid"
