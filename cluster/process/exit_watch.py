"""The end of processes that are no children of this one: by which signal, or with which exit status.

Only a parent can wait for a process, and the parent of a rank is Ray's raylet, which tells nobody. Linux 6.15 and later
tell it to who had the process open (a pidfd) before it ended. Elsewhere nothing is known.
"""

import os
import signal
import struct
import sys
from collections.abc import Collection
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
"""PIDFD_GET_INFO with the first form of its struct: mask, cgroup, 11 numbers, exit code; 64 bytes."""
HAS_EXIT = 1 << 3
FORM = "=QQ11Ii"


class ExitWatch:
    """Processes of this machine, by pid. close() at the end."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}
        self._oom_kills: dict[int, int] = {}

    def watch(self, pid: int) -> None:
        """Opens a process that runs; one that has ended, or cannot be opened, is not known later."""
        if sys.platform == "linux" and pid not in self._descriptors:
            with suppress(OSError):
                self._descriptors[pid] = os.pidfd_open(pid)
                self._oom_kills[pid] = oom_kills()

    def watch_only(self, pids: Collection[int]) -> None:
        """Watches these, as watch() does, and forgets the others."""
        for pid in self._descriptors.keys() - set(pids):
            os.close(self._descriptors.pop(pid))
            del self._oom_kills[pid]
        for pid in pids:
            self.watch(pid)

    def how_it_ended(self, pid: int) -> str | None:
        """Words such as "was killed by SIGKILL" or "exited with status 7"; None where they are not known. Whom it
        killed for lack of memory the kernel does not tell, only how many."""
        if pid not in self._descriptors:
            return None
        asked = bytearray(struct.pack(FORM, HAS_EXIT, 0, *[0] * 11, 0))
        try:
            ioctl(self._descriptors[pid], GET_INFO, asked)
        except OSError:  # a kernel that does not know the question
            return None
        mask, _, *_, status = struct.unpack(FORM, asked)
        if not mask & HAS_EXIT:
            return None
        code, killed = os.waitstatus_to_exitcode(status), oom_kills() - self._oom_kills[pid]
        if code != -signal.SIGKILL or killed <= 0:
            return ended_words(code)
        return f"{ended_words(code)} (while it ran, the kernel has killed {killed} for lack of memory)"

    def close(self) -> None:
        """Forgets all processes."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._oom_kills.clear()


def oom_kills() -> int:
    """Returns how many processes this machine's kernel has killed for lack of memory; 0 where it does not count."""
    try:
        counts = dict(line.split() for line in VMSTAT.read_text().splitlines())
        return int(counts["oom_kill"])
    except (OSError, ValueError, KeyError):
        return 0


def ended_words(code: int) -> str:
    """Words for an exit code; negative: a signal."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
