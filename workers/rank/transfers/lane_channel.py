"""LaneChannel: the one channel that feeds all lanes of a rank process and takes their answers to the coordinator, and
those to questions about the step under way.

A DEALER beside the rank's own, with a thread of its own, so that no transfer waits for the step under way. The thread
blocks while nothing moves. If it fails, the rank has failed: no transfer would be carried out or answered any more.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from tandem.workers.messages.channel import connect_dealer, lanes_name
from tandem.workers.messages.handshake import FromRank, RankFailed, ToLanes

log = logging.getLogger(__name__)
FAILURE_LINGER_MS = 1000


class LaneChannel(threading.Thread):
    """Runs from serve() until `context` is terminated."""

    def __init__(self, context: "zmq.Context[Any]", secret: str, endpoint: str, rank: int) -> None:
        super().__init__(name="lane channel", daemon=True)
        self._rank = rank
        self._socket = connect_dealer(context, secret, endpoint, lanes_name(rank))
        self._answers, self._door = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (self._answers, self._door):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self._answers.bind("inproc://lanes")
        self._door.connect("inproc://lanes")
        self._at_door = threading.Lock()
        self._take: Callable[[ToLanes], object] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToLanes] = msgspec.msgpack.Decoder(ToLanes)

    def serve(self, take: Callable[[ToLanes], object]) -> None:
        """Starts the thread, which calls take with each op and question."""
        self._take = take
        self.start()

    def send(self, message: FromRank) -> None:
        """Sends a message to the coordinator. From any thread; after the end of the context it does nothing."""
        with self._at_door:
            try:
                self._door.send(self._encoder.encode(message))
            except zmq.ZMQError:
                log.debug("the coordinator's channel is gone")

    def run(self) -> None:
        linger_ms = 0
        try:
            self._pass_on()
        except zmq.ContextTerminated:
            return
        except Exception as error:
            log.exception("the lane channel of rank %d failed", self._rank)
            linger_ms = FAILURE_LINGER_MS
            reason = f"its lane channel failed: {type(error).__name__}: {error}"
            with suppress(zmq.ContextTerminated):
                self._socket.send(self._encoder.encode(RankFailed(rank=self._rank, message=reason, by_step=False)))
        finally:
            self._socket.close(linger=linger_ms)
            self._answers.close(linger=0)
            with self._at_door:
                self._door.close(linger=0)

    def _pass_on(self) -> None:
        """Takes ops to the lanes and answers to the coordinator, until an error."""
        assert self._take is not None
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._answers, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                if socket is self._answers:
                    self._socket.send(self._answers.recv())
                else:
                    self._take(self._decoder.decode(self._socket.recv()))
