"""RankAnswers: what the ranks say: results of steps for the engine, and answers for who asked for more than a step.

Beside the steps ranks copy KV, load adapters, compile grammars and count experts. Their answers are applied between two
steps, and the sequences that waited for them are enqueued. Part of an Engine (engine.py).
"""

from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING

from tandem.workers.engine.base.expert_reports import ExpertReports
from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.executor import Executor
from tandem.workers.engine.live_requests import LiveRequests
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.engine.transfers.transfer_manager import TransferManager
from tandem.workers.engine.waiting.waited import NO_EVENTS, WaitedCache
from tandem.workers.messages.step import ExpertTokens, StepResult
from tandem.workers.messages.transfer import TransferResult

if TYPE_CHECKING:
    from tandem.workers.engine.transfers.kv_offload import KVOffload

CACHE_WAIT_S = 0.005
"""The longest wait while only adapters or grammars move: their sources may be slow, and requests should not wait."""


class RankAnswers:
    """Messages of one executor's ranks. offload: the tiers below the device; experts: None of a model without."""

    def __init__(
        self,
        executor: Executor,
        transfers: TransferManager,
        scheduler: Scheduler,
        requests: LiveRequests,
        caches: tuple[WaitedCache, ...],
        offload: "KVOffload | None",
        experts: ExpertReports | None,
    ) -> None:
        self._executor = executor
        self._transfers = transfers
        self._scheduler = scheduler
        self._requests = requests
        self._caches = caches
        self._offload = offload
        self._experts = experts
        self._results: deque[StepResult] = deque()
        self._answers: list[TransferResult] = []

    # ---- queries ----

    @property
    def results(self) -> Collection[StepResult]:
        """The results that have come and are not taken, in their order."""
        return self._results

    @property
    def num_results(self) -> int:
        """Results that have come and are not taken."""
        return len(self._results)

    @property
    def is_copying(self) -> bool:
        """True while transfers of KV or adapters, or questions to the ranks, are in flight."""
        return self._transfers.is_busy or (self._experts is not None and self._experts.is_open)

    @property
    def is_copying_kv(self) -> bool:
        """True while KV is copied between tiers."""
        return self._offload is not None and self._offload.is_busy

    @property
    def look_again_s(self) -> float:
        """The moment of the clock at which there is something to do without an answer; inf: never."""
        caches_s = min(cache.look_again_s for cache in self._caches)
        return caches_s if self._experts is None else min(self._experts.look_again_s, caches_s)

    # ---- results of steps ----

    def next_result(self, oldest: InFlightStep | None, timeout_s: float) -> StepResult | None:
        """Returns the result of the oldest step in flight, once every rank has answered the loads that its plan awaits;
        None if not yet. Without a step it waits for other answers alone."""
        results, awaits = self._results, () if oldest is None else oldest.awaits
        if not results or self._transfers.is_open(awaits):
            is_soon = oldest is not None or self.is_copying_kv
            self._poll(timeout_s if is_soon else min(timeout_s, CACHE_WAIT_S))
            if results and self._transfers.is_open(awaits):
                return None  # the answers that came before it are taken first
        return results.popleft() if results else None

    def _poll(self, timeout_s: float) -> None:
        """Waits for a message of the ranks; takes it and what else is there, up to the next result."""
        message = self._executor.poll(timeout_s)
        while isinstance(message, TransferResult | ExpertTokens):
            if isinstance(message, TransferResult):
                self._answers.append(message)
            elif self._experts is not None:
                self._experts.take(message)
            message = self._executor.poll(0.0)
        if message is not None:
            self._results.append(message)

    # ---- other answers ----

    def apply_transfers(self) -> bool:
        """Applies answers of ranks to transfers, and enqueues the sequences that waited for them. Returns whether there
        were any, or a request or sequence was concerned."""
        answers, self._answers = self._answers, []
        is_copying_kv = self.is_copying_kv
        for answer in answers:
            self._transfers.take(answer)
        late = self._transfers.overdue() if self.is_copying else []
        progress = bool(answers)
        for cache in self._caches:
            progress |= self.advance(cache, late)
        if self._offload is not None and is_copying_kv:
            self._take_kv(self._offload, late)
        return progress

    def advance(self, cache: WaitedCache, late: Collection[int] = ()) -> bool:
        """Applies the ends of a cache's moves and starts new ones; returns whether that let a sequence go on or ended a
        request."""
        events = cache.advance(self._scheduler.done_step, late)
        if events is NO_EVENTS:
            return False
        for seq in events.withdrawn:
            self._scheduler.admission.withdraw(seq)
        for seq in events.ready:
            self._scheduler.admission.enqueue(seq)
        for state, refusal in events.refused:
            self._requests.refuse(state, refusal, cache.cause)
        return bool(events.ready or events.refused)

    def _take_kv(self, offload: "KVOffload", late: list[int]) -> None:
        events = offload.take_events(late)
        for seq in offload.take_failed_loads():
            self._scheduler.roll_back(seq)
        for event in events:
            self._scheduler.admission.unblock(event)
