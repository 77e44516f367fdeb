"""CoreShare: how many ranks on CPU divide the cores that this one may use, of whatever group and service.

A rank process holds a name in the kernel, an abstract unix socket, which ends with it however it ends; /proc/net/unix
lists them. Names begin with the cores that their holders may use: ranks that are pinned to other ones, and those of
other containers with limits of their own, do not count. Groups come and go, so ranks look again between steps.

Names are of a network namespace: containers that have the same cores, no limit and networks of their own do not see
each other's ranks.
"""

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tandem.configs.limits import CGROUP, cpu_limit

NAMES: Final = Path("/proc/net/unix")
PERIOD_S: Final = 1.0


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
            # process ids do not tell containers with one network apart
            self._socket.bind(f"\0{self._prefix}{os.getpid()}-{secrets.token_hex(4)}")
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
    """Returns words for the cores of this process: those of its affinity, and the control group that limits it."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    limited = None if cpu_limit() is None else os.stat(CGROUP)
    group = None if limited is None else (limited.st_dev, limited.st_ino)
    return hashlib.blake2b(f"{cores}{group}".encode(), digest_size=6).hexdigest()
