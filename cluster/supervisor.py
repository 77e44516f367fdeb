"""The process that the user's shell or service manager knows as `tandem serve`; the launcher is its child.

It never loads Ray, so it hears every signal, and its exit status is its own: the launcher may be inside a call of Ray's
C++ that holds the interpreter lock while it waits for a process that the same signal has ended, or may crash there.
It passes signals on, ends a start that does not end by itself, and clears up after a launcher that died.
"""

import ctypes
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from cluster.loading_line import wipe
from cluster.reaper import orphans
from cluster.run_files import remove_run_file
from cluster.signals import NUMBERS, is_ignored
from cluster.strays import Strays

PATIENCE_S = 3.0
"""How long after a signal an unfinished start may take to end in order."""
ROUNDS = 10
PR_SET_PDEATHSIG = 1
INTERRUPTED = "interrupted before the service was up"


class Told:
    """The launcher's end: what the supervisor must know to clear up."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def folder(self, folder: Path) -> None:
        """The private folder: processes of a private Ray run in it."""
        self._say(f"folder={folder}")

    def reaper(self, pid: int) -> None:
        """It ends by itself."""
        self._say(f"reaper={pid}")

    def run_file(self, path: Path) -> None:
        self._say(f"run_file={path}")

    def started(self) -> None:
        """From here on a signal may take as long as requests in flight do."""
        self._say("started=")

    def interrupted(self) -> None:
        """Our user has been told that the start is over; what follows is taking it down."""
        self._say("interrupted=")

    def over(self) -> None:
        """Everything is taken down, or nothing was begun: the exit status that follows is meant so. Ray ends a process
        whose raylet dies under its hands with status 1, without asking it."""
        self._say("over=")

    def end(self, why: str) -> None:
        """Asks to be ended, with everything else: the launcher's main thread hangs in what cannot end any more."""
        self._say(f"end={why}")

    def _say(self, line: str) -> None:
        with suppress(OSError):
            os.write(self._descriptor, f"{line}\n".encode())


def split() -> Told:
    """Forks. Returns in the child, which is to be the launcher; the parent ends with the child's exit status.

    Before there are threads. The child has a session of its own: a terminal's Ctrl-C reaches it through us, once. A
    signal that comes now waits until we are there to pass it on.
    """
    reading, writing = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    child = os.fork()
    if child:
        os.close(writing)
        Supervisor(child, reading).run(mask)
    os.close(reading)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return Told(writing)


class Supervisor:
    """The parent, until the child is gone. `told` is the reading end of a pipe that only the child writes to."""

    def __init__(self, child: int, told: int, patience_s: float = PATIENCE_S) -> None:
        self._child = child
        self._told = told
        self._patience_s = patience_s
        self._facts: dict[str, str] = {}
        self._unread = b""
        self._first: int | None = None
        self._overdue_s: float | None = None
        self._cleared = False

    def run(self, mask: Iterable[int]) -> NoReturn:
        """mask: the signals that are blocked from here on."""
        woken, waking = os.pipe()
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        for number in NUMBERS:
            if not is_ignored(number):
                signal.signal(number, _only_wake)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        while True:
            ready, _, _ = select.select([self._told, woken], [], [], self._patience())
            if woken in ready:
                self._pass_on(os.read(woken, 64))
            if self._told in ready and not self._hear(os.read(self._told, 4096)):
                break
            if not self._cleared and (why := self._facts.get("end") or (self._patience() == 0 and INTERRUPTED)):
                self._end_all(why)
        sys.exit(self._status(self._wait()))

    def _patience(self) -> float | None:
        """Seconds until a start is overdue; None: it is not to be ended."""
        if self._overdue_s is None or "started" in self._facts or self._cleared:
            return None
        return max(0.0, self._overdue_s - time.monotonic())

    def _pass_on(self, numbers: bytes) -> None:
        for number in numbers:
            if number in NUMBERS:
                if self._first is None:
                    self._first, self._overdue_s = number, time.monotonic() + self._patience_s
                with suppress(ProcessLookupError):
                    os.kill(self._child, number)

    def _hear(self, data: bytes) -> bool:
        """False at the end: the child is gone."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            name, _, fact = line.decode().partition("=")
            self._facts[name] = fact
        return bool(data)

    def _wait(self) -> int:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        except ChildProcessError:  # waited for as one of those that we have killed
            return -signal.SIGKILL

    def _status(self, status: int) -> int:
        """Ours, when the launcher ended with `status` (negative: a signal, or a crash that is one)."""
        if status >= 0 and "over" in self._facts:
            return status
        if not self._cleared:
            died = f"the launcher died ({signal.Signals(-status).name if status < 0 else f'exit status {status}'})"
            self._end_all(INTERRUPTED if self._patience() is not None else died)
        return 1 if self._first is None else 128 + self._first

    def _end_all(self, why: str) -> None:
        """Ends the launcher and everything that it has started."""
        self._cleared = True
        started_s = time.monotonic()
        strays = Strays()
        for _ in range(ROUNDS):  # one that was just being started shows up in a later round
            if not (found := self._everyone()):
                break
            strays.end(found, grace_s=0.0)
        folder, run_file = self._facts.get("folder"), self._facts.get("run_file")
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if run_file is not None:
            remove_run_file(Path(run_file))
        wipe()
        known = why == INTERRUPTED and "interrupted" in self._facts
        for line in ([] if known else [why]) + [strays.stopped_line(time.monotonic() - started_s)]:
            with suppress(OSError):
                print(f"tandem: {line}", flush=True)

    def _everyone(self) -> list[psutil.Process]:
        children = [p for p in psutil.Process().children(recursive=True) if _runs(p)]
        folder, reaper = self._facts.get("folder"), int(self._facts.get("reaper", -1))
        found = {*children, *(orphans(Path(folder)) if folder is not None else ())}
        return [process for process in found if process.pid != reaper]


def _only_wake(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor has it by now."""


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
