"""SIGINT, SIGTERM and SIGHUP for the launcher: while starting they raise, while serving they set an event.

A second signal means "now": drains are cut short. The three are blocked in every thread and taken by a thread of ours
(sigwait): Ray's C++ and Python set handlers of their own for SIGTERM while Ray starts, and those never run. The main
thread then gets a signal that nobody else uses. Python runs handlers between its own instructions only: what does not
end by itself is ended by the supervisor.
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
CARRIER = signal.SIGRTMIN + 7
"""Tells the main thread that one of NUMBERS has arrived."""
AGAIN_S = 0.05
TOGETHER_S = 0.25
"""A service manager sends a signal to all: one that does not come from the supervisor is the same as one of the
supervisor's within this time."""


class StopRequested(BaseException):
    """A signal arrived during the start. Not an Exception, so that nothing on the way swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def is_ignored(number: signal.Signals) -> bool:
    """Under nohup SIGHUP is. A shell script ignores SIGINT for what it starts with `&`, which is not meant for us."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def unblock() -> None:
    """For a child process, before it executes its program: it inherits what the launcher's threads block."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


class Signals:
    """Counts SIGINT, SIGTERM and SIGHUP. Main thread only, but for on_first()."""

    def __init__(self) -> None:
        self.raising = True
        self._numbers: list[int] = []
        self._arrived = threading.Event()

    def install(self) -> None:
        """Once, before there are other threads: they inherit what this one blocks."""
        numbers = {number for number in NUMBERS if not is_ignored(number)}
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        signal.signal(CARRIER, self._handle)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._raised_in_vain
        threading.Thread(target=self._take, args=(numbers,), name="tandem-signals", daemon=True).start()

    def wait(self, timeout_s: float | None) -> bool:
        """True when a signal has arrived."""
        return self._arrived.wait(timeout_s)

    def first(self) -> int | None:
        """The number of the first signal."""
        return self._numbers[0] if self._numbers else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal that arrives inside is raised at the end: for imports, which nobody can take down half-way."""
        raising, self.raising = self.raising, False
        yield
        self.raising = raising
        if raising and (number := self.first()) is not None:
            self.raising = False
            raise StopRequested(number)

    @property
    def is_urgent(self) -> bool:
        return len(self._numbers) > 1

    def _take(self, numbers: set[signal.Signals]) -> None:
        supervisor = os.getppid()
        while True:
            arrived = signal.sigwaitinfo(numbers)
            if arrived.si_pid != supervisor:
                arrived = signal.sigtimedwait(numbers, TOGETHER_S) or arrived
            self._numbers.append(arrived.si_signo)
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
        """The main thread was where Python cannot pass an exception on (a finalizer, a callback of fork): once more."""
        if isinstance(unraisable.exc_value, StopRequested):
            self.raising = True
            threading.Timer(AGAIN_S, self._carry).start()
        else:
            self._unraisable(unraisable)
