"""The rank's half of the pulse (workers/rank_pulse.py): sends every probe back. Started by rank_worker.py.

The loop is ZeroMQ's own proxy from a socket to itself: it runs in C and never takes the interpreter lock, so neither a
long computation nor a Python loop silences it, and it costs nothing between probes. It shows that the process runs, not
that its main thread gets anywhere.
"""

import threading
from typing import Any

import zmq

from workers.channel import connect_dealer


def start_echo(context: "zmq.Context[Any]", secret: str, endpoint: str, rank: int) -> None:
    """Echoes until `context` is terminated. The first word makes the rank known to the watch."""

    def echo() -> None:
        socket = connect_dealer(context, secret, endpoint, str(rank).encode())
        try:
            socket.send(b"")
            zmq.proxy(socket, socket)
        except zmq.ContextTerminated:
            pass
        finally:
            socket.close(linger=0)

    threading.Thread(target=echo, name="pulse echo", daemon=True).start()
