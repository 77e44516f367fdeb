"""Work for idle rows: sequences of the last priority run while nobody else wants their rows or blocks.

Whatever tenant they are of, they stand behind all others in the queue, and the latest of those that run gives way to
one of the others that finds no row or no blocks. Fair shares are among the others. Called by FairQueue and RunningRows.
"""

from collections.abc import Iterable

from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.messages.request import IDLE_PRIORITY


def is_idle_work(seq: Sequence) -> bool:
    """Returns whether a sequence is for idle rows only."""
    return seq.order[0] >= IDLE_PRIORITY


def latest_idle(running: Iterable[Sequence], first: Sequence | None) -> Sequence | None:
    """Returns the running sequence that gives way to the first in the queue, if that is no idle work itself."""
    if first is None or is_idle_work(first):
        return None
    return max(filter(is_idle_work, running), key=lambda seq: seq.order, default=None)
