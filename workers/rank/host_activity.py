"""HostActivity: whether this process computes, for the coordinator's question while a step runs long. Torch-free.

A thread that waits in a collective, or for a lock, sleeps and uses no time of a core. One that computes does, and one
that a busy machine keeps from computing is seen ready to run, or waiting for a disk (Linux).
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

IDLE_SHARE = 0.02
"""Of a core: what a process that only waits uses, with the threads of Ray and ZeroMQ, and more."""
WANTING = frozenset("RD")
"""States of threads on Linux: running or ready to run, and waiting for a disk."""
OF_THE_CHANNEL = "ZMQ"
"""Names of ZeroMQ's threads begin so; they have just brought the question."""


class HostActivity:
    """What this process did since the last question, or since this was made."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        states: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._states = states or thread_states
        self._asked_s = clock()
        self._used_s = cpu_clock()

    def computes(self) -> bool:
        """Returns whether a thread has used more of a core than waiting takes, or would now if it got one."""
        asked_s, used_s = self._clock(), self._cpu_clock()
        took_s, worked_s = asked_s - self._asked_s, used_s - self._used_s
        self._asked_s, self._used_s = asked_s, used_s
        return worked_s > IDLE_SHARE * took_s or not WANTING.isdisjoint(self._states())


def thread_states() -> list[str]:
    """The states of this process's threads in the letters of Linux, but for the caller's and those of ZeroMQ; elsewhere
    none."""
    states, mine = [], str(threading.get_native_id())
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            name, _, rest = (thread / "stat").read_text(errors="replace").rpartition(")")
            if thread.name != mine and not name.partition("(")[2].startswith(OF_THE_CHANNEL):
                states.append(rest.split()[0])
    return states
