"""Authenticated ZeroMQ sockets with msgspec payloads: the only transport between coordinator, ranks and gateways.

ROUTER binds, DEALER connects. High-water marks are off, because ZeroMQ drops silently at its default: senders bound
the messages in flight by admission. CURVE keys are derived from the cluster's secret, so a peer without the secret
lacks the server's public key and cannot finish the handshake. No payload is pickled.
"""

import hashlib
import secrets
from typing import Any

import zmq
from zmq.utils import z85

from tandem.configs.limits import ANY_PORTS, Ports


class ChannelContext(zmq.Context[zmq.Socket[Any]]):
    """ZeroMQ context that does not terminate itself when it is garbage collected."""

    def __del__(self) -> None:
        # pyzmq's own __del__, when the context is collected in one cycle with its sockets, waits forever for them to be
        # closed and hangs the process. A context left open by an error ends with the process instead.
        pass


def new_secret() -> str:
    """Returns a new secret for one cluster: 256 random bits as hex."""
    return secrets.token_hex(32)


def life_secret(secret: str, group: str) -> str:
    """Derives the secret of one life of a group from the cluster's secret; `group` is the name of that life."""
    # A rank that outlives its coordinator must not be taken for one of the next life, whose tickets and steps have the
    # same numbers.
    return hashlib.blake2b(f"{group}:{secret}".encode(), digest_size=32).hexdigest()


def _key_pair(secret: str, part: str) -> tuple[bytes, bytes]:
    """Derives the CURVE key pair (public, private; z85) of `secret` for one side, "server" or "client"."""
    private = z85.encode(hashlib.blake2b(f"{part}:{secret}".encode(), digest_size=32).digest())
    return zmq.curve_public(private), private


def lanes_name(rank: int) -> bytes:
    """Returns the identity of a rank's lanes at the coordinator's router; the rank's own socket has its number."""
    return f"{rank}-lanes".encode()


def _common(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)


def bind_router(
    context: zmq.Context[Any], secret: str, host: str = "127.0.0.1", ports: Ports = ANY_PORTS
) -> tuple[zmq.Socket[Any], str]:
    """Binds a ROUTER to a free port of `host`, one of `ports`; returns it and its endpoint. Sends to a missing peer
    raise. SettingsError if none is free."""
    socket = context.socket(zmq.ROUTER)
    _common(socket)
    public, private = _key_pair(secret, "server")
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, private)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that comes back before its old connection is seen dead wins
    for port in ports.tries():
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                socket.close(0)
                raise
        else:
            return socket, str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    socket.close(0)
    raise ports.none_free(host)


HEARTBEAT_S = 2
SILENT_AFTER_S = 10
"""Seconds without an answer to a heartbeat after which a connection counts as lost."""


def connect_dealer(context: zmq.Context[Any], secret: str, endpoint: str, identity: bytes) -> zmq.Socket[Any]:
    """Returns a DEALER that connects, and reconnects, to a router of the same secret under the name `identity`."""
    socket = dealer_to(context, secret, endpoint, identity)
    socket.connect(endpoint)
    return socket


def dealer_to(
    context: zmq.Context[Any], secret: str, endpoint: str, identity: bytes, *, heeds_silence: bool = False
) -> zmq.Socket[Any]:
    """Returns the same, not connected yet: who watches its connection has to begin before.

    heeds_silence: a connection whose other end has not answered for SILENT_AFTER_S is lost, as it is when the other end
    closes it. Not within one machine, where nothing vanishes and a process may be stopped for as long as one likes.
    """
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    _common(socket)
    if heeds_silence and not endpoint.startswith("tcp://127."):
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000 * HEARTBEAT_S)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * SILENT_AFTER_S)
    server_public, _ = _key_pair(secret, "server")
    public, private = _key_pair(secret, "client")
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, private)
    socket.setsockopt(zmq.IDENTITY, identity)
    return socket
