"""The process that shells and service managers know as `tandem serve`, and the two forks that make the others.

    supervisor -> reaper -> launcher -> Ray, Redis, host tier

The supervisor passes signals down and has the exit status. It never loads Ray, whose C++ may hold the interpreter lock
for seconds or crash. If the reaper is killed, the supervisor does its work.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import psutil

from tandem.cluster.process.leftovers import reap
from tandem.cluster.process.load_progress import wipe
from tandem.cluster.process.prctl import adopt_orphans, end_with_parent
from tandem.cluster.process.reaper import PATIENCE_S, Reaper, StatusPipe, clear_up, print_line
from tandem.cluster.process.signals import NUMBERS, is_ignored


def split(patience_s: float = PATIENCE_S) -> StatusPipe:
    """Forks twice, before there are threads. Returns in the launcher only; the others exit when it has ended.

    Reaper and launcher have sessions of their own: a terminal's Ctrl-C reaches the launcher through the supervisor,
    once. A signal that comes during the forks is passed on after them.
    """
    own = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    signals, passing = os.pipe()
    inherited = {child.pid for child in psutil.Process().children()}
    adopt_orphans()
    if reaper := os.fork():
        os.close(signals)
        supervise(reaper, passing, inherited)
    os.close(passing)
    os.setsid()
    adopt_orphans()
    status, writing = os.pipe()
    parent = os.getpid()
    if launcher := os.fork():
        os.close(writing)
        Reaper(launcher, status, signals, patience_s).run()
    os.close(status)
    os.close(signals)
    os.setsid()
    end_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return StatusPipe(writing, own)


def supervise(reaper: int, passing: int, inherited: set[int]) -> NoReturn:
    """Writes each signal to the reaper's pipe, as a byte, and exits with the reaper's status.

    NUMBERS are blocked by now. The work of a reaper that was killed, or failed, is done here; the status is then 128 +
    the first signal, else 1. inherited: children of the shell whose `exec` this process is.
    """
    signal.signal(signal.SIGCHLD, _only_wake)
    awaited = {signal.SIGCHLD, *(number for number in NUMBERS if not is_ignored(number))}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    first: int | None = None
    while not (ended := os.waitpid(reaper, os.WNOHANG))[0]:
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            first = first or number
            with suppress(OSError):
                os.write(passing, bytes([number]))
    status = os.waitstatus_to_exitcode(ended[1])
    reap()
    if status < 0 or any(child.pid not in inherited for child in psutil.Process().children()):
        began_s = time.monotonic()
        leftovers = clear_up(0.0)
        wipe()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        print_line(f"the reaper died ({how})")
        print_line(leftovers.stopped_line(time.monotonic() - began_s))
        status = 1 if first is None else 128 + first
    sys.exit(status)


def _only_wake(number: int, frame: FrameType | None) -> None:
    """Replaces the default action of SIGCHLD, with which sigwait() does not return on every system."""
