"""Authenticated ZeroMQ sockets with msgspec payloads: the only transport between coordinator, ranks and gateways.

ROUTER binds, DEALER connects; high-water marks are off (ZeroMQ drops silently at its default), so senders bound what
is in flight by admission. CURVE keys are derived from the cluster's secret: who does not know the secret does not
know the server's public key and cannot finish the handshake. Never pickles.
"""

import hashlib
import secrets
from typing import Any, Final, Literal

import zmq
from zmq.utils import z85

from workers.messages import AdapterMove, Transfer

MoverKind = Literal["memory", "disk", "adapter", "folder", "remote0", "remote1", "remote2"]
REMOTES: Final[tuple[MoverKind, ...]] = ("remote0", "remote1", "remote2")
ADAPTER_MOVERS: Final[tuple[MoverKind, ...]] = ("adapter", "folder", *REMOTES)
"""Apart, so that what is at hand never waits for a source that is far away, nor those all for the slowest."""


class ChannelContext(zmq.Context[zmq.Socket[Any]]):
    """A context that nobody has closed, because of an error in between, ends with the process. pyzmq's own, when it is
    collected in one cycle with its sockets, waits for ever for them to be closed: the whole process hangs."""

    def __del__(self) -> None:
        pass


def new_secret() -> str:
    """A fresh secret for one cluster, 256 bits, as hex."""
    return secrets.token_hex(32)


def life_secret(secret: str, group: str) -> str:
    """The secret of one life of a group, from the cluster's; `group` is that life's own name. A rank that outlives its
    coordinator can so never be taken for one of the next life, whose tickets and steps have the same numbers."""
    return hashlib.blake2b(f"{group}:{secret}".encode(), digest_size=32).hexdigest()


def _key_pair(secret: str, part: str) -> tuple[bytes, bytes]:
    """A CURVE key pair (public, private; z85) that everyone who knows `secret` derives alike."""
    private = z85.encode(hashlib.blake2b(f"{part}:{secret}".encode(), digest_size=32).digest())
    return zmq.curve_public(private), private


def mover_name(rank: int, kind: MoverKind) -> bytes:
    """What a rank's mover is called at the coordinator's router; the rank itself is its number."""
    return f"{rank}-{kind}".encode()


def mover_of(move: Transfer | AdapterMove) -> MoverKind:
    """Which of a rank's movers carries it out."""
    if isinstance(move, AdapterMove):
        if move.kind != "fetch":
            return "adapter"
        return REMOTES[move.ticket % len(REMOTES)] if move.adapter.is_remote else "folder"
    return "memory" if move.kind in ("store", "load") else "disk"


def _common(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)


def bind_router(context: zmq.Context[Any], secret: str, host: str = "127.0.0.1") -> tuple[zmq.Socket[Any], str]:
    """A ROUTER bound to a free port of `host`, and its endpoint. Sending to a peer that is gone raises (mandatory)."""
    socket = context.socket(zmq.ROUTER)
    _common(socket)
    public, private = _key_pair(secret, "server")
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, private)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that comes back before its old connection is seen dead wins
    port = socket.bind_to_random_port(f"tcp://{host}")
    return socket, f"tcp://{host}:{port}"


def connect_dealer(context: zmq.Context[Any], secret: str, endpoint: str, identity: bytes) -> zmq.Socket[Any]:
    """A DEALER that connects (and reconnects) to a router of the same secret, known there as `identity`."""
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    _common(socket)
    server_public, _ = _key_pair(secret, "server")
    public, private = _key_pair(secret, "client")
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, private)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(endpoint)
    return socket
