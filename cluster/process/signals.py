"""SIGINT, SIGTERM and SIGHUP in the launcher: an exception during the start, an event while it serves.

All threads block the three, and one thread waits for them, so that handlers which Ray sets for SIGTERM never run. The
main thread then gets CARRIER. Python runs handlers between its own instructions only; a start that hangs in a call is
ended by the reaper.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CARRIER = signal.SIGRTMIN + 7 if sys.platform == "linux" else signal.SIGUSR2
"""Reaches the main thread after one of NUMBERS has arrived."""
AGAIN_S = 0.05
TOGETHER_S = 0.25
"""A service manager signals all processes: a signal of its own to the launcher, and the same one through the reaper
within this time, count as one."""


class StopRequested(BaseException):
    """A signal during the start; a BaseException, so that handlers of Exception let it pass."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def is_ignored(number: signal.Signals) -> bool:
    """True if the signal is ignored on purpose: SIGHUP under nohup. SIGINT, which a shell script ignores in commands
    that it starts with `&`, is not."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def unblock() -> None:
    """Unblocks NUMBERS in a child process before exec; it inherits the mask of the launcher's threads."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


class Signals:
    """The signals that have arrived. The main thread installs it and waits; raising: whether one interrupts it."""

    def __init__(self) -> None:
        self.raising = True
        self._numbers: list[int] = []
        self._arrived = threading.Event()

    def install(self) -> None:
        """Blocks NUMBERS and starts the thread that takes them. Called once, before other threads inherit the mask."""
        numbers = {number for number in NUMBERS if not is_ignored(number)}
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        signal.signal(CARRIER, self._handle)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._raised_in_vain
        threading.Thread(target=self._take, args=(numbers,), name="tandem-signals", daemon=True).start()

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the first signal. False after timeout_s without one."""
        return self._arrived.wait(timeout_s)

    def first(self) -> int | None:
        """The number of the first signal."""
        return self._numbers[0] if self._numbers else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delays the exception for a signal to the end of the block, for imports, which cannot be undone half-way."""
        raising, self.raising = self.raising, False
        yield
        self.raising = raising
        if raising and (number := self.first()) is not None:
            self.raising = False
            raise StopRequested(number)

    @property
    def is_urgent(self) -> bool:
        """True once a second signal has arrived: drains are cut short."""
        return len(self._numbers) > 1

    def _take(self, numbers: set[signal.Signals]) -> None:
        while True:
            self._numbers.append(_next_of(numbers))
            self._arrived.set()
            self._carry()

    def _carry(self) -> None:
        thread_id = threading.main_thread().ident
        assert thread_id is not None
        signal.pthread_kill(thread_id, CARRIER)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.raising:
            self.raising = False
            raise StopRequested(self._numbers[0])

    def _raised_in_vain(self, unraisable: Any) -> None:
        """Raises StopRequested again soon: the main thread was in a finalizer, or a callback of fork, which drop it."""
        if isinstance(unraisable.exc_value, StopRequested):
            self.raising = True
            threading.Timer(AGAIN_S, self._carry).start()
        else:
            self._unraisable(unraisable)


def _next_of(numbers: set[signal.Signals]) -> int:
    """Waits for a signal. The reaper's copy of one that came from elsewhere is taken with it."""
    if sys.platform != "linux":
        return signal.sigwait(numbers)
    arrived = signal.sigwaitinfo(numbers)
    if arrived.si_pid != os.getppid():
        arrived = signal.sigtimedwait(numbers, TOGETHER_S) or arrived
    return arrived.si_signo
