"""MaxLoras: at most --max-loras adapters share a step, and no adapter starves.

An adapter is in the step as long as a row is bound with it. When the next in the queue wants one too many, the adapter
with the fewest rows drains: its new sequences are blocked too, until it has no row and the first in the queue takes its
place. Meanwhile base-model sequences and those of other adapters in the step may overtake, as they take nothing that
the first waits for. Sequences that have run before may return to a draining adapter. A sequence is blocked and
unblocked once per change, and not looked at in every step.
"""

from collections.abc import Iterable

from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.engine.waiting.admission_rule import AdmissionRule
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue


class MaxLoras(AdmissionRule):
    """Counts rows by adapter, at most max_loras of them."""

    def __init__(self, max_loras: int, waiting: WaitingQueue) -> None:
        self._most = max_loras
        self._waiting = waiting
        self._rows: dict[str, int] = {}
        self._drains_for: Sequence | None = None
        self._draining: str | None = None
        self._has_changed = False

    def arrived(self) -> Iterable[Awaited]:
        """Implements AdmissionRule: all sequences without a place in the step are looked at again once the adapters in
        the step have changed."""
        if not self._has_changed:
            return ()
        self._has_changed = False
        return [Awaited(Blocker.TURN, digest) for digest in self._waiting.keys_of(Blocker.TURN)]

    def before_row(self, seq: Sequence) -> Awaited | None:
        """Implements AdmissionRule: who has no place in the step waits until its adapters change."""
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
        assert len(counts) <= self._most, "more adapters in a step than --max-loras"
        assert self._draining is None or self._draining in counts, "an adapter drains that has no row"
        is_due = self._draining is not None or self._has_changed
        assert is_due or not self._waiting.keys_of(Blocker.TURN), "blocked for nothing"

    def _stop_draining(self) -> None:
        self._draining = self._drains_for = None
        self._has_changed = True
