"""Memory that is freed goes back to the system, in a process that quantizes.

glibc keeps what programs free, up to 32 MB of one piece, for later use. Layers, sums over their inputs and what is
computed of them have many sizes, so that pieces of one do not fit the next, and the peak was a layer's size higher.
"""

import ctypes
from typing import Final

MMAP_THRESHOLD: Final = -3
"""M_MMAP_THRESHOLD of <malloc.h>."""
LEAST_BYTES: Final = 2**22


def free_at_once() -> None:
    """Makes pieces of LEAST_BYTES and more the system's as soon as they are freed, from now on. Does nothing where the
    C library has no mallopt()."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LEAST_BYTES)
