"""Waited: what AdapterCache and GrammarCache share: moves on the ranks, and what sequences and requests hear of them.

Each cache holds one. It keeps the ranks' answers until the cache looks at them, the order of uses, and the sequences
and requests that are to be told. The engine takes these from the caches in each turn (rank_answers.py).
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import NamedTuple, Protocol

from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.sequence import RequestState, Sequence
from tandem.workers.engine.transfers.transfer_manager import TransferManager, TransferOutcome
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.transfer import Failure, TransferOp


class CacheEvents(NamedTuple):
    """Events of one advance() of a cache, for the scheduler and the engine, in this order."""

    withdrawn: list[Sequence]  # sequences that were queued, and are blocked again
    ready: list[Sequence]  # sequences that unblock() returned, to be enqueued
    refused: list[tuple[RequestState, RequestRefused]]  # requests to be ended with a reason


NO_EVENTS = CacheEvents([], [], [])
"""The usual answer, of a turn in which nothing has come."""


class WaitedCache(Protocol):
    """A cache that requests wait for, as the engine sees it."""

    cause: str
    """The word for metrics of what it refuses."""

    @property
    def look_again_s(self) -> float:
        """The moment of the clock from which advance() has something to do without an answer; inf: none."""
        ...

    def check(self, state: RequestState) -> None:
        """Raises RequestRefused for a request whose part was refused lately."""
        ...

    def enter(self, state: RequestState) -> None:
        """Notes that a request has come."""
        ...

    def leave(self, state: RequestState) -> None:
        """Notes that a request has ended, with all its sequences."""
        ...

    def advance(self, done_step: int, late: Collection[int] = ()) -> CacheEvents:
        """Applies the ends of moves and starts new ones. done_step: plans up to it have returned. late: tickets that
        TransferManager.overdue() has named."""
        ...


class Waited:
    """The common part of one cache whose sequences are blocked by `blocker`, with the digest as key."""

    def __init__(
        self, blocker: Blocker, transfers: TransferManager, waiting: WaitingQueue, clock: Callable[[], float]
    ) -> None:
        self.waiting = waiting
        self.clock = clock
        self.has_changed = False  # the cache has something to do
        self.outcomes: list[TransferOutcome] = []  # ops that every rank has answered since the cache last looked
        self.look_again_s = math.inf  # when it has something to do anyway
        self._blocker = blocker
        self._transfers = transfers
        self._events = CacheEvents([], [], [])
        self._num_uses = 0

    # ---- queries ----

    def waiters(self, digest: str) -> Collection[Sequence]:
        """Returns the sequences that wait for this, longest first."""
        return self.waiting.blocked_by(self._blocker, digest).keys()

    def least_served(self, sequences: Iterable[Sequence]) -> float:
        """Returns the least counter of the tenants of these; inf without any."""
        return min(map(self.waiting.tenants.counter, sequences), default=math.inf)

    # ---- commands ----

    def next_use(self) -> int:
        """Returns the number of a use that happens now."""
        self._num_uses += 1
        return self._num_uses

    def start(self, op: TransferOp, late_s: float = math.inf) -> int:
        """Sends an op to all ranks; returns its ticket. take_outcomes() has its end."""
        return self._transfers.start(op, self.outcomes.append, late_s=late_s)

    def take_outcomes(self) -> list[TransferOutcome]:
        """Returns the ops that every rank has answered since the last call."""
        outcomes = self.outcomes.copy()
        self.outcomes.clear()
        return outcomes

    def look_again_at(self, moment_s: float) -> None:
        """Has the cache look again at this moment of the clock, or before."""
        self.look_again_s = min(self.look_again_s, moment_s)

    # ---- news for sequences and requests ----

    def block(self, seq: Sequence, digest: Hashable) -> None:
        """Blocks a queued sequence again."""
        self.waiting.block(seq, self._blocker, digest)
        self._events.withdrawn.append(seq)

    def admit(self, digest: str) -> list[Sequence]:
        """Unblocks the sequences that wait for this, and returns them."""
        ready = self.waiting.unblock(Awaited(self._blocker, digest))
        self._events.ready.extend(ready)
        return ready

    def unblock_refused(self, digest: str, failure: Failure, only: Callable[[Sequence], bool]) -> list[Sequence]:
        """Unblocks the sequences that wait for this in vain, and returns them; refuse() follows for each."""
        return self.waiting.unblock(Awaited(self._blocker, digest, failure), only=only)

    def refuse(self, state: RequestState, refusal: RequestRefused) -> None:
        """Has the engine end a request."""
        self._events.refused.append((state, refusal))

    def take_events(self) -> CacheEvents:
        """Returns the news since the last call."""
        events = self._events
        if not any(events):
            return NO_EVENTS
        self._events = CacheEvents([], [], [])
        return events
