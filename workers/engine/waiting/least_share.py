"""The running sequence that gives way to a tenant that runs nothing.

Without this a tenant whose long answers hold all rows or blocks keeps a newcomer waiting until one of them ends. Called
by the scheduler when the first in the queue lacks a row or blocks.
"""

from collections import Counter
from collections.abc import Sequence as ListOf

from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.engine.waiting.fairness import FairQueue


def gives_way(first: Sequence, running: ListOf[Sequence], tenants: FairQueue) -> Sequence | None:
    """Returns the running sequence to preempt for `first`, the first in the queue: of the tenant that was served most,
    the one of lowest priority, then the latest. None if its tenant runs any, or no tenant that was served more runs
    two: so each of them keeps a row, and no two take the same row from each other. Tenants' counters are up to date."""
    if any(seq.tenant == first.tenant for seq in running):
        return None
    rows, served = Counter(seq.tenant for seq in running), tenants.counter(first)
    others = [seq for seq in running if rows[seq.tenant] > 1 and tenants.counter(seq) > served]
    return max(others, key=lambda seq: (tenants.counter(seq), seq.order), default=None)
