"""EngineLoop: drives one engine, in the coordinator's thread, in `tandem run-batch` and in LLM.

    [ inbox.take -> engine.turn ]* while there is work; [ inbox.take -> due transfers -> inbox.wait ]* otherwise

The three differ only in where requests come from (Inbox) and where tokens go (the engine's OutputSink). Next:
engine.py.
"""

import math
import time
from collections.abc import Callable
from typing import Protocol

from tandem.workers.engine.engine import Engine

RESULT_WAIT_S = 0.01
"""The longest wait for a result before requests and aborts are taken in again: who is refused hears of it so soon."""
COPY_POLL_S = 0.005
"""The same without work, while transfers are in flight."""
NO_PROGRESS_WAIT_S = 0.001


class Inbox(Protocol):
    """The source of requests, aborts and calls. Used by the loop's thread only."""

    def take(self, engine: Engine) -> None:
        """Applies to the engine all that has arrived. An exception ends the loop."""
        ...

    def wait(self, timeout_s: float | None) -> None:
        """Returns once something has arrived, or after timeout_s; None: no limit."""
        ...


class EngineLoop:
    """One engine and its inbox. run() belongs to one thread; the seconds may be read from any."""

    def __init__(self, engine: Engine, inbox: Inbox, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._inbox = inbox
        self._clock = clock
        self._progress_s = self._turned_s = clock()
        self._is_busy = False
        self._has_worked = False

    def run(self, until: Callable[[], bool]) -> None:
        """Turns the engine until the condition holds, which is looked at between turns."""
        engine, inbox = self._engine, self._inbox
        while not until():
            inbox.take(engine)
            self._turned_s = self._clock()
            self._note_work(engine.has_work())
            if not self._is_busy:
                if engine.is_copying or engine.idle_s == 0.0:
                    engine.turn(0.0)
                idle_s = COPY_POLL_S if engine.is_copying else engine.idle_s
                inbox.wait(None if math.isinf(idle_s) else idle_s)
            elif engine.turn(RESULT_WAIT_S):
                self._has_worked = True
                self._progress_s = self._clock()
            else:
                inbox.wait(NO_PROGRESS_WAIT_S)  # the work waits for something

    def flush(self, timeout_s: float) -> None:
        """Waits, after run(), at most timeout_s for KV on its way to lower tiers, unless requests are unfinished."""
        self._engine.flush_transfers(timeout_s)

    # ---- from any thread ----

    @property
    def is_busy(self) -> bool:
        """True if the engine had work in the last turn."""
        return self._is_busy

    def stalled_s(self) -> float:
        """Seconds since a turn last made progress while there is work; 0 without work."""
        return self._clock() - self._progress_s if self._is_busy else 0.0

    def stuck_s(self) -> float:
        """Seconds since the loop last came round while there is work; slow ranks do not hold it up."""
        return self._clock() - self._turned_s if self._is_busy else 0.0

    def has_worked(self) -> bool:
        """Returns whether a turn has made progress since the last call."""
        worked, self._has_worked = self._has_worked, False
        return worked

    def _note_work(self, is_busy: bool) -> None:
        """Notes whether there is work: progress is due from the moment at which there is some."""
        if is_busy and not self._is_busy:
            self._progress_s = self._clock()
        self._is_busy = is_busy
