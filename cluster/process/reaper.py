"""`tandem reaper`: the process between supervisor and launcher, in which each end of a service ends.

It adopts the launcher's orphans, ends a start that does not end by itself after a signal, and ends and names whatever
is left once the launcher has ended, was killed, or has lost its supervisor.
"""

import logging
import os
import select
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import setproctitle

from tandem.cluster.process.leftovers import Leftovers, reap
from tandem.cluster.process.load_progress import wipe
from tandem.cluster.process.run_files import sweep
from tandem.cluster.process.signals import NUMBERS, TOGETHER_S

log = logging.getLogger("tandem.launcher")
PATIENCE_S = 3.0
"""Time that an unfinished start has, after a signal, to end in order."""
GRACE_S = 1.0
"""Time that processes may outlive a launcher that ended in order before they are killed."""
INTERRUPTED = "interrupted before the service was up"


class StatusPipe:
    """The launcher's end of the pipe to the reaper: one line for each state of its life that the reaper acts on.
    supervisor: the process that shells and service managers know, and signal."""

    def __init__(self, descriptor: int, supervisor: int | None = None) -> None:
        self._descriptor = descriptor
        self.supervisor = supervisor

    def begun(self) -> None:
        """Reports that processes are about to be started: the end of the service gets a line from here on."""
        self._write("begun")

    def started(self) -> None:
        """Reports that the service is up: after a signal it may take as long as requests in flight do."""
        self._write("started")

    def interrupted(self) -> None:
        """Reports that INTERRUPTED is printed."""
        self._write("interrupted")

    def stopping(self) -> None:
        """Reports the begin of the end; the time that it took counts from here."""
        self._write("stopping")

    def finished(self) -> None:
        """Reports that the exit status to come is meant so. Ray ends a process whose raylet dies with status 1."""
        self._write("finished")

    def abort(self, why: str) -> None:
        """Asks for the end of the launcher and all else: its main thread hangs in a call that cannot return."""
        self._write(f"abort={why}")

    def _write(self, line: str) -> None:
        with suppress(OSError):
            os.write(self._descriptor, f"{line}\n".encode())


class Reaper:
    """The launcher's parent, until everything below it has ended.

    status: reading end of the launcher's StatusPipe. signals: reading end of a pipe to which only the supervisor
    writes, a byte for each signal; its end is the supervisor's. patience_s: PATIENCE_S, less in tests.
    """

    def __init__(self, launcher: int, status: int, signals: int, patience_s: float) -> None:
        self._launcher = launcher
        self._status = status
        self._signals = signals
        self._patience_s = patience_s
        self._states: dict[str, tuple[str, float]] = {}
        self._unread = b""
        self._wait_status: int | None = None
        self._first: int | None = None
        self._overdue_s: float | None = None

    def run(self) -> NoReturn:
        """Exits with the launcher's status; 128 + the first signal, else 1, if the launcher did not end in order."""
        setproctitle.setproctitle("tandem reaper")
        os.chdir("/")
        signal.signal(signal.SIGCHLD, self._reap)
        while (why := self._reason()) is None:
            ready, _, _ = select.select([self._status, self._signals], [], [], self._patience())
            if self._signals in ready and not self._pass_on(os.read(self._signals, 64)):
                why = "the supervisor was killed"
                break
            if self._status in ready and not self._take(os.read(self._status, 4096)):
                sys.exit(self._finish(self._wait()))
        self._end(why)
        sys.exit(self._failure())

    def _reason(self) -> str | None:
        """The reason for ending the launcher now; None while it may run."""
        if "abort" in self._states:
            return self._states["abort"][0]
        return INTERRUPTED if self._patience() == 0 else None

    def _patience(self) -> float | None:
        """Seconds until a start is overdue; None: no signal has come, or the service is up."""
        if self._overdue_s is None or "started" in self._states:
            return None
        return max(0.0, self._overdue_s - time.monotonic())

    def _pass_on(self, numbers: bytes) -> bool:
        """Sends signals to the launcher. False at the pipe's end: the supervisor is gone."""
        for number in numbers:
            if self._first is None:
                self._first, self._overdue_s = number, time.monotonic() + self._patience_s
            if self._wait_status is None:
                with suppress(ProcessLookupError):
                    os.kill(self._launcher, number)
        return bool(numbers)

    def _take(self, data: bytes) -> bool:
        """Notes the launcher's states and when they came. False at the pipe's end: the launcher is gone."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            state, _, detail = line.decode().partition("=")
            self._states.setdefault(state, (detail, time.monotonic()))
        return bool(data)

    def _reap(self, number: int, frame: FrameType | None) -> None:
        ended = reap()
        if self._launcher in ended:  # one assignment: another SIGCHLD may come between reading and writing
            self._wait_status = ended[self._launcher]

    def _wait(self) -> int:
        """The launcher's exit status; negative: a signal, or a crash that is one."""
        with suppress(ChildProcessError):  # _reap was faster
            self._wait_status = os.waitpid(self._launcher, 0)[1]
        assert self._wait_status is not None
        return os.waitstatus_to_exitcode(self._wait_status)

    def _finish(self, status: int) -> int:
        if status >= 0 and "finished" in self._states:
            self._end(None, GRACE_S)
            return status
        # A signal to all processes may end the launcher before the supervisor has passed on its own.
        if select.select([self._signals], [], [], TOGETHER_S)[0]:
            self._pass_on(os.read(self._signals, 64))
        elif -status in NUMBERS:
            self._pass_on(bytes([-status]))
        died = f"the launcher died ({signal.Signals(-status).name if status < 0 else f'exit status {status}'})"
        self._end(INTERRUPTED if self._patience() is not None else died)
        return self._failure()

    def _failure(self) -> int:
        return 1 if self._first is None else 128 + self._first

    def _end(self, why: str | None, grace_s: float = 0.0) -> None:
        """Ends everything and prints the last line. why: None for a launcher that ended in order."""
        _, began_s = self._states.get("stopping", ("", time.monotonic()))
        leftovers = clear_up(grace_s)
        if why is not None:
            wipe()
            if why != INTERRUPTED or "interrupted" not in self._states:
                print_line(why)
        if why is not None or "begun" in self._states or leftovers.killed or leftovers.alive:
            print_line(leftovers.stopped_line(time.monotonic() - began_s))


def clear_up(grace_s: float) -> Leftovers:
    """Ends every descendant of this process, then removes the files of launchers that have ended."""
    leftovers = Leftovers()
    leftovers.end(grace_s)
    sweep()
    return leftovers


def print_line(text: str) -> None:
    """Prints a line for the user, and logs it; a terminal that is gone is no error."""
    log.info("%s", text)
    with suppress(OSError, UnicodeError):
        print(f"tandem: {text}", flush=True)
