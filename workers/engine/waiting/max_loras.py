"""MaxLoras: at most --max-loras adapters share a step, in turns, and no adapter starves.

Twice as many may have rows: else a new sequence would wait for a whole answer of another adapter. Each step has those
that had none for longest, and leaves a place for the first in the queue if its adapter has no row yet; so a row has
every second step, but for those in which another adapter comes. A place that was left in vain, as the first in the
queue found no blocks or tokens, is not left in the next step; nor, with --max-loras 1, one that was taken: nobody else
would have a turn meanwhile.

When the next in the queue wants one too many to have a row, the adapter with the fewest rows drains: its new sequences
are blocked too, until it has no row and the first in the queue takes its place. Meanwhile base-model sequences and
those of other adapters with rows may overtake, as they take nothing that the first waits for. Sequences that have run
before may return to a draining adapter. A sequence is blocked and unblocked once per change, and not looked at in every
step.
"""

from collections.abc import Iterable

from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.sequence import RequestState, Sequence
from tandem.workers.engine.waiting.admission_rule import AdmissionRule
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue

ADAPTERS_PER_PLACE = 2
"""Adapters that may have rows, over those that share a step."""


class MaxLoras(AdmissionRule):
    """Counts rows by adapter, and chooses the adapters of each step, at most max_loras of them."""

    def __init__(self, max_loras: int, waiting: WaitingQueue) -> None:
        self._most_in_step = max_loras
        self._most = ADAPTERS_PER_PLACE * max_loras
        self._waiting = waiting
        self._rows: dict[str, int] = {}  # the longest without a step first, once not all share each step
        self._in_step: set[str] = set()
        self._leaves_place = False  # in the step that was planned last, and is not to do so again
        self._drains_for: Sequence | None = None
        self._draining: str | None = None
        self._has_changed = False

    # ---- the scheduler's side ----

    def begin_step(self, first: Sequence | None) -> bool:
        """Chooses the adapters of the step that is planned next. first: who may get a row in it; None: nobody. Returns
        whether some adapter that has rows is left out."""
        rows, most = self._rows, self._most_in_step
        is_new = first is not None and first.adapter is not None and first.adapter not in rows
        comes = is_new and not self._leaves_place
        self._leaves_place = comes and len(rows) >= most
        if len(rows) + comes <= most:
            self._in_step = set(rows)
            return False
        chosen = list(rows)[: most - comes]
        for digest in chosen:
            rows[digest] = rows.pop(digest)
        self._in_step = set(chosen)
        return True

    def begin_step_of(self, state: RequestState) -> None:
        """Gives the step that is planned next to one request."""
        self._in_step = {seq.adapter for seq in state.sequences if seq.adapter is not None}

    def shares_step(self, seq: Sequence) -> bool:
        """Returns whether a sequence has, or may get, a part in the step."""
        digest, in_step = seq.adapter, self._in_step
        return digest is None or digest in in_step or (digest not in self._rows and len(in_step) < self._most_in_step)

    # ---- AdmissionRule ----

    def arrived(self) -> Iterable[Awaited]:
        """Implements AdmissionRule: all sequences without a place among the rows are looked at again once the adapters
        with rows have changed."""
        if not self._has_changed:
            return ()
        self._has_changed = False
        return [Awaited(Blocker.TURN, digest) for digest in self._waiting.keys_of(Blocker.TURN)]

    def before_row(self, seq: Sequence) -> Awaited | None:
        """Implements AdmissionRule: who finds too many adapters with rows waits until these change."""
        digest, rows = seq.adapter, self._rows
        if digest is None:
            return None
        if digest in rows:
            if digest != self._draining or seq.bound_step:
                return None
        elif len(rows) < self._most:
            return None
        elif self._draining is None:
            self._draining = min(rows, key=lambda digest: rows[digest])
            self._drains_for = seq
        return Awaited(Blocker.TURN, digest)

    def bound(self, seq: Sequence) -> None:
        """Implements AdmissionRule."""
        if seq.adapter is None:
            return
        if seq.adapter not in self._rows:
            self._stop_draining()
            self._rows[seq.adapter] = 0
            self._in_step.add(seq.adapter)
            self._leaves_place = self._leaves_place and self._most_in_step == 1
        self._rows[seq.adapter] += 1

    def unbound(self, seq: Sequence) -> None:
        """Implements AdmissionRule."""
        if seq.adapter is None:
            return
        self._rows[seq.adapter] -= 1
        if not self._rows[seq.adapter]:
            del self._rows[seq.adapter]
            self._stop_draining()

    def left(self, seq: Sequence) -> None:
        """Implements AdmissionRule."""
        if seq is self._drains_for:
            self._stop_draining()

    def check_invariants(self, running: list[Sequence]) -> None:
        """Asserts that row counts are right, of at most max_loras adapters, and that none is blocked for nothing."""
        counts: dict[str, int] = {}
        for seq in running:
            if seq.adapter is not None:
                counts[seq.adapter] = counts.get(seq.adapter, 0) + 1
        assert counts == self._rows, "rows by adapter are miscounted"
        assert len(counts) <= self._most, "more adapters have rows than can take turns"
        assert len(self._in_step) <= self._most_in_step, "more adapters in a step than --max-loras"
        assert self._draining is None or self._draining in counts, "an adapter drains that has no row"
        is_due = self._draining is not None or self._has_changed
        assert is_due or not self._waiting.keys_of(Blocker.TURN), "blocked for nothing"

    def _stop_draining(self) -> None:
        self._draining = self._drains_for = None
        self._has_changed = True
