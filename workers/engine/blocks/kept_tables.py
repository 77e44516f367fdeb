"""KeptTables: blocks of sequences that lost their row alone, kept for as long as nobody needs the room.

A sequence that gives its row to another tenant would compute again what its last, unfinished block holds. While the
pool has room it finds all of its KV as it left it. Such blocks are the first to go: the scheduler clears all of them
before any sequence is preempted, or left waiting, for want of blocks, and when a step or a load has failed. Called by
RunningRows and the scheduler.
"""

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from tandem.workers.engine.blocks.block_manager import BlockManager, BlockTable


class KeptTable(NamedTuple):
    """The blocks of a sequence: num_tokens tokens are computed there once the plans up to last_step have returned."""

    table: BlockTable
    num_tokens: int
    last_step: int


class KeptTables:
    """Tables by the sequence that left them."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._kept: dict[Hashable, KeptTable] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._kept

    def __iter__(self) -> Iterator[KeptTable]:
        return iter(self._kept.values())

    def get(self, owner: Hashable) -> KeptTable | None:
        """Returns the blocks that a sequence has left, if any."""
        return self._kept.get(owner)

    def keep(self, owner: Hashable, kept: KeptTable) -> None:
        """Keeps the blocks of a sequence, which has another table from now on."""
        self._kept[owner] = kept

    def take(self, owner: Hashable, num_tokens: int) -> KeptTable | None:
        """Returns a sequence's blocks to it, with those that num_tokens tokens need reserved; None if it left none, or
        there is no room for that."""
        kept = self._kept.get(owner)
        if kept is None or not self._manager.reserve(kept.table, num_tokens):
            return None
        return self._kept.pop(owner)

    def drop(self, owner: Hashable) -> None:
        """Releases the blocks of a sequence that has ended, if it left any."""
        kept = self._kept.pop(owner, None)
        if kept is not None:
            self._manager.release(kept.table, kept.last_step)

    def clear(self) -> bool:
        """Releases all of them; returns whether there were any."""
        if not self._kept:
            return False
        for owner in list(self._kept):
            self.drop(owner)
        return True
