"""Watch over a rank: the parent watch, the answer to probes, progress reports while it loads, and its activity, which
the coordinator asks about while a step runs long.

Used by rank_server.py. The parent watch ends a rank whose coordinator is gone, even inside a collective; nothing else
in a rank calls os._exit before its end. Probes are answered by ZeroMQ's proxy in C, without the interpreter lock.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.workers.messages.channel import connect_dealer
from tandem.workers.messages.handshake import RankLoading

log = logging.getLogger(__name__)

CONNECT_S = 60.0
RECONNECT_S = 1.0
EXIT_STATUS = 1


class ParentWatch:
    """Connects `socket`, and watches that until stop(); ends the process CONNECT_S after the start without a first
    handshake, or RECONNECT_S after a loss without a reconnect. A coordinator on another machine is lost as well when it
    is silent (channel.py)."""

    def __init__(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        self._socket = socket
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        self._monitor = socket.get_monitor_socket(events)
        socket.connect(endpoint)  # not before: on a busy machine the handshake is over by then, and nothing tells of it
        self._thread = threading.Thread(target=self._watch, name="parent watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more watching; called by the rank's main thread before it closes the socket."""
        self._socket.disable_monitor()
        self._thread.join()

    def _watch(self) -> None:
        deadline_s: float | None = time.monotonic() + CONNECT_S
        while True:
            left_ms = None if deadline_s is None else max(0, round((deadline_s - time.monotonic()) * 1000))
            if not self._monitor.poll(left_ms):
                log.error("the coordinator is gone; this rank ends")
                end_process()
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_MONITOR_STOPPED:
                self._monitor.close(linger=0)
                return
            deadline_s = None if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else time.monotonic() + RECONNECT_S


def watch_stdin() -> None:
    """Ends this process when its standard input ends: the parent holds the other end and never writes again."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        end_process()

    threading.Thread(target=watch, name="stdin watch", daemon=True).start()


def end_process() -> None:
    """Ends the process at once, from any thread: the main thread may be inside a collective that never returns."""
    os._exit(EXIT_STATUS)


UNPROBED_S = 5.0
"""Seconds without a probe after which a rank says that it is cut off; a coordinator says the same of a rank then."""


def start_echo(
    context: "zmq.Context[Any]", secret: str, endpoint: str, rank: int, unprobed_s: float = UNPROBED_S
) -> None:
    """Echoes probes until `context` is terminated. A first empty message registers the rank with ProbeWatch. A warning
    says when no probe has come for `unprobed_s`, as where a link is cut, and when one comes again."""
    heard = context.socket(zmq.PAIR)
    heard.setsockopt(zmq.RCVHWM, 0)
    heard.bind(f"inproc://probes-{rank}")

    def echo() -> None:
        socket = connect_dealer(context, secret, endpoint, str(rank).encode())
        copies = context.socket(zmq.PAIR)
        copies.setsockopt(zmq.SNDHWM, 0)
        try:
            copies.connect(f"inproc://probes-{rank}")
            socket.send(b"")
            zmq.proxy(socket, socket, copies)
        except zmq.ContextTerminated:
            pass
        finally:
            socket.close(linger=0)
            copies.close(linger=0)

    def note_silence() -> None:
        with suppress(zmq.ContextTerminated), heard:
            heard.recv()
            while True:
                if not heard.poll(round(1000 * unprobed_s)):
                    log.warning(
                        "rank %d: no probe for %g s; the coordinator is out of reach or stopped", rank, unprobed_s
                    )
                    heard.poll()
                    log.warning("rank %d is probed again", rank)
                heard.recv()

    threading.Thread(target=echo, name="probe echo", daemon=True).start()
    threading.Thread(target=note_silence, name="probe silence", daemon=True).start()


PERIOD_S = 0.5


class LoadReports:
    """Sends the first progress report, the last, and between them one each PERIOD_S."""

    def __init__(
        self, rank: int, send: Callable[[RankLoading], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank = rank
        self._send = send
        self._clock = clock
        self._sent_s: float | None = None

    def take(self, loaded_bytes: int, total_bytes: int) -> None:
        now_s = self._clock()
        if self._sent_s is None or loaded_bytes == total_bytes or now_s - self._sent_s >= PERIOD_S:
            self._sent_s = now_s
            self._send(RankLoading(self._rank, loaded_bytes, total_bytes))


IDLE_SHARE = 0.02
"""Share of a core: more than a process uses that only waits, with the threads of Ray and ZeroMQ."""
READY, WAITS_FOR_DISK = "R", "D"
"""States of threads on Linux: running or ready to run; waiting for a disk."""


class HostActivity:
    """Activity of this process since the last question, or since this was made, by the thread that runs the steps.

    A thread that waits in a collective, or for a lock, sleeps and uses next to no time of a core. One that computes
    uses some, and one that a busy machine keeps from computing is seen ready to run, or waiting for a disk (Linux). Of
    other threads than the step's only the time that they use and the disks that they wait for count: those of Ray and
    ZeroMQ wake now and then, and stand in line for a core like all others.
    """

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
