"""CoreShare: how many ranks on CPU divide the cores that this one may use, of whatever group and service.

A rank process holds a name in the kernel, an abstract unix socket, which ends with it however it ends; /proc/net/unix
lists them. Names begin with the cores that their holders may use: ranks that are pinned to other ones, and those of
other containers with limits of their own, do not count. Groups come and go, so ranks look again between steps.
"""

import hashlib
import itertools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tandem.configs.limits import cpu_limit

NAMES: Final = Path("/proc/net/unix")
PERIOD_S: Final = 1.0
_numbers = itertools.count()


class CoreShare:
    """This rank's name among them, from now to close(). cores: words for those that it counts."""

    def __init__(
        self, cores: str | None = None, names: Path = NAMES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._prefix = f"tandem-cores/{cores or _own_cores()}/"
        self._names, self._clock = names, clock
        self._looked_s = clock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(f"\0{self._prefix}{os.getpid()}-{next(_numbers)}")
        except OSError:  # a system without such names: it counts none
            self._socket.close()

    def is_due(self) -> bool:
        """Returns whether PERIOD_S has passed since the last count."""
        return self._clock() - self._looked_s >= PERIOD_S

    def ranks(self) -> int | None:
        """Returns how many ranks there are, this one included; None where the system does not tell."""
        self._looked_s = self._clock()
        try:
            listed = self._names.read_bytes()
        except OSError:
            return None
        return listed.count(b" @" + self._prefix.encode()) or None

    def close(self) -> None:
        """Gives the name up. Idempotent."""
        self._socket.close()


def _own_cores() -> str:
    """Returns words for the cores of this process: those of its affinity, and its container if that has a limit."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    container = os.readlink("/proc/self/ns/pid") if cpu_limit() is not None else ""
    return hashlib.blake2b(f"{cores}{container}".encode(), digest_size=6).hexdigest()
