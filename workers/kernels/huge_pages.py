"""Memory for weights that a step reads from end to end, in huge pages where the system grants them.

The processor looks up the place of each page of 4 KiB anew and reads ahead no further: on virtual machines, where a
look-up is two, a step of one row multiplies 4-bit weights 1.1 to 1.6 times as fast from pages of 2 MiB. A weight is
often smaller than such a page, so weights share pieces of memory. A piece is freed with its last weight, but for the
one that the next weight begins in.
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

    @torch.inference_mode(False)  # who shares a piece may be in another mode
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
"""The memory that kernels hold weights in."""
STACKS = HugePages()
"""The memory of stacks of experts: pieces of their own, as those of WEIGHTS also have the forms of single experts,
which are freed when they have been stacked."""


def _piece(size: int) -> torch.Tensor:
    """Returns at least `size` bytes of zeros from the start of a huge page on."""
    rounded = -(-size // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, rounded + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + rounded]
