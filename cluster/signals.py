"""SIGINT, SIGTERM and SIGHUP for the launcher: while starting they raise, while serving they set an event.

A second signal means "now": drains are cut short. Installed anew after Ray, which installs handlers of its own. Python
runs handlers between its own instructions only, and a call into Ray's C++ may wait a minute for a process that the same
signal has ended: StartGuard sees the signal at once, on a thread, and ends what does not end by itself.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 3.0
"""How long after a signal an unfinished start may take to end in order."""


class StopRequested(BaseException):
    """A signal arrived during the start. Not an Exception, so that nothing on the way swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Counts SIGINT, SIGTERM and SIGHUP. Main thread only."""

    def __init__(self) -> None:
        self.raising = True
        self._numbers: list[int] = []
        self._arrived = threading.Event()

    def install(self) -> None:
        for number in NUMBERS:
            signal.signal(number, self._handle)

    def wait(self, timeout_s: float) -> bool:
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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)
        self._arrived.set()
        if self.raising:
            self.raising = False
            raise StopRequested(number)


class StartGuard:
    """Calls `overdue(number)`, on its thread, when PATIENCE_S after a signal the block has not been left; the process
    then ends with status 128 + number, whatever the main thread is in. A context manager around start and end, for
    the main thread; dismiss() when the start is over."""

    def __init__(self, overdue: Callable[[int], None], patience_s: float = PATIENCE_S) -> None:
        self._overdue = overdue
        self._patience_s = patience_s
        self._over = threading.Event()
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._before = -1

    def __enter__(self) -> "StartGuard":
        threading.Thread(target=self._watch, name="tandem-start-guard", daemon=True).start()
        self._before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()

    def dismiss(self) -> None:
        """Signals are the main thread's alone from here on. Idempotent."""
        if not self._over.is_set():
            self._over.set()
            signal.set_wakeup_fd(self._before)
            self._writing.close()  # ends the thread

    def _watch(self) -> None:
        with self._reading:
            number = self._wait()
        if number is None or self._over.wait(self._patience_s):
            return
        try:
            self._overdue(number)
        finally:
            os._exit(128 + number)

    def _wait(self) -> int | None:
        """The number of the first signal that concerns us; None when the guard was dismissed."""
        while byte := self._reading.recv(1):
            if byte[0] in NUMBERS:
                return byte[0]
        return None
