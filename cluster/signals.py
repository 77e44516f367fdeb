"""SIGINT and SIGTERM for the launcher: while starting they raise, while serving they set an event.

A second signal means "now": drains are cut short. Installed anew after Ray, which installs handlers of its own.
"""

import signal
import threading
from types import FrameType


class StopRequested(BaseException):
    """A signal arrived during the start. Not an Exception, so that nothing on the way swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Counts SIGINT, SIGTERM and SIGHUP. Main thread only."""

    def __init__(self) -> None:
        self.count = 0
        self.raising = True
        self._arrived = threading.Event()

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def wait(self, timeout_s: float) -> bool:
        """True when a signal has arrived."""
        return self._arrived.wait(timeout_s)

    @property
    def is_urgent(self) -> bool:
        return self.count > 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._arrived.set()
        if self.raising:
            self.raising = False
            raise StopRequested(number)
