"""The tiers below the device as one: where a block is, and what must move to bring it up or down.

Called by workers/engine/kv_offload.py, which owns device blocks and talks to the ranks. Every move is a Ticket: made
here with its places pinned, carried out by the ranks, closed here by complete(). Torch-free; moves no bytes.

    device --store--> host --spill--> disk          disk --fetch--> host --load--> device
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from offload.host_tier import HostTier
from offload.tier import KVTier

Kind = Literal["store", "load", "spill", "fetch"]
MAX_SPILLS = 64


class SpillTier(KVTier, Protocol):
    """A tier below the host. disabled_reason: why it was switched off, in words; None while it is used."""

    disabled_reason: str | None

    def prepare_store(self, key: bytes) -> list[bytes] | None:
        """Room for a new block, and the keys that had to go for it; None when it cannot or need not be stored."""
        ...

    def disable(self, reason: str) -> None:
        """From now on it has nothing and stores nothing."""
        ...


@dataclass(slots=True, eq=False)
class Ticket:
    """One move of whole blocks. keys[i] lies in (or goes to) host slot slots[i] and device block block_ids[i]."""

    id: int
    kind: Kind
    keys: list[bytes]
    slots: list[int]
    block_ids: list[int] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)


class TieredStore:
    """Host tier, and the disk tier below it if there is one."""

    def __init__(self, host: HostTier, disk: SpillTier | None = None) -> None:
        self.host = host
        self.disk = disk
        self._next_id = 1
        self._spilling = 0
        # what an earlier group left in the host may not be on disk yet; more than that could not be there still
        self._to_spill: deque[bytes] = deque(host.keys(), maxlen=max(1, host.num_slots))

    # ---- queries ----

    def place(self, key: bytes) -> Literal["host", "disk"] | None:
        """Where a block can be brought from, the nearest first."""
        if self.host.has(key):
            return "host"
        return "disk" if self.disk is not None and self.disk.has(key) else None

    def is_kept(self, key: bytes) -> bool:
        """Whether a store of this block would be for nothing."""
        return self.host.has(key) or self.host.is_writing(key)

    # ---- commands: each returns a ticket whose places are pinned until complete() ----

    def store(self, blocks: Sequence[tuple[bytes, int]], costs: Sequence[float]) -> Ticket | None:
        """(key, device block) pairs to the host, from the first on, as many as find a slot; the first are kept longest.
        None: none did."""
        ticket = self._ticket("store")
        fitting = list(zip(blocks, costs, strict=True))[: self.host.num_available]
        for (key, block_id), cost in reversed(fitting):
            slot = self.host.prepare_store(key, cost)
            if slot is not None:
                ticket.keys.append(key)
                ticket.slots.append(slot)
                ticket.block_ids.append(block_id)
        return ticket if ticket.keys else None

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> Ticket:
        """Blocks that the host has, into device blocks."""
        ticket = self._ticket("load")
        for key, block_id in zip(keys, block_ids, strict=True):
            pinned = self.host.prepare_load(key)
            assert pinned, "only what the host has is loaded"
            ticket.keys.append(key)
            ticket.slots.append(self.host.slot(key))
            ticket.block_ids.append(block_id)
        return ticket

    def fetch(self, keys: Sequence[bytes], costs: Sequence[float]) -> Ticket | None:
        """Blocks of the disk into the host, from the first on, as many as find a slot."""
        assert self.disk is not None
        ticket = self._ticket("fetch")
        for key, cost in zip(keys, costs, strict=True):
            if not self.disk.prepare_load(key):
                break
            slot = self.host.prepare_store(key, cost)
            if slot is None:
                self.disk.complete_load(key)
                break
            ticket.keys.append(key)
            ticket.slots.append(slot)
        return ticket if ticket.keys else None

    def spill(self) -> Ticket | None:
        """Blocks that came to the host lately, down to the disk; None when none waits or enough are on their way."""
        if self.disk is None:
            return None
        ticket = self._ticket("spill")
        while self._to_spill and self._spilling < MAX_SPILLS:
            key = self._to_spill.pop()
            if not self.host.has(key) or self.disk.has(key):
                continue
            dropped = self.disk.prepare_store(key)
            if dropped is None:
                continue
            self.host.prepare_load(key)
            self._spilling += 1
            ticket.keys.append(key)
            ticket.slots.append(self.host.slot(key))
            ticket.dropped += dropped
        return ticket if ticket.keys else None

    def forget(self, key: bytes) -> None:
        """A block whose content is not to be trusted is found no more, wherever it is; moves under way aside."""
        self.host.forget(key)
        if self.disk is not None and self.disk.prepare_load(key):
            self.disk.fail_load(key)

    def complete(self, ticket: Ticket, failed: set[int]) -> None:
        """All ranks have done with a ticket; `failed`: places whose bytes did not arrive on some rank."""
        for place, key in enumerate(ticket.keys):
            self._complete_one(ticket.kind, key, place in failed)

    # ---- inside ----

    def _complete_one(self, kind: Kind, key: bytes, failed: bool) -> None:
        host, disk = self.host, self.disk
        if kind == "load":
            host.fail_load(key) if failed else host.complete_load(key)
            return
        if kind == "store":
            host.fail_store(key) if failed else host.complete_store(key)
            if not failed and disk is not None:
                self._to_spill.append(key)
            return
        assert disk is not None
        if kind == "fetch":
            host.fail_store(key) if failed else host.complete_store(key)
            disk.fail_load(key) if failed else disk.complete_load(key)
            return
        self._spilling -= 1
        host.complete_load(key)
        disk.fail_store(key) if failed else disk.complete_store(key)

    def _ticket(self, kind: Kind) -> Ticket:
        ticket = Ticket(self._next_id, kind, [], [])
        self._next_id += 1
        return ticket
