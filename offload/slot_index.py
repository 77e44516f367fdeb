"""Which block lies in which slot of a region of host memory, kept in the region itself so that a later group finds it.

Used by the coordinator over RegionLease.index: one key of 16 bytes per slot, zeros where there is none. Moves no bytes.
A kill at any point leaves no key beside another block's bytes: a slot is cleared before any rank writes into it, and
its key is written after every rank has. A key that a kill cut in half is no block's key, so it is never asked for.
"""

import mmap

from offload.block_key import KEY_BYTES

EMPTY = bytes(KEY_BYTES)


def index_bytes(num_slots: int) -> int:
    """The size of the memory that an index of this many slots needs."""
    return num_slots * KEY_BYTES


class SlotIndex:
    """Keeps no view of `memory`, so that it can be closed; not used after that."""

    def __init__(self, memory: mmap.mmap | memoryview, num_slots: int) -> None:
        assert num_slots > 0 and len(memory) >= index_bytes(num_slots)
        self._memory = memory
        self.num_slots = num_slots

    def write(self, slot: int, key: bytes) -> None:
        """The slot holds this block from now on: only after every rank has its bytes, only into a cleared slot."""
        assert len(key) == KEY_BYTES and key != EMPTY
        assert self._read(slot) in (EMPTY, key), "a slot is cleared before it is used again"
        self._store(slot, key)

    def clear(self, slot: int) -> None:
        """The slot holds nothing from now on: before any rank is told to write into it."""
        self._store(slot, EMPTY)

    def items(self) -> list[tuple[int, bytes]]:
        """(slot, key) of every slot that holds a block."""
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
