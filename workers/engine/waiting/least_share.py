"""The running sequence that gives way to one that waits.

Work of the last priority, which is for idle rows, gives way to all others, of whatever tenant, and stands behind them
in the queue. Then, to a tenant that lacks a row, or blocks, of its share, the tenants that have more than theirs:
without this one whose long answers hold all rows or blocks keeps others waiting until one of them ends. Called by
FairQueue, and by RunningRows when rows or blocks are lacking.
"""

from collections.abc import Iterable

from tandem.workers.engine.base.sequence import Sequence, is_idle_work
from tandem.workers.engine.waiting.row_shares import HeldBlocks, QueuedTenant, RowShares


def gives_way(
    taker: QueuedTenant, running: Iterable[Sequence], shares: RowShares, blocks: HeldBlocks | None = None
) -> Sequence | None:
    """Returns the running sequence to preempt for a tenant, of the tenant that gives it a row (RowShares.giver): of
    lowest priority, then the latest. None if nobody gives it one. blocks: it lacks blocks. Tenants' counters are up to
    date."""
    giver = shares.giver(taker, blocks)
    if giver is None:
        return None
    return max((seq for seq in running if seq.tenant == giver.name), key=lambda seq: seq.order)


def latest_idle(running: Iterable[Sequence], first: Sequence | None) -> Sequence | None:
    """Returns the running idle work to preempt for the first in the queue, if that is none itself."""
    if first is None or is_idle_work(first):
        return None
    return max(filter(is_idle_work, running), key=lambda seq: seq.order, default=None)
