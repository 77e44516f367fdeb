"""Threads of torch for small operations: one.

Each operation that several threads share ends when the slowest is done. Where other processes have the cores too, that
is after one or more of their time slices, and thousands of operations of a millisecond take minutes. Products of
matrices are few and long, and keep all threads.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Makes torch compute with one thread until the end of the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
