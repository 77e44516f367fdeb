"""WaitingQueue: the one owner of sequences that wait. A sequence waits here, has a row, or is finished.

A waiting sequence is queued (it needs only a row and blocks), or blocked by one thing, a Blocker and its key. When that
has come, it is reported as Awaited; unblock() is the one way out. Called by the scheduler, the adapter cache and the
engine.
"""

import time
from collections.abc import Callable, Hashable
from typing import TypeVar

from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.sequence import RequestState, Sequence
from tandem.workers.engine.waiting.fairness import FairQueue

Cause = tuple[Blocker, Hashable]
K = TypeVar("K", bound=Hashable)
_NOBODY: dict[Sequence, None] = {}


class WaitingQueue:
    """Queued sequences in the order of `tenants`, blocked ones by cause. Blocked ones count for their tenant, forks
    only once they are queued. Each request is told how long it has waited, and for what."""

    def __init__(self, tenants: FairQueue | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.tenants = FairQueue() if tenants is None else tenants
        self._clock = clock
        self._since_s: dict[Sequence, float] = {}
        self._cause_of: dict[Sequence, Cause] = {}
        self._blocked: dict[Cause, dict[Sequence, None]] = {}
        self._with_adapter: dict[str, dict[Sequence, None]] = {}

    # ---- queries ----

    def __len__(self) -> int:
        """The number of queued sequences."""
        return len(self.tenants)

    def peek(self) -> Sequence | None:
        """Returns the next queued sequence: none overtakes it."""
        return self.tenants.peek()

    def has(self, seq: Sequence) -> bool:
        """Returns whether a sequence is queued or blocked here."""
        return seq in self._cause_of or self.tenants.has(seq)

    def blocker_of(self, seq: Sequence) -> Blocker | None:
        """Returns what a waiting sequence waits for; None if it is queued."""
        cause = self._cause_of.get(seq)
        return None if cause is None else cause[0]

    def blocked_by(self, blocker: Blocker, key: Hashable) -> dict[Sequence, None]:
        """Returns the sequences that wait for this, longest first; not to be changed."""
        return self._blocked.get((blocker, key), _NOBODY)

    def keys_of(self, blocker: Blocker) -> list[Hashable]:
        """Returns the keys of this kind for which any sequence waits."""
        return [key for kind, key in self._blocked if kind is blocker]

    def with_adapter(self, digest: str) -> dict[Sequence, None]:
        """Returns the waiting sequences with this adapter that do not wait for it; not to be changed."""
        return self._with_adapter.get(digest, _NOBODY)

    # ---- commands ----

    def push(self, seq: Sequence) -> None:
        """Queues a sequence that does not wait, or that unblock() has returned."""
        assert seq not in self._cause_of, "a blocked sequence is queued"
        self._note_adapter(seq)
        self.tenants.push(seq)
        self._since_s[seq] = self._clock()

    def block(self, seq: Sequence, blocker: Blocker, key: Hashable) -> None:
        """Blocks a new, queued or otherwise blocked sequence."""
        self._clear(seq)
        self._cause_of[seq] = blocker, key
        self._blocked.setdefault((blocker, key), {})[seq] = None
        if blocker is not Blocker.FORK:
            self.tenants.block(seq)
            if blocker is not Blocker.ADAPTER:
                self._note_adapter(seq)
        self._since_s[seq] = self._clock()

    def unblock(self, event: Awaited, only: Callable[[Sequence], bool] | None = None) -> list[Sequence]:
        """Returns the sequences that waited for this, longest first; push(), block() or remove() follows for each.

        only: of those, the ones for which it is true.
        """
        blocked = self.blocked_by(event.blocker, event.key)
        freed = [seq for seq in blocked if only is None or only(seq)]
        for seq in freed:
            self._clear(seq)
            self._note_adapter(seq)
        return freed

    def remove(self, seq: Sequence) -> None:
        """Removes a waiting sequence: it gets a row, or it ends."""
        is_counted = self.blocker_of(seq) is not Blocker.FORK
        self._clear(seq)
        if is_counted:
            self.tenants.remove(seq)

    def check_invariants(self) -> None:
        """Asserts that each sequence has at most one cause, and that the indexes agree. O(sequences)."""
        self.tenants.check_invariants()
        causes = {seq: cause for cause, blocked in self._blocked.items() for seq in blocked}
        assert causes == self._cause_of, "blocked sequences are miscounted"
        assert all(self._blocked.values()), "a cause without a sequence"
        assert all(map(self.has, self._since_s)), "a sequence that does not wait is timed"
        for seq in causes:
            assert not self.tenants.is_queued(seq), "a sequence is queued and blocked at once"

    # ---- inside ----

    def _note_adapter(self, seq: Sequence) -> None:
        if seq.adapter is not None:
            self._with_adapter.setdefault(seq.adapter, {})[seq] = None

    def _clear(self, seq: Sequence) -> None:
        """Removes its cause and its adapter's entry, if it has them; what it waited until now is its request's."""
        cause = self._cause_of.pop(seq, None)
        if (since_s := self._since_s.pop(seq, None)) is not None:
            _count_wait(seq.state, cause, self._clock() - since_s)
        if cause is not None:
            _discard(self._blocked, cause, seq)
        if seq.adapter is not None:
            _discard(self._with_adapter, seq.adapter, seq)


def _count_wait(state: RequestState, cause: Cause | None, seconds: float) -> None:
    """Adds a wait to those of a request. cause: None for a row and blocks, which is the rest of its time in the
    queue."""
    if state.admitted:
        state.paused_s += seconds
    elif cause is not None and cause[0] is not Blocker.FORK:
        state.waited_s[cause[0].value] = state.waited_s.get(cause[0].value, 0.0) + seconds


def _discard(groups: dict[K, dict[Sequence, None]], key: K, seq: Sequence) -> None:
    group = groups.get(key)
    if group is not None and seq in group:
        del group[seq]
        if not group:
            del groups[key]
