"""Keeps the interpreter free for a gateway's event loop: the turns of its threads, and collections of garbage.

It changes the process, so only the gateway deployment calls it, once that is built (gateway_replica.py).
"""

import asyncio
import gc
import sys
from collections.abc import Callable
from typing import Final

SWITCH_S: Final = 0.0005
"""A thread that computes gives way to the event loop after this time. With Python's own 5 ms, at each of the few waits
that a token passes, it would be late by more than a step of a small model takes."""
PERIOD_S: Final = 30.0
MOST_PUT_OFF: Final = 20
NEVER: Final = 2**31 - 1


def give_way_soon() -> None:
    """Lets the event loop have the interpreter soon after it asks, while text is worked on beside it."""
    sys.setswitchinterval(SWITCH_S)


class QuietCollections:
    """Full collections of garbage between text work, not in the middle of it: one looks at every object, and a parsed
    body may have millions. Young objects are collected as ever. is_busy: whether text is worked on."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._put_off = 0

    def begin(self) -> None:
        """Takes over. What there is by now stays, and is never looked at again."""
        gc.freeze()
        youngest, young, _ = gc.get_threshold()
        gc.set_threshold(youngest, young, NEVER)

    async def run(self) -> None:
        """Looks every PERIOD_S, until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self.look()

    def look(self) -> None:
        """Collects, unless text is worked on; then too, once that was so MOST_PUT_OFF times."""
        if self._is_busy() and self._put_off < MOST_PUT_OFF:
            self._put_off += 1
            return
        self._put_off = 0
        gc.collect()
