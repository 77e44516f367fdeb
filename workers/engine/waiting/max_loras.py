"""MaxLorasGate: at most --max-loras adapters share a step, and no adapter starves.

An adapter is in the step as long as a row is bound with it. When the next in the queue wants one too many, the adapter
with the fewest rows drains: its new sequences are blocked too, until it has no row and the first in the queue takes its
place. Meanwhile base-model sequences and those of other adapters in the step may overtake, as they take nothing that
the first waits for. Sequences that have run before may return to a draining adapter.
Called by the scheduler. A sequence is blocked and unblocked once per change, and not looked at in every step.
"""

from tandem.workers.engine.base.blockers import Blocker, Event
from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.engine.waiting.adapter_cache import AdapterCache
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue


class MaxLorasGate:
    """Counts of rows by adapter. pool: the adapters on the device; None: no request has an adapter."""

    def __init__(self, pool: AdapterCache | None, max_loras: int, waiting: WaitingQueue) -> None:
        self._pool = pool
        self._most = max_loras
        self._waiting = waiting
        self._rows: dict[str, int] = {}
        self._drains_for: Sequence | None = None
        self._draining: str | None = None
        self._has_changed = False

    def take_events(self) -> list[Event]:
        """Returns the events that unblock the sequences without a place in the step; none unless the adapters in the
        step have changed since the last call."""
        if not self._has_changed:
            return []
        self._has_changed = False
        return [Event(Blocker.TURN, digest) for digest in self._waiting.keys_of(Blocker.TURN)]

    def admit(self, seq: Sequence) -> bool:
        """Returns whether its adapter is on the device; if not, the engine enqueues it again once it is."""
        assert self._pool is not None, "a sequence with an adapter came in"
        return self._pool.admit(seq)

    def may_run(self, seq: Sequence) -> bool:
        """Returns whether the first in the queue may have a row with its adapter; if not, blocks it."""
        digest, rows = seq.adapter, self._rows
        assert digest is not None
        if digest in rows:
            if digest != self._draining or seq.bound_step:
                return True
        elif len(rows) < self._most:
            return True
        elif self._draining is None:
            self._draining = min(rows, key=lambda digest: rows[digest])
            self._drains_for = seq
        self._waiting.block(seq, Blocker.TURN, digest)
        return False

    def bind(self, seq: Sequence) -> int:
        """Notes that it has a row; returns the slot of its adapter."""
        assert self._pool is not None and seq.adapter is not None
        if seq.adapter not in self._rows:
            self._stop_draining()
            self._rows[seq.adapter] = 0
        self._rows[seq.adapter] += 1
        return self._pool.bind(seq)

    def unbind(self, seq: Sequence) -> None:
        """Notes that its row is free; plans up to seq.last_step name the slot."""
        assert self._pool is not None and seq.adapter is not None
        self._pool.unbind(seq)
        self._rows[seq.adapter] -= 1
        if not self._rows[seq.adapter]:
            del self._rows[seq.adapter]
            self._stop_draining()

    def drop(self, seq: Sequence) -> None:
        """Notes that a waiting sequence ends."""
        assert self._pool is not None
        self._pool.drop(seq)
        self.withdraw(seq)

    def withdraw(self, seq: Sequence) -> None:
        """Notes that a sequence no longer waits for a place in the step."""
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
