"""Processes that outlive the launcher: one routine lists, ends and names them, whatever the end was.

The reaper runs it after each launcher, the supervisor after each reaper. Both adopt orphans, so everything that a
launcher has caused is a descendant of theirs, whoever started it and whoever has died since.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

POLL_S = 0.02
KILL_WAIT_S = 3.0


class Leftovers:
    """Descendants of this process that did not end by themselves, as "name (pid N)"."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        """Ended by SIGKILL."""
        self.alive: list[str] = []
        """Running in spite of it."""

    def end(self, grace_s: float) -> None:
        """Waits up to `grace_s` for all descendants to end, then kills until none is left, for at most KILL_WAIT_S."""
        deadline_s = time.monotonic() + grace_s
        while descendants() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        names: dict[int, str] = {}
        deadline_s = time.monotonic() + KILL_WAIT_S
        while (left := descendants()) and time.monotonic() < deadline_s:
            names |= {process.pid: name for process in left if (name := _name(process)) and process.pid not in names}
            for process in left:  # parents first; one that was just being started is found in the next round
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(POLL_S)
        alive = {process.pid for process in left}
        self.killed += [name for pid, name in names.items() if pid not in alive]
        self.alive += [name for pid, name in names.items() if pid in alive]

    def stopped_line(self, took_s: float) -> str:
        """The last line of `tandem serve`."""
        took = f"(took {took_s:.1f} s)"
        if self.alive:
            return f"stopped, but still running in spite of SIGKILL: {', '.join(self.alive)} {took}"
        killed = f"; had to be killed: {', '.join(self.killed)}" if self.killed else ""
        return f"stopped: nothing is left running {took}{killed}"


def descendants() -> list[psutil.Process]:
    """All processes below this one, ended ones too until they are waited for, as own children are here."""
    reap()
    return psutil.Process().children(recursive=True)


def reap() -> dict[int, int]:
    """Wait statuses, by process id, of the children that have ended since the last call, adopted ones too."""
    statuses: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    return statuses


def _name(process: psutil.Process) -> str | None:
    """A title as it is, a command without its folders: `raylet (pid 7)`, `python3 dashboard.py (pid 8)`.

    None for a process that has just ended, as some do with their parents.
    """
    try:
        words = process.cmdline() or [process.name()]
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:
        words = ["a process"]
    if "/" in words[0]:
        scripts = [word for word in words[1:] if "/" in word and not word.startswith("-")]
        words = [Path(word).name for word in [words[0], *scripts[:1]]]
    return f"{' '.join(words).strip()[:60]} (pid {process.pid})"
