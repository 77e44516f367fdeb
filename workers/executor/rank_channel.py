"""The way from a RankGroup to its ranks: RankChannel, the Protocol, and SocketChannel, its implementation over ZeroMQ.

SocketChannel binds the ROUTER. Each rank process (workers/rank/rank_server.py) connects as the DEALER named by its
number, and its lanes as a second one.
"""

from typing import Protocol

import msgspec
import zmq

from tandem.configs.limits import ANY_PORTS, Ports
from tandem.workers.messages.channel import ChannelContext, bind_router, lanes_name
from tandem.workers.messages.handshake import AllocateKV, FindModel, FromRank, RankSetup, Shutdown, ToRank
from tandem.workers.messages.step import CountExperts, StepPlan

CLOSE_LINGER_MS = 200
FOR_THE_RANK = (FindModel, RankSetup, AllocateKV, StepPlan, CountExperts, Shutdown)
"""Messages for a rank's own socket; all others are transfers, for its lanes."""


class Unreachable(Exception):
    """A rank cannot be sent to."""


class RankChannel(Protocol):
    """Typed messages between a coordinator and its ranks, both ways in order. For one thread."""

    def send(self, rank: int, message: ToRank) -> None:
        """Sends without waiting. Unreachable when the rank is not there."""
        ...

    def receive(self, timeout_s: float) -> FromRank | None:
        """Returns the next message of any rank, None after timeout_s."""
        ...

    def close(self) -> None:
        """No message can be sent or received any more. Idempotent."""
        ...


class SocketChannel:
    """RankChannel to rank processes that know `secret` and connect to `endpoint`."""

    def __init__(self, secret: str, host: str, ports: Ports = ANY_PORTS) -> None:
        self.context = ChannelContext()
        self._socket, self.endpoint = bind_router(self.context, secret, host, ports)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
        self._last: tuple[ToRank, bytes] | None = None

    def send(self, rank: int, message: ToRank) -> None:
        if self._last is None or self._last[0] is not message:  # one message for all ranks is encoded once
            self._last = (message, self._encoder.encode(message))
        name = str(rank).encode() if isinstance(message, FOR_THE_RANK) else lanes_name(rank)
        try:
            self._socket.send_multipart([name, self._last[1]], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise Unreachable(str(error)) from error

    def receive(self, timeout_s: float) -> FromRank | None:
        if not self._socket.poll(round(timeout_s * 1000)):
            return None
        _, payload = self._socket.recv_multipart(zmq.NOBLOCK)
        return self._decoder.decode(payload)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close(linger=CLOSE_LINGER_MS)
            self.context.term()
