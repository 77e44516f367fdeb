"""Invariants of blocks, queue, rules and caches over all live sequences of an engine."""

from tandem.workers.engine.base.blockers import Blocker
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.waiting.first_blocks import check_reservations


def check_invariants(engine: Engine) -> None:
    """Asserts them; O(all sequences)."""
    waiting = engine.scheduler.waiting
    engine.scheduler.check_invariants()
    waiting.check_invariants()
    engine.grammars.check_users(engine.requests)
    sequences = [seq for state in engine.requests for seq in state.sequences]
    check_reservations(engine.manager, sequences)
    tables = [*(seq.table for seq in sequences), *engine.scheduler.rows.kept_tables()]
    if engine.offload is None:
        engine.manager.check_invariants(tables)
        return
    engine.manager.check_invariants(tables, engine.offload.table_uses(), engine.offload.held())
    engine.offload.check_invariants(waiting.keys_of(Blocker.KV))
