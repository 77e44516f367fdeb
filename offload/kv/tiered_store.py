"""The tiers below the device as one store: where a block is, and what must move to bring it up or down.

Called by workers/engine/transfers/kv_offload.py, which owns device blocks and orders the ranks' copies. A TierMove is
made here with its places pinned, carried out by the ranks under a ticket, and closed here by complete(). Torch-free;
moves no bytes.

    device --store--> host --spill--> disk          disk --fetch--> host --load--> device
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tandem.offload.kv.host_tier import HostTier
from tandem.offload.kv.tier import KVTier

Kind = Literal["store", "load", "spill", "fetch"]
MAX_SPILLS = 64


class SpillTier(KVTier, Protocol):
    """A tier below the host. disabled_reason: why it was switched off; None while it is in use. on_change: is told of
    keys that can be found from now on, or no longer."""

    disabled_reason: str | None
    on_change: Callable[[bytes], None] | None

    def prepare_store(self, key: bytes) -> list[bytes] | None:
        """Reserves room for a new block and returns the keys evicted for it; None when it cannot or need not be
        stored."""
        ...

    def forget_all(self) -> None:
        """Makes all blocks unfindable."""
        ...

    def disable(self, reason: str) -> None:
        """Switches the tier off: it finds and stores nothing from now on."""
        ...


@dataclass(slots=True, eq=False)
class TierMove:
    """One move of whole blocks. keys[i] is in (or goes to) host slot slots[i] and device block block_ids[i]."""

    kind: Kind
    keys: list[bytes] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)


class TieredStore:
    """The host tier and, if there is one, the disk tier below it."""

    def __init__(self, host: HostTier, disk: SpillTier | None = None) -> None:
        self.host = host
        self.disk = disk
        self._spilling = 0
        # Blocks that an earlier group left in the host may not be on disk yet; there are at most num_slots of them.
        self._to_spill: deque[bytes] = deque(host.keys(), maxlen=max(1, host.num_slots))

    # ---- queries ----

    def place(self, key: bytes) -> Literal["host", "disk"] | None:
        """Returns the nearest tier that has the block."""
        if self.host.has(key):
            return "host"
        return "disk" if self.disk is not None and self.disk.has(key) else None

    def is_kept(self, key: bytes) -> bool:
        """Returns whether the host has the block or is receiving it, so that a store would be wasted."""
        return self.host.has(key) or self.host.is_writing(key)

    def watch(self, on_change: Callable[[bytes], None]) -> None:
        """Has on_change(key) called whenever a tier has begun or ceased to have a block."""
        self.host.on_change = on_change
        if self.disk is not None:
            self.disk.on_change = on_change

    # ---- commands: each returns a move whose places are pinned until complete() ----

    def store(self, blocks: Sequence[tuple[bytes, int]], costs: Sequence[float]) -> TierMove | None:
        """Stores (key, device block) pairs in the host, from the first on, as many as find a slot; the first are kept
        longest.

        costs: of computing each block again. None when no block found a slot.
        """
        move = TierMove("store")
        fitting = list(zip(blocks, costs, strict=True))[: self.host.num_available]
        for (key, block_id), cost in reversed(fitting):
            slot = self.host.prepare_store(key, cost)
            if slot is not None:
                move.keys.append(key)
                move.slots.append(slot)
                move.block_ids.append(block_id)
        return move if move.keys else None

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> TierMove:
        """Loads blocks that the host has into device blocks."""
        move = TierMove("load")
        for key, block_id in zip(keys, block_ids, strict=True):
            pinned = self.host.prepare_load(key)
            assert pinned, "only what the host has is loaded"
            move.keys.append(key)
            move.slots.append(self.host.slot(key))
            move.block_ids.append(block_id)
        return move

    def fetch(self, keys: Sequence[bytes], costs: Sequence[float]) -> TierMove | None:
        """Fetches blocks from the disk into the host, from the first on, as many as find a slot. None when none did."""
        assert self.disk is not None
        move = TierMove("fetch")
        for key, cost in zip(keys, costs, strict=True):
            if not self.disk.prepare_load(key):
                break
            slot = self.host.prepare_store(key, cost)
            if slot is None:
                self.disk.complete_load(key)
                break
            move.keys.append(key)
            move.slots.append(slot)
        return move if move.keys else None

    def spill(self) -> TierMove | None:
        """Copies blocks that recently came to the host to the disk. None when none waits or MAX_SPILLS are in
        flight."""
        if self.disk is None:
            return None
        move = TierMove("spill")
        while self._to_spill and self._spilling < MAX_SPILLS:
            key = self._to_spill.pop()
            if not self.host.has(key) or self.disk.has(key):
                continue
            dropped = self.disk.prepare_store(key)
            if dropped is None:
                continue
            self.host.prepare_load(key)
            self._spilling += 1
            move.keys.append(key)
            move.slots.append(self.host.slot(key))
            move.dropped += dropped
        return move if move.keys else None

    def forget(self, key: bytes) -> None:
        """Makes a block with untrusted content unfindable in every tier. Moves in flight go on."""
        self.host.forget(key)
        if self.disk is not None and self.disk.prepare_load(key):
            self.disk.fail_load(key)

    def forget_all(self) -> None:
        """Makes all blocks unfindable in every tier. Moves in flight go on."""
        stored = self.host.keys()
        for key in stored:
            self.host.forget(key)
        if self.disk is not None:
            self.disk.forget_all()

    def complete(self, move: TierMove, failed: set[int]) -> None:
        """Closes a move that all ranks have carried out. `failed`: indices of keys whose bytes did not arrive on some
        rank."""
        for place, key in enumerate(move.keys):
            self._complete_one(move.kind, key, place in failed)

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
