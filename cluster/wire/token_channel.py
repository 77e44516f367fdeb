"""The token channel: coordinators send one ZeroMQ message per step and gateway, and gateways send Aborts back. Beside
them go KV events (workers/messages/kv_events.py), numbered by themselves: the loss of one loses no stream.

A gateway binds one ROUTER (TokenReceiver, on its event loop); each coordinator connects a DEALER per gateway
(TokenSender, on the engine's thread). Messages are numbered per sender and carry the gateway's nonce. Buffers are
bounded by admission: it bounds the requests, and requests bound their tokens.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.configs.limits import ANY_PORTS, Ports
from tandem.workers.messages.channel import ChannelContext, bind_router, connect_dealer
from tandem.workers.messages.kv_events import KvAsk, KvEvents, KvFacts
from tandem.workers.messages.request import Abort, DeltaBatch, ReplyTo, TokenDelta

log = logging.getLogger("tandem.tokens")
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_FOUND = zmq.EVENT_HANDSHAKE_SUCCEEDED


class TokenReceiver:
    """A gateway's end. Calls on_deltas(sender, deltas) for each step, on_gap(sender) for a lost message of these, and
    on_kv(sender, message) for what a group tells of its KV."""

    def __init__(
        self,
        secret: str,
        host: str,
        on_deltas: Callable[[bytes, list[TokenDelta]], None],
        on_gap: Callable[[bytes], None],
        ports: Ports = ANY_PORTS,
        on_kv: Callable[[bytes, KvFacts | KvEvents], None] = lambda sender, message: None,
    ) -> None:
        self._on_kv = on_kv
        self._kv: deque[tuple[bytes, KvFacts | KvEvents]] = deque()
        self._context = ChannelContext()
        self._socket, endpoint = bind_router(self._context, secret, host, ports)
        self._on_deltas = on_deltas
        self._on_gap = on_gap
        self._next_number: dict[bytes, int] = {}
        self._decode = msgspec.msgpack.Decoder(DeltaBatch | KvFacts | KvEvents).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self.reply_to = ReplyTo(endpoint, secrets.token_hex(8))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._drain)

    def send_abort(self, sender: bytes, abort: Abort) -> None:
        """Sends an Abort to the group behind `sender`, if it is still connected."""
        self._send(sender, abort)

    def ask_kv(self, sender: bytes) -> None:
        """Asks the group behind `sender` for a snapshot of its KV, if it is still connected."""
        self._send(sender, KvAsk())

    def _send(self, sender: bytes, message: Abort | KvAsk) -> None:
        try:
            self._socket.send_multipart([sender, self._encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("%s not delivered: %s", message, error)
        self._loop.call_soon(self._drain)  # the descriptor is edge-triggered: a send may have eaten its edge

    def forget(self, sender: bytes) -> None:
        """Drops the message number of a sender that has left. A later message of it counts as its first."""
        self._next_number.pop(sender, None)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(0)
            self._context.term()

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                sender, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                log.warning("a message of the wrong form was dropped")
                continue
            self._take(sender, payload)

    def _next_kv(self) -> None:
        """Hands on one message in each turn of the loop: no token waits for the snapshots of hundreds of groups."""
        self._on_kv(*self._kv.popleft())

    def _take(self, sender: bytes, payload: bytes) -> None:
        try:
            batch = self._decode(payload)
        except msgspec.DecodeError as error:
            log.warning("a message that cannot be read was dropped: %s", error)
            return
        if batch.nonce != self.reply_to.nonce:
            return  # for an earlier gateway at this address
        if not isinstance(batch, DeltaBatch):
            self._kv.append((sender, batch))
            self._loop.call_soon(self._next_kv)
            return
        # The first message of a sender sets the count; tokens lost before it show in its streams' positions.
        expected = self._next_number.get(sender, batch.sequence_number)
        self._next_number[sender] = batch.sequence_number + 1
        if batch.sequence_number > expected:
            self._on_gap(sender)
        if batch.deltas:
            self._on_deltas(sender, batch.deltas)


class _Link:
    """A coordinator's connection to one gateway. lost_since_s: None while it is connected."""

    def __init__(self, socket: "zmq.Socket[Any]", reply_to: ReplyTo) -> None:
        self.socket = socket
        self.monitor = socket.get_monitor_socket(_LOST | _FOUND)
        self.reply_to = reply_to
        self.next_number = 0
        self.lost_since_s: float | None = None

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class TokenSender:
    """A coordinator's end. One thread uses it; `poller` is the one that this thread waits in."""

    def __init__(self, secret: str, identity: str, poller: zmq.Poller, clock: Callable[[], float]) -> None:
        self._context = ChannelContext()
        self._secret = secret
        self._identity = identity.encode()
        self._poller = poller
        self._clock = clock
        self._links: dict[str, _Link] = {}
        self._need_snapshot: dict[ReplyTo, None] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Abort | KvAsk).decode

    def open(self, reply_to: ReplyTo) -> None:
        """Connects to a gateway ahead of its first token; a new nonce at a known address replaces the old link."""
        link = self._links.get(reply_to.endpoint)
        if link is not None and link.reply_to == reply_to:
            return
        if link is not None:
            self._close(link)
        socket = connect_dealer(self._context, self._secret, reply_to.endpoint, self._identity)
        link = self._links[reply_to.endpoint] = _Link(socket, reply_to)
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)

    def send(self, batches: Iterable[tuple[ReplyTo, list[TokenDelta]]]) -> None:
        """Sends one message per gateway. Deltas for a gateway that was replaced or lost are dropped."""
        for reply_to, deltas in batches:
            link = self._links.get(reply_to.endpoint)
            if link is None or link.reply_to != reply_to:
                continue  # that gateway process has ended, its requests are being aborted
            link.socket.send(self._encode(DeltaBatch(link.next_number, reply_to.nonce, deltas)))
            link.next_number += 1

    def tell(self, reply_to: ReplyTo, message: KvFacts | KvEvents) -> bool:
        """Implements KvLinks."""
        link = self._links.get(reply_to.endpoint)
        if link is None or link.reply_to != reply_to or link.lost_since_s is not None:
            return False
        link.socket.send(self._encode(message))
        return True

    def need_snapshot(self) -> list[ReplyTo]:
        """Implements KvLinks."""
        asked, self._need_snapshot = self._need_snapshot, {}
        return list(asked)

    def receive(self) -> list[Abort]:
        """Takes all Aborts that have arrived, and notes who asks for KV. Never blocks."""
        aborts: list[Abort] = []
        for link in self._links.values():
            self._watch(link)
            while _is_readable(link.socket):
                try:
                    message = self._decode(link.socket.recv(zmq.NOBLOCK))
                except msgspec.DecodeError as error:
                    log.warning("a message that cannot be read was dropped: %s", error)
                    continue
                if isinstance(message, Abort):
                    aborts.append(message)
                else:
                    self._need_snapshot[link.reply_to] = None
        return aborts

    def lost(self, after_s: float) -> list[ReplyTo]:
        """Closes the links of gateways without a connection for `after_s`, and returns these gateways."""
        now = self._clock()
        gone = [k for k in self._links.values() if k.lost_since_s is not None and now - k.lost_since_s >= after_s]
        for link in gone:
            self._close(link)
        return [link.reply_to for link in gone]

    def has_doubtful_link(self) -> bool:
        return any(link.lost_since_s is not None for link in self._links.values())

    def close(self) -> None:
        for link in list(self._links.values()):
            self._close(link)
        self._context.term()

    def _close(self, link: _Link) -> None:
        self._poller.unregister(link.socket)
        self._poller.unregister(link.monitor)
        del self._links[link.reply_to.endpoint]
        link.close()

    def _watch(self, link: _Link) -> None:
        while _is_readable(link.monitor):
            event = recv_monitor_message(link.monitor, zmq.NOBLOCK)["event"]
            if event & _FOUND:
                if link.lost_since_s is not None:  # what was on its way may be lost
                    self._need_snapshot[link.reply_to] = None
                link.lost_since_s = None
            elif link.lost_since_s is None:
                link.lost_since_s = self._clock()


def _is_readable(socket: "zmq.Socket[Any]") -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
