"""--batching-policy: which waiting requests may get a row beside those that run.

Continuous batching admits whenever there is room (iteration-level scheduling: Orca). Static and dynamic batching keep
requests together: a batch begins when nothing of the last one is left, and nobody joins it later. They differ in when:
static begins with whoever waits; dynamic waits until the batch is full or its oldest request has waited for a while, as
Triton's dynamic batcher. Both leave rows idle until the longest answer is done, which `make bench-batching` measures.

A request that must wait is blocked (Blocker.BATCH), so that it is in nobody's way: those of the batch that were
preempted, or waited for an adapter or KV, come back past it.
"""

from collections.abc import Callable, Iterable

from tandem.configs.schema import SchedulerSettings
from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.sequence import RequestState, Sequence
from tandem.workers.engine.waiting.admission_rule import AdmissionRule
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue

NEXT_BATCH = Awaited(Blocker.BATCH, "next")


class WholeBatches(AdmissionRule):
    """Static and dynamic batching. num_rows: the most choices of a batch. max_delay_s: a batch that is not full begins
    when its oldest request has waited for so long; 0: at once (static). clock: that of RequestState.arrival_s.

    A batch has the requests that had arrived when it began, in the order of the queue, as many as there are rows for.
    A request with more choices than there are rows is a batch by itself. Whoever finds no room before one of the batch
    has ended waits for the next.
    """

    keeps_loaded = False
    joins_running = False

    def __init__(
        self, num_rows: int, waiting: WaitingQueue, clock: Callable[[], float], max_delay_s: float = 0.0
    ) -> None:
        self._num_rows = num_rows
        self._waiting = waiting
        self._clock = clock
        self._max_delay_s = max_delay_s
        self._batch: set[RequestState] = set()
        self._num_choices = 0
        self._began_s = 0.0
        self._is_open = False

    def arrived(self) -> Iterable[Awaited]:
        """Implements AdmissionRule: NEXT_BATCH once the last batch has ended and the next one is due; it is open from
        then on."""
        if any(state.num_live for state in self._batch) or not self._is_due():
            return ()
        self._batch.clear()
        self._num_choices = 0
        self._began_s = self._clock()
        self._is_open = True
        return (NEXT_BATCH,)

    def before_row(self, seq: Sequence) -> Awaited | None:
        """Implements AdmissionRule: who is not of the batch waits for the next one. A sequence that was admitted is
        admitted again after preemption, and so are the other choices of its request."""
        return None if self._admits(seq) else NEXT_BATCH

    def _admits(self, seq: Sequence) -> bool:
        """Returns whether the sequence is of the batch; its request joins an open one that it fits into."""
        state = seq.state
        if state in self._batch:
            return True
        self._is_open = self._is_open and all(member.num_live for member in self._batch)
        if not self._is_open or state.arrival_s > self._began_s:
            return False
        if self._batch and self._num_choices + state.num_live > self._num_rows:
            self._is_open = False
            return False
        self._batch.add(state)
        self._num_choices += state.num_live
        return True

    def _is_due(self) -> bool:
        """Returns whether those that wait fill a batch, or the oldest of them has waited long enough."""
        held = {seq.state for seq in self._waiting.blocked_by(NEXT_BATCH.blocker, NEXT_BATCH.key)}
        first = self._waiting.peek()
        arrivals_s = [state.arrival_s for state in held] + ([] if first is None else [first.state.arrival_s])
        if not arrivals_s or not self._max_delay_s:
            return bool(arrivals_s)
        if len(self._waiting) + sum(state.num_live for state in held) >= self._num_rows:
            return True
        return min(arrivals_s) + self._max_delay_s <= self._clock()


def batching_rule(settings: SchedulerSettings, waiting: WaitingQueue, clock: Callable[[], float]) -> AdmissionRule:
    """Returns the rule of --batching-policy, but for continuous batching, which has none."""
    assert settings.batching_policy != "continuous"
    num_rows = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    delay_s = settings.batching_max_delay_ms / 1000 if settings.batching_policy == "dynamic" else 0.0
    return WholeBatches(num_rows, waiting, clock, delay_s)
