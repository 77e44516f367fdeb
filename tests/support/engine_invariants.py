"""Invariants of blocks, queue, rules and caches over all live sequences of an engine."""

from tandem.workers.engine.base.blockers import Blocker
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.waiting.first_blocks import check_reservations


def check_invariants(engine: Engine) -> None:
    """Asserts them; O(all sequences)."""
    parts = engine.parts
    waiting = parts.scheduler.waiting
    parts.scheduler.check_invariants()
    waiting.check_invariants()
    parts.grammars.check_users(parts.requests)
    sequences = [seq for state in parts.requests for seq in state.sequences]
    check_reservations(parts.manager, sequences)
    tables = (seq.table for seq in sequences)
    if parts.offload is None:
        parts.manager.check_invariants(tables)
        return
    parts.manager.check_invariants(tables, parts.offload.table_uses(), parts.offload.held())
    parts.offload.check_invariants(waiting.keys_of(Blocker.KV))
