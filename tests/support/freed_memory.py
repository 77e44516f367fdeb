"""Memory that tests have freed goes back to the machine: glibc keeps what threads of in-process ranks leave in pieces,
some GiB after a dozen of captured steps, for which services of other workers then wait."""

import ctypes
import os
import sys
from pathlib import Path

KEPT_BYTES = 2**30
"""Resident memory from which on a process looks for what it can give back."""


def give_back() -> None:
    """Gives back what is free, in a process that holds much; on Linux with glibc."""
    if sys.platform != "linux" or resident_bytes() < KEPT_BYTES:
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """The resident memory of this process, on Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
