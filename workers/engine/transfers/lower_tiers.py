"""LowerTiers: the tiers below the device, for the scheduler; kv_offload.py has them."""

from typing import NamedTuple

from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.engine.blocks.block_manager import BlockTable


class OverlappedLoad(NamedTuple):
    """A load that a plan waits for layer by layer: its ticket, and the device blocks of the prefix with it."""

    ticket: int
    block_ids: list[int]


class LowerTiers:
    """The tiers below the device, for the scheduler, which has none without --kv-offloading-size. This one holds
    nothing."""

    def load(self, seq: Sequence, reserve: int) -> int | None:
        """Starts to load its prefix, or finds a load of it under way; returns the ticket to wait for, None to wait for
        nothing."""
        return None

    def forbid_loads(self, seq: Sequence) -> None:
        """Has a sequence compute what it finds below the device, until it loses its blocks."""

    def load_overlapped(self, seq: Sequence) -> OverlappedLoad | None:
        """Starts a load for a sequence that runs at once, in a plan that waits for it; there is room for all of it.
        None: nothing to load, or not worth it."""
        return None

    def drop(self, seq: Sequence) -> None:
        """Removes a sequence that waits, for a load or in the queue."""

    def store(self, table: BlockTable) -> None:
        """Starts to store the blocks of a sequence that has ended, and still holds them."""

    def swap_out(self, table: BlockTable) -> None:
        """Starts to store the blocks of a preempted sequence, if a load will be cheaper than recompute."""

    def forget(self, table: BlockTable) -> None:
        """Removes these blocks from the tiers' indexes, after a step over them failed."""
