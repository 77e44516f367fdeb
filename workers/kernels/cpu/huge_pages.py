"""Memory for weights that a step reads from end to end, in huge pages where the system grants them.

A page of 4 KiB ends what the processor reads ahead, and its place is looked up anew: a step of one row reads 4-bit
weights some tenth faster from pages of 2 MiB, and a load spares most page faults. A weight is often smaller than such a
page, so weights share pieces of memory; a piece is freed with its last weight.
"""

import mmap
from contextlib import suppress
from threading import Lock

import torch

HUGE_PAGE = 2 * 2**20
PIECE = 32 * HUGE_PAGE
CACHE_LINE = 64


class HugePages:
    """Gives memory from pieces that it asks the system to hold in huge pages."""

    def __init__(self, piece_bytes: int = PIECE) -> None:
        self._piece_bytes = piece_bytes
        self._left = torch.empty(0, dtype=torch.uint8)
        self._lock = Lock()

    def zeros(self, size: int) -> torch.Tensor:
        """Returns `size` bytes of zeros, uint8, that begin at a cache line."""
        taken = -(-size // CACHE_LINE) * CACHE_LINE
        if taken >= self._piece_bytes // 2:
            return _piece(taken)[:size]
        with self._lock:
            if len(self._left) < taken:
                self._left = _piece(self._piece_bytes)
            found, self._left = self._left[:size], self._left[taken:]
        return found


WEIGHTS = HugePages()
"""Where kernels hold weights."""


def _piece(size: int) -> torch.Tensor:
    """Returns at least `size` bytes of zeros from the start of a huge page on."""
    rounded = -(-size // HUGE_PAGE) * HUGE_PAGE
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, rounded + HUGE_PAGE, **flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + rounded]
