"""The last look of a launcher: which of the processes that it caused still run, their end, and the words for it.

Called by the launcher after everything was asked to go; normally it finds nothing.
"""

from collections.abc import Iterable
from pathlib import Path

import psutil

GRACE_S = 1.0
KILL_WAIT_S = 3.0


class Strays:
    """Processes that did not go by themselves, as "name (pid N)": ended with SIGKILL, or alive even then."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.alive: list[str] = []

    def end(self, processes: Iterable[psutil.Process], grace_s: float = GRACE_S) -> None:
        """Gives the processes `grace_s` to go, kills the rest, and waits for that."""
        named = {process: f"{_name(process)} (pid {process.pid})" for process in processes}
        _, staying = psutil.wait_procs(list(named), timeout=grace_s)
        for process in staying:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        gone, alive = psutil.wait_procs(staying, timeout=KILL_WAIT_S)
        self.killed += [named[process] for process in gone]
        self.alive += [named[process] for process in alive]

    def stopped_line(self, took_s: float) -> str:
        """What `tandem serve` says last."""
        took = f"(took {took_s:.1f} s)"
        if self.alive:
            return f"stopped, but still running in spite of SIGKILL: {', '.join(self.alive)} {took}"
        killed = f"; had to be killed: {', '.join(self.killed)}" if self.killed else ""
        return f"stopped: nothing is left running {took}{killed}"


def _name(process: psutil.Process) -> str:
    """A title as it is; a command without its folders: `gcs_server`, `python3 setup_worker.py`."""
    try:
        words = process.cmdline() or [process.name()]
    except psutil.Error:
        return "a process"
    if "/" not in words[0]:
        return " ".join(words).strip()[:60]
    scripts = [Path(word).name for word in words[1:] if word.endswith(".py")]
    return " ".join([Path(words[0]).name, *scripts[:1]])
