"""Ends a rank whose coordinator is gone, even while the rank waits inside a collective. Called by rank_worker.py.

Two threads that block without using the CPU: one watches the channel's connection (any executor), one the standard
input that LocalExecutor holds open. Nothing else in a rank calls os._exit before its end.
"""

import logging
import os
import sys
import threading
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

CONNECT_S = 60.0
RECONNECT_S = 1.0
EXIT_STATUS = 1


class Lifeline:
    """Watches `socket`'s connection from now until stop(); ends the process CONNECT_S after the start without a first
    handshake, or RECONNECT_S after a loss that was not mended."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        self._monitor = socket.get_monitor_socket(events)
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
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
    """At once, from any thread: the main thread may be inside a collective that never returns."""
    os._exit(EXIT_STATUS)
