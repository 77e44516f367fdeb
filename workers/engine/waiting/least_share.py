"""The running sequence that gives way to a tenant that lacks a row, or blocks, of its share.

Without this a tenant whose long answers hold all rows or blocks keeps others waiting until one of them ends. Called by
RunningRows when a tenant lacks rows, or the first in the queue blocks.
"""

from collections.abc import Iterable

from tandem.workers.engine.base.sequence import Sequence
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
