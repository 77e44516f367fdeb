"""Pages of new memory that are provided at once: no faults afterwards, bytes as they were."""

import ctypes
import mmap
import resource
import sys

import pytest

from tandem.parallel.stored.fresh_pages import POPULATE_WRITE, provide_pages

PAGES = 2048


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def kernel_provides() -> bool:
    if sys.platform != "linux":
        return False
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        memory.madvise(POPULATE_WRITE)
    except OSError:
        return False
    return True


@pytest.mark.skipif(not kernel_provides(), reason="Linux before 5.14")
def test_memory_is_written_without_faults() -> None:
    memory = mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    provide_pages(address + 1, len(memory) - 1)  # all but the first page
    before = faults()
    ctypes.memset(address + mmap.PAGESIZE, 1, len(memory) - mmap.PAGESIZE)
    assert faults() - before < PAGES / 10


def test_bytes_stay_and_parts_of_pages_are_left_alone() -> None:
    memory = bytearray(b"x" * (5 * mmap.PAGESIZE))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for first, size in ((0, len(memory)), (3, 10), (1, 2 * mmap.PAGESIZE), (7, 0)):
        provide_pages(address + first, size)
    assert memory == b"x" * len(memory)
