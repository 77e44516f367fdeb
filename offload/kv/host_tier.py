"""The host tier's keys and slots: the slot of each block, and which slots are free or pinned. Moves no bytes.

Called by tiered_store.py. With a SlotIndex the keys of complete slots are also written into shared memory and cleared
before a slot is used again, so that a group that starts after a crash finds complete blocks only.

    free --prepare_store--> writing --complete_store--> stored (findable, evictable) <--> pinned (loads in flight)
      ^                        | fail_store                |  eviction, forget
      +------------------------+---------------------------+
"""

from collections.abc import Callable, Iterable

from tandem.offload.kv.eviction import EvictionPolicy
from tandem.offload.kv.slot_index import SlotIndex


class NoIndex:
    """The SlotIndex of memory that ends with its owner: it stores nothing."""

    def write(self, slot: int, key: bytes) -> None:
        del slot, key

    def clear(self, slot: int) -> None:
        del slot


class HostTier:
    """A KVTier over slots 0..num_slots-1. `found`: (slot, key) of complete blocks that an earlier owner left.
    on_change: is told of each key that can be found from now on, or no longer."""

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy,
        index: SlotIndex | None = None,
        found: Iterable[tuple[int, bytes]] = (),
    ) -> None:
        self.num_slots = num_slots
        self._policy = policy
        self._index: SlotIndex | NoIndex = NoIndex() if index is None else index
        self._slots: dict[bytes, int] = {}
        self._costs: dict[bytes, float] = {}
        self._writing: dict[bytes, int] = {}
        self._pins: dict[bytes, int] = {}
        self._doomed: set[bytes] = set()  # among _pins: no longer findable, dropped with the last pin
        self.on_change: Callable[[bytes], None] | None = None
        for slot, key in found:
            if key in self._slots:
                self._index.clear(slot)
                continue
            self._slots[key], self._costs[key] = slot, 1.0
            self._policy.add(key, 1.0)
        held = set(self._slots.values())
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in held]

    # ---- queries ----

    def has(self, key: bytes) -> bool:
        return key in self._slots and key not in self._doomed

    def is_writing(self, key: bytes) -> bool:
        return key in self._writing

    def slot(self, key: bytes) -> int:
        """Returns the slot of a stored block."""
        return self._slots[key]

    def keys(self) -> list[bytes]:
        """Returns the keys of all stored blocks."""
        return list(self._slots)

    @property
    def num_stored(self) -> int:
        return len(self._slots)

    @property
    def num_available(self) -> int:
        """The number of slots that prepare_store could give out now."""
        return len(self._free) + len(self._policy)

    # ---- commands ----

    def prepare_store(self, key: bytes, cost: float) -> int | None:
        """Returns a slot for a new block. None when the block is already here or every slot is in use.

        cost: of computing the block again, for the eviction policy.
        """
        if key in self._slots or key in self._writing:
            return None
        if not self._free and not self._evict():
            return None
        slot = self._free.pop()
        self._writing[key] = slot
        self._costs[key] = cost
        return slot

    def complete_store(self, key: bytes) -> None:
        slot = self._writing.pop(key)
        self._slots[key] = slot
        self._index.write(slot, key)
        self._policy.add(key, self._costs[key])
        self._tell(key)

    def fail_store(self, key: bytes) -> None:
        self._free.append(self._writing.pop(key))
        del self._costs[key]

    def prepare_load(self, key: bytes) -> bool:
        if not self.has(key):
            return False
        pins = self._pins.get(key, 0)
        if not pins:
            self._policy.remove(key)
        self._pins[key] = pins + 1
        return True

    def complete_load(self, key: bytes) -> None:
        pins = self._pins[key] - 1
        if pins:
            self._pins[key] = pins
            return
        del self._pins[key]
        if key in self._doomed:
            self._doomed.remove(key)
            self._policy.forget(key)
            self._drop(key)
        else:
            self._policy.add(key, self._costs[key])

    def fail_load(self, key: bytes) -> None:
        """Forgets the block at once; its slot becomes free with the last pin."""
        self._doom(key)
        self.complete_load(key)

    def forget(self, key: bytes) -> None:
        """Forgets a stored block that must not be read any more; no effect on other keys."""
        if self.prepare_load(key):
            self.fail_load(key)

    # ---- inside ----

    def _doom(self, key: bytes) -> None:
        self._doomed.add(key)
        self._index.clear(self._slots[key])
        self._tell(key)

    def _evict(self) -> bool:
        key = self._policy.victim()
        if key is None:
            return False
        self._drop(key)
        return True

    def _drop(self, key: bytes) -> None:
        slot = self._slots.pop(key)
        del self._costs[key]
        self._index.clear(slot)
        self._free.append(slot)
        self._tell(key)

    def _tell(self, key: bytes) -> None:
        if self.on_change is not None:
            self.on_change(key)

    # ---- invariants, for tests ----

    def check_invariants(self) -> None:
        """Checks that free, writing and stored slots are all slots, once each, and that unpinned stored blocks are
        evictable."""
        slots = [*self._free, *self._writing.values(), *self._slots.values()]
        assert sorted(slots) == list(range(self.num_slots)), "free + writing + stored != all slots"
        assert not self._writing.keys() & self._slots.keys(), "a block is written and stored"
        assert self._pins.keys() <= self._slots.keys(), "a pin on a block that is not here"
        assert self._doomed <= self._pins.keys(), "a block that should be gone"
        assert len(self._policy) == len(self._slots) - len(self._pins), "evictable != stored - pinned"
        assert self._costs.keys() == self._writing.keys() | self._slots.keys()
