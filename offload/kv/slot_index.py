"""The key of each slot of a region of host memory, kept in the region itself so that a later group can recover it.

The coordinator uses it over RegionLease.index: one key of 16 bytes per slot, zeros for an empty slot. A kill at any
point leaves no key beside another block's bytes: a slot is cleared before any rank writes into it, and its key is
written after every rank has. A key that a kill tore in half matches no block, so it is never looked up.
"""

import mmap

from tandem.offload.kv.block_key import KEY_BYTES

EMPTY = bytes(KEY_BYTES)


def index_bytes(num_slots: int) -> int:
    """Returns the size of the memory that an index of this many slots needs."""
    return num_slots * KEY_BYTES


class SlotIndex:
    """The keys of num_slots slots in `memory`. It keeps no view of the memory, which can be closed; unusable after
    that."""

    def __init__(self, memory: mmap.mmap | memoryview, num_slots: int) -> None:
        assert num_slots > 0 and len(memory) >= index_bytes(num_slots)
        self._memory = memory
        self.num_slots = num_slots

    def write(self, slot: int, key: bytes) -> None:
        """Records the block in a cleared slot. Call it only after every rank has written its bytes."""
        assert len(key) == KEY_BYTES and key != EMPTY
        assert self._read(slot) in (EMPTY, key), "a slot is cleared before it is used again"
        self._store(slot, key)

    def clear(self, slot: int) -> None:
        """Marks the slot as empty. Call it before any rank is ordered to write into the slot."""
        self._store(slot, EMPTY)

    def items(self) -> list[tuple[int, bytes]]:
        """Returns (slot, key) of every slot that holds a block."""
        everything = bytes(self._memory[: index_bytes(self.num_slots)])
        keys = (everything[start : start + KEY_BYTES] for start in range(0, len(everything), KEY_BYTES))
        return [(slot, key) for slot, key in enumerate(keys) if key != EMPTY]

    def _read(self, slot: int) -> bytes:
        start = self._start(slot)
        return bytes(self._memory[start : start + KEY_BYTES])

    def _store(self, slot: int, key: bytes) -> None:
        start = self._start(slot)
        self._memory[start : start + KEY_BYTES] = key

    def _start(self, slot: int) -> int:
        assert 0 <= slot < self.num_slots
        return slot * KEY_BYTES
