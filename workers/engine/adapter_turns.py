"""Which adapters share a step: at most --max-loras, whoever is resident; the others take turns, nobody starves.

An adapter is in the step as long as a row is bound with it. When the next in the queue wants one too many, the adapter
with the fewest rows drains: its newcomers are set aside as well, until it is out and the place goes to whoever is first
then. Meanwhile only those may overtake who take nothing that the first waits for: base-model sequences, and those of
adapters that are in the step and do not drain. Sequences that have run before come back to a draining adapter.
Called by the scheduler; a sequence is set aside once and comes back once per change, never looked at in every step.
"""

from workers.engine.adapters import AdapterPool
from workers.engine.admission import WaitingQueue
from workers.engine.sequence import Sequence


class AdapterTurns:
    """Rows by adapter over the pool of those on the device. pool None: no request has an adapter."""

    def __init__(self, pool: AdapterPool | None, max_loras: int, waiting: WaitingQueue) -> None:
        self._pool = pool
        self._most = max_loras
        self._waiting = waiting
        self._rows: dict[str, int] = {}
        self._aside: dict[Sequence, None] = {}
        self._first: Sequence | None = None
        self._draining: str | None = None
        self._has_changed = False

    @property
    def is_due(self) -> bool:
        """Whether bring_back() has something to do."""
        return self._has_changed

    def admit(self, seq: Sequence) -> bool:
        """Whether its adapter is on the device; if not, it is given back to requeue() once it is."""
        assert self._pool is not None, "a sequence with an adapter came in"
        return self._pool.admit(seq)

    def bring_back(self) -> None:
        """The step has room for another adapter, or a new one in it: everybody stands in the queue again."""
        self._has_changed = False
        for seq in self._aside:
            self._waiting.push(seq)
        self._aside.clear()

    def may_run(self, seq: Sequence) -> bool:
        """Whether the next in the queue may have a row as far as its adapter goes; if not, it is set aside."""
        digest, rows = seq.adapter, self._rows
        assert digest is not None
        if digest in rows:
            if digest != self._draining or seq.bound_step:
                return True
        elif len(rows) < self._most:
            return True
        elif self._draining is None:
            self._draining = min(rows, key=lambda digest: rows[digest])
            self._first = seq
        self._waiting.set_aside(seq)
        self._aside[seq] = None
        return False

    def bind(self, seq: Sequence) -> int:
        """It has a row now; the slot of its adapter."""
        assert self._pool is not None and seq.adapter is not None
        if seq.adapter not in self._rows:
            self._stop_draining()
            self._rows[seq.adapter] = 0
        self._rows[seq.adapter] += 1
        return self._pool.bind(seq)

    def unbind(self, seq: Sequence) -> None:
        """Its row is free; plans up to seq.last_step name its slot."""
        assert self._pool is not None and seq.adapter is not None
        self._pool.unbind(seq)
        self._rows[seq.adapter] -= 1
        if not self._rows[seq.adapter]:
            del self._rows[seq.adapter]
            self._stop_draining()

    def drop(self, seq: Sequence) -> None:
        """A sequence that waits, for its adapter or in the queue, waits no more."""
        assert self._pool is not None
        self._pool.drop(seq)
        self.pass_over(seq)

    def pass_over(self, seq: Sequence) -> None:
        """It does not wait for a turn any more."""
        self._aside.pop(seq, None)
        if seq is self._first:
            self._stop_draining()

    def check_laws(self, running: list[Sequence]) -> None:
        """Asserts that rows are counted as they are, of at most max_loras adapters, and that no one waits in vain."""
        counts: dict[str, int] = {}
        for seq in running:
            if seq.adapter is not None:
                counts[seq.adapter] = counts.get(seq.adapter, 0) + 1
        assert counts == self._rows, "rows by adapter are miscounted"
        assert len(counts) <= self._most, "more adapters in a step than --max-loras"
        assert self._draining is None or self._draining in counts, "an adapter drains that has no row"
        assert not self._aside or self._draining is not None or self._has_changed, "set aside for nothing"

    def _stop_draining(self) -> None:
        self._draining = self._first = None
        self._has_changed = True
