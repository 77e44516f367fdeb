"""The running sequence that gives way to a tenant that lacks a row, or blocks, of its share.

Without this a tenant whose long answers hold all rows or blocks keeps others waiting until one of them ends. Called by
RunningRows when the first in the queue lacks a row or blocks.
"""

from collections.abc import Callable, Iterable

from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.engine.waiting.row_shares import RowShares, Tenant


def gives_way(
    taker: Tenant, running: Iterable[Sequence], shares: RowShares, loss: Callable[[Sequence], int]
) -> Sequence | None:
    """Returns the running sequence to preempt for a tenant, of the tenant that gives it a row (RowShares.giver): of
    lowest priority, then that which loses least, then the latest. None if nobody gives it one. loss: tokens that a
    sequence would compute again. Tenants' counters are up to date."""
    giver = shares.giver(taker)
    if giver is None:
        return None
    of_giver = (seq for seq in running if seq.tenant == giver.name)
    return max(of_giver, key=lambda seq: (seq.order[0], -loss(seq), seq.order))
