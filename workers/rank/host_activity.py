"""HostActivity: whether this process computes, for the coordinator's question while a step runs long. Torch-free.

A thread that waits in a collective, or for a lock, sleeps and uses next to no time of a core. One that computes uses
some, and one that a busy machine keeps from computing is seen ready to run, or waiting for a disk (Linux). Of other
threads than the step's only the time that they use and the disks that they wait for count: those of Ray and ZeroMQ wake
now and then, and stand in line for a core like all others.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

IDLE_SHARE = 0.02
"""Of a core: more than a process uses that only waits, with the threads of Ray and ZeroMQ."""
READY, WAITS_FOR_DISK = "R", "D"
"""States of threads on Linux: running or ready to run; waiting for a disk."""


class HostActivity:
    """What this process did since the last question, or since this was made. Made by the thread that runs the steps."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        states: Callable[[], Mapping[int, str]] | None = None,
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._states = states or thread_states
        self._step_thread = threading.get_native_id()
        self._asked_s = clock()
        self._used_s = cpu_clock()

    def computes(self, is_exchanging: bool = False) -> bool:
        """Returns whether a thread has used more of a core than waiting takes, or would now if it got one. From another
        thread than the step's. is_exchanging: that one is inside a collective, where it looks for others now and
        then."""
        asked_s, used_s = self._clock(), self._cpu_clock()
        took_s, worked_s = asked_s - self._asked_s, used_s - self._used_s
        self._asked_s, self._used_s = asked_s, used_s
        states = self._states()
        is_ready = not is_exchanging and states.get(self._step_thread) == READY
        return worked_s > IDLE_SHARE * took_s or is_ready or WAITS_FOR_DISK in states.values()


def thread_states() -> dict[int, str]:
    """The states of this process's threads by their numbers, in the letters of Linux; elsewhere none."""
    states = {}
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            states[int(thread.name)] = (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return states
