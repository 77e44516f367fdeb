"""The first blocks of a sequence that gets a row: those of a running choice of its request, or prefix hits. The others
that its known tokens need are reserved, and taken chunk by chunk (BlockManager.take_reserved).

Called by RowAdmission. `reserve`: blocks that are left for running sequences.
"""

from collections.abc import Iterable

from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.sequence import Sequence, SequenceStatus
from tandem.workers.engine.blocks.block_manager import BlockManager
from tandem.workers.engine.transfers.lower_tiers import OverlappedLoad


def find_prefix(
    manager: BlockManager, step: InFlightStep, seq: Sequence, reserve: int, overlapped: OverlappedLoad | None
) -> bool:
    """Takes the prefix hits and reserves blocks for all other known tokens; returns False if there is no room.

    overlapped: the load of a sequence without others, whose step may wait for it because no decode is delayed.
    """
    hits = manager.match_prefix(seq.table, seq.tokens) if overlapped is None else overlapped.block_ids
    admitted = manager.admit(seq.table, len(seq.tokens), hits, reserve)
    if overlapped is not None:
        assert admitted, "there was room for all of it"
        step.awaits.append(overlapped.ticket)
    if not admitted:
        return False
    seq.num_scheduled = seq.num_computed = len(hits) // manager.groups.count * manager.block_size
    return True


def share_prompt(manager: BlockManager, step: InFlightStep, seq: Sequence, reserve: int, done_step: int) -> bool:
    """Forks a running choice of the same request: shares its prompt blocks and copies the one that will be written.
    Returns False if there is none or no room, or if more is found by content (its own answer before preemption)."""
    if len(seq.state.sequences) == 1:
        return False
    num_tokens = min(seq.prompt_len, len(seq.tokens) - 1)
    source = seq.state.fork_source(num_tokens, done_step)
    total = len(seq.tokens)
    cost = None if source is None else manager.cost_of_fork(source.table, num_tokens, total)
    if source is None or cost is None or cost + reserve > manager.pool.num_allocatable:
        return False
    whole = num_tokens // manager.block_size * manager.groups.count
    if seq.num_output and len(manager.match_prefix(seq.table, seq.tokens)) > whole:
        return False
    manager.fork(source.table, seq.table, num_tokens)
    copies = manager.make_writable(seq.table, num_tokens, total, step.step_id)
    is_reserved = manager.reserve(seq.table, total)
    assert copies is not None and is_reserved
    step.block_copies.extend((copy.source, copy.destination) for copy in copies)
    seq.num_scheduled = seq.num_computed = num_tokens
    return True


def check_reservations(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Asserts that only running sequences hold or reserve blocks, and that a prompt has those of all its tokens."""
    for seq in sequences:
        table = seq.table
        have = len(table.block_ids) + table.num_reserved
        need = manager.places_for(len(seq.tokens)) * manager.groups.count
        if seq.status is not SequenceStatus.RUNNING:
            assert have == 0, "a sequence without a row holds or reserves blocks"
        elif manager.groups.has_windows:
            assert have <= max(need, len(table.block_ids)), "more is reserved than the prompt lacks"
        elif table.num_reserved:
            assert have == need, f"a prompt that needs {need} blocks holds and reserves {have}"
        elif seq.num_scheduled < max(seq.prompt_len, len(seq.tokens) - 1):
            assert have >= need, f"a prompt that needs {need} blocks holds {have}, and reserves none"
