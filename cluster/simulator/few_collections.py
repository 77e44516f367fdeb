"""Garbage of a simulation: few collections, none of which looks at what lives as long as the run."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COLLECT_EVERY = 2000
"""Requests that have ended. Each leaves a circle of references, some 70 kB of prompts of a thousand tokens."""


@contextmanager
def few_collections() -> Iterator[Callable[[int], None]]:
    """Leaves out what there is, such as the groups of a simulation that was made, and collects what ended requests
    leave once in COLLECT_EVERY: to look when Python would takes a third of the time, and never takes all memory.
    Yields what is told how many have ended."""
    ended = 0

    def told(count: int) -> None:
        nonlocal ended
        ended += count
        if ended >= COLLECT_EVERY:
            ended = 0
            gc.collect()

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield told
    finally:
        gc.enable()
        gc.unfreeze()
