"""The engine of one group: requests in, plans to the ranks, results back, deltas and ends out.

Owned by one thread (engine_loop.py), which calls add_request, abort and turn; everything else hangs below it.
Torch-free, Ray-free, and without transport: ranks are behind Executor, gateways behind OutputSink. build_engine.py
puts it together. No content of a request ends the engine; GroupLost from the executor does. Next: scheduler.py, which
makes the plans.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.base.expert_reports import ExpertReports
from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.sequence import SequenceStatus
from tandem.workers.engine.base.stats import Collector, EngineStats, engine_stats
from tandem.workers.engine.base.step_observer import StepObserver
from tandem.workers.engine.blocks.block_manager import BlockManager
from tandem.workers.engine.blocks.group_kv import GroupKv
from tandem.workers.engine.drafting.drafting import Drafting
from tandem.workers.engine.executor import Executor, ExecutorReady
from tandem.workers.engine.live_requests import LiveRequests, OutputSink
from tandem.workers.engine.rank_answers import RankAnswers
from tandem.workers.engine.results import ResultApplier
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.engine.waiting.grammar_cache import GrammarCache
from tandem.workers.messages.request import Abort, AdapterRef, GenerationRequest, Loss
from tandem.workers.messages.step import StepResult

if TYPE_CHECKING:  # of features that may be off
    from tandem.workers.engine.adapters.adapter_cache import AdapterCache
    from tandem.workers.engine.observers.step_log import StepLog
    from tandem.workers.engine.transfers.kv_offload import KVOffload

FLUSH_POLL_S = 0.05


@dataclass(eq=False, kw_only=True)
class Engine:
    """Continuous batching over one Executor. `depth` plans may be in flight: one; two when plans are made before the
    tokens of the last step are known (async scheduling); as many as there are stages with pipeline parallelism.

    Its parts are public for tests and benchmarks; build_engine.py makes them. None: a feature that is off.
    """

    facts: ModelFacts
    ready: ExecutorReady
    executor: Executor
    sink: OutputSink
    depth: int
    clock: Callable[[], float]
    manager: BlockManager
    scheduler: Scheduler
    results: ResultApplier
    requests: LiveRequests
    answers: RankAnswers
    grammars: GrammarCache
    experts: ExpertReports | None
    collector: Collector
    observers: tuple[StepObserver, ...]
    offload: "KVOffload | None"
    adapters: "AdapterCache | None"
    drafting: Drafting | None
    step_log: "StepLog | None"
    kv: GroupKv | None = None
    _in_flight_steps: deque[InFlightStep] = field(default_factory=deque, init=False)
    _applying: InFlightStep | None = field(default=None, init=False)

    # ---- requests ----

    def add_request(self, request: GenerationRequest) -> None:
        """Accepts a request; its tokens and its end come through the sink, from turn().

        Raises RequestRefused, ContextLengthExceeded (naming the number that would fit) or QueueFull. After these and
        any other error nothing is left of the request, and no end will come. A newer attempt of a live request
        replaces the older one.
        """
        self.requests.add(request)

    def abort(self, abort: Abort) -> None:
        """Ends a request or one choice; unknown ids, other attempts and repetitions change nothing.

        keep_positions: the gateway found a stop string; tokens from there on are not billed, the reason is "stop".
        """
        self.requests.abort(abort)

    def has_work(self) -> bool:
        """Returns whether turn() has something to do: unfinished requests, or plans whose results are due."""
        return bool(self.requests or self._in_flight_steps)

    @property
    def is_copying(self) -> bool:
        """True while transfers of KV or adapters, or questions to the ranks, are in flight: call turn() soon, also
        without work."""
        return self.answers.is_copying

    @property
    def idle_s(self) -> float:
        """Seconds until turn() is needed without work and transfers; inf: never."""
        return max(0.0, self.answers.look_again_s - self.clock())

    def flush_transfers(self, timeout_s: float) -> None:
        """Waits at most timeout_s for transfers of KV to end, so that lower tiers keep their blocks. Called before
        close(); with unfinished requests it does nothing, as turns would go on with them."""
        deadline_s = self.clock() + timeout_s
        while self.answers.is_copying_kv and self.clock() < deadline_s and not self.has_work():
            self.turn(FLUSH_POLL_S)

    def reset_prefix_cache(self) -> bool:
        """Forgets the KV of all tiers that no request uses, so that no later prompt finds it. Returns whether nothing
        is left to be found."""
        is_empty = self.manager.pool.forget_unused()
        return is_empty if self.offload is None else self.offload.forget_all() and is_empty

    # ---- tenants and adapters, from the rest of the cluster ----

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Sets tenants' weights from now on, above 0; those not named have 1."""
        self.scheduler.waiting.tenants.set_weights(weights)

    def drain_charges(self) -> dict[str, float]:
        """Returns the cost of each tenant's work here since the last call, in prompt tokens (fairness.py)."""
        self.scheduler.charge_running()
        return self.scheduler.waiting.tenants.drain_charges()

    def merge_remote_charges(self, charges: Mapping[str, float]) -> None:
        """Adds what tenants' work cost in other groups since the last call, so that it counts once everywhere."""
        self.requests.forget_idle_tenants()
        self.scheduler.waiting.tenants.merge_remote_charges(charges)

    def set_pinned_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """Replaces the pinned adapters, which are loaded when there is room and evicted last. Without --enable-lora it
        does nothing."""
        if self.adapters is not None:
            self.adapters.set_pinned(refs)
            self.answers.advance(self.adapters)

    # ---- steps ----

    def turn(self, timeout_s: float) -> bool:
        """Submits plans while fewer than `depth` are in flight, waits at most timeout_s for one answer of the ranks,
        applies it. Also called without work, for transfers.

        Returns whether anything was submitted, applied or ended; False means: nothing to do, or the ranks are busy.
        """
        progress = self.requests.end_early() | self.answers.apply_transfers()
        began_s = self.clock()
        progress |= self._submit_plans(began_s)
        submitted_s = self.clock()
        self.collector.schedule_s += submitted_s - began_s
        in_flight = self._in_flight_steps
        if not in_flight and (progress or not self.is_copying):
            return progress
        result = self.answers.next_result(in_flight[0] if in_flight else None, timeout_s)
        now_s = self.clock()
        self.collector.wait_s += now_s - submitted_s
        if result is None:
            return self.answers.apply_transfers() or progress
        self._apply(in_flight.popleft(), result, now_s)
        self.collector.schedule_s += self.clock() - now_s
        return True

    def _submit_plans(self, now_s: float) -> bool:
        """Returns whether there was work for a plan."""
        in_flight, submitted = self._in_flight_steps, False
        while len(in_flight) < self.depth and (scheduled := self.scheduler.schedule()) is not None:
            step, plan = scheduled
            in_flight.append(step)
            self.executor.submit(plan)
            if step.admitted:
                self.requests.begin_rows(step.admitted, now_s)
            for observer in self.observers:
                observer.submitted(step, plan)
            submitted = True
        if self.experts is not None:
            self.experts.poll()
        return submitted

    def _apply(self, step: InFlightStep, result: StepResult, now_s: float) -> None:
        self._applying = step
        if result.failure is None:
            outcome = self.results.apply(step, result, now_s)
            self.collector.launches["replayed" if result.is_replayed else "eager"] += 1
            num_drafts = step.num_computed_drafts(result)
            for observer in self.observers:
                observer.returned(step, num_drafts, result)
        else:
            outcome = self.results.fail(step, result.failure, now_s)
        self._applying = None
        self.collector.device_s += result.device_s
        if outcome.deltas:
            self.sink.deltas(outcome.deltas)
        for state in outcome.ended:
            self.requests.close(state)

    def close(self) -> None:
        """Closes the step log. The executor belongs to its creator."""
        if self.step_log is not None:
            self.step_log.close()

    # ---- queries ----

    @property
    def in_flight_steps(self) -> Sequence[InFlightStep]:
        """The plans whose results are due, in their order."""
        return self._in_flight_steps

    def stats(self) -> EngineStats:
        """Returns a frozen copy of all counts; O(live sequences)."""
        return engine_stats(
            self.requests,
            self.manager,
            self.collector,
            lambda seq: self.scheduler.waiting.blocker_of(seq) is not None,
            self.scheduler.waiting.tenants.output_tokens(),
            max_model_len=self.facts.max_model_len,
            in_flight_steps=len(self._in_flight_steps),
            preemptions=self.scheduler.num_preemptions,
            offload=None if self.offload is None else self.offload.stats(self.ready.block_bytes),
            adapters=None if self.adapters is None else self.adapters.stats(),
            drafts=None if self.drafting is None else self.drafting.stats(),
            experts=None if self.experts is None else self.experts.stats,
        )

    @property
    def max_len(self) -> int:
        """The most tokens of a sequence, prompt and output. The last one needs no KV."""
        return self.facts.max_len(self.manager.num_slots)

    def losses(self) -> dict[str, Loss]:
        """Returns what the end of the group now says of each unfinished request, by id. Suspect is each row of the step
        whose result could not be applied; else of a step that the ranks have not answered; if there is none, each
        row."""
        unanswered = list(self._in_flight_steps)[self.answers.num_results :]
        failing = unanswered if self._applying is None else [self._applying]
        rows = {seq.state for step in failing for seq in step.sequences}
        if not failing:
            rows = {s for s in self.requests if any(seq.status is SequenceStatus.RUNNING for seq in s.sequences)}
        alone = self.scheduler.alone if failing and rows == {self.scheduler.alone} else None
        return {
            state.request.request_id: "alone" if state is alone else "suspect" if state in rows else "bystander"
            for state in self.requests
        }

    def adapter_residency(self) -> dict[str, str]:
        """Returns the nearest tier that has an adapter, "device" or "host", by digest."""
        return {} if self.adapters is None else self.adapters.residency()
