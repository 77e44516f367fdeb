"""AdmissionRule: one reason for which a sequence may not run yet.

The scheduler asks the rules of its list in order (build_engine.py): all of them before a sequence is queued, and again
before the first in the queue gets a row. A rule that forbids it names what the sequence must wait for, and says later
that it has come. The order of the queue itself is that of tenants, priorities and arrival (fairness.py).
"""

from collections.abc import Callable, Iterable

from tandem.workers.engine.base.blockers import Awaited
from tandem.workers.engine.base.sequence import Sequence


class AdmissionRule:
    """A rule that forbids nothing; others define the methods that they need."""

    keeps_loaded = True
    """True: KV and adapters loaded for a sequence stay while this rule makes it wait: it will run soon."""
    joins_running = True
    """A request may join those that run, so that one of these may be preempted for it."""

    def before_queue(self, seq: Sequence) -> Awaited | None:
        """Returns what a sequence must wait for before it is queued, None if it needs nothing of this kind."""
        return None

    def before_row(self, seq: Sequence) -> Awaited | None:
        """Returns what the first in the queue must wait for before it gets a row, None if it may have one."""
        return None

    def arrived(self) -> Iterable[Awaited]:
        """Returns what has come since the last call, of what before_row() has named. Asked before rows are given."""
        return ()

    def giving_way(self, may_pause: Callable[[Sequence], bool], *, has_room: bool) -> list[Sequence]:
        """Returns sequences that should lose their rows, all or none, for others that wait for this rule. may_pause: of
        a sequence, whether it runs and would keep what it has computed. has_room: others find a row and blocks even if
        they are the last in the queue."""
        return []

    def gave_way(self, paused: list[Sequence]) -> None:
        """Notes that they have lost their rows. They are queued; what they had computed is kept."""

    def bound(self, seq: Sequence) -> None:
        """Notes that a sequence has got a row."""

    def unbound(self, seq: Sequence) -> None:
        """Notes that a sequence has lost its row; plans up to seq.last_step name it."""

    def left(self, seq: Sequence) -> None:
        """Notes that a waiting sequence has ended, or waits for something that may take long."""

    def check_invariants(self, running: list[Sequence]) -> None:
        """Asserts what must hold between two steps; for tests."""
