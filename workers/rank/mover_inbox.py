"""Where a rank's movers get their transfers from and leave their answers: channels beside the rank's own, or queues.

Made by rank_worker.py (ChannelInbox) and inprocess_executor.py (QueueInbox), read by kv_mover.py's threads.
"""

import queue
import threading
from typing import Any, Protocol

import msgspec
import zmq

from workers.channel import connect_dealer
from workers.messages import AdapterMove, Transfer, TransferDone


class Inbox(Protocol):
    """Where transfers come from and answers go; used by the mover's thread only."""

    def receive(self) -> Transfer | AdapterMove | None:
        """Blocks for the next one; None: no more will come."""
        ...

    def send(self, done: TransferDone) -> None: ...

    def close(self) -> None: ...


class ChannelInbox:
    """A DEALER beside the rank's own, so that a transfer does not wait for the step under way."""

    def __init__(self, context: "zmq.Context[Any]", secret: str, endpoint: str, name: bytes) -> None:
        self._socket = connect_dealer(context, secret, endpoint, name)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Transfer | AdapterMove).decode

    def receive(self) -> Transfer | AdapterMove | None:
        try:
            return self._decode(self._socket.recv())
        except zmq.ContextTerminated:  # the rank ends
            return None

    def send(self, done: TransferDone) -> None:
        self._socket.send(self._encode(done))

    def close(self) -> None:
        self._socket.close(linger=0)


class QueueInbox:
    """For a rank in this process: transfers in by a queue of its own, answers out to `answers`."""

    def __init__(self, answers: "Answers") -> None:
        self._in: queue.SimpleQueue[Transfer | AdapterMove | None] = queue.SimpleQueue()
        self._answers = answers

    def submit(self, transfer: Transfer | AdapterMove | None) -> None:
        self._in.put(transfer)

    def receive(self) -> Transfer | AdapterMove | None:
        return self._in.get()

    def send(self, done: TransferDone) -> None:
        self._answers.put(done)

    def close(self) -> None:
        """Nothing is held."""


class Answers:
    """What the movers of this process have answered; `arrived` is set while there is something."""

    def __init__(self) -> None:
        self._out: queue.SimpleQueue[TransferDone] = queue.SimpleQueue()
        self.arrived = threading.Event()

    def put(self, done: TransferDone) -> None:
        if done.ticket:
            self._out.put(done)
            self.arrived.set()

    def take(self) -> list[TransferDone]:
        """All so far."""
        self.arrived.clear()
        return [self._out.get() for _ in range(self._out.qsize())]
