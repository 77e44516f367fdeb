"""What coordinators, ranks and the host-tier process say to each other over its unix socket: one msgpack packet each.

A packet to the server is answered by one packet, with a descriptor beside it where memory is given. Used by
host_client.py and host_server.py only; what does not fit these types is refused and ends nothing.
"""

from typing import Annotated

import msgspec

from configs.errors import TandemError

MAX_PACKET_BYTES = 16_384
MAX_RANKS = 64

Bytes = Annotated[int, msgspec.Meta(ge=1, le=2**50)]


class HostTierError(TandemError):
    """The host-tier process refused, did not answer, or is not there."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Lease(_Message, frozen=True):
    """From a coordinator: a region of this shape. Held until this connection and those of its ranks are closed."""

    layout: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    index_bytes: Bytes
    rank_bytes: Annotated[list[Bytes], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]


class Attach(_Message, frozen=True):
    """From a rank: its slab of the region that its coordinator has leased."""

    token: Annotated[str, msgspec.Meta(max_length=64)]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]


class Status(_Message, frozen=True):
    """From anyone: what is held."""


class Leased(_Message, frozen=True):
    """With the index's descriptor. reused: the content is what an earlier lease of this shape left; else zeros."""

    token: str
    reused: bool


class Attached(_Message, frozen=True):
    """With the slab's descriptor."""

    slab_bytes: int


class HostStatus(_Message, frozen=True):
    """leases: regions that someone holds; holders: connections that hold them; bytes: of all regions."""

    regions: int
    leases: int
    holders: int
    bytes: int
    budget_bytes: int


class Refused(_Message, frozen=True):
    """Nothing was changed, except that regions which nobody held may have made room."""

    reason: str


Request = Lease | Attach | Status
Reply = Leased | Attached | HostStatus | Refused

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(packet: bytes) -> Request:
    """HostTierError for anything else."""
    if len(packet) > MAX_PACKET_BYTES:
        raise HostTierError(f"a packet of more than {MAX_PACKET_BYTES} bytes")
    try:
        return _requests.decode(packet)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HostTierError(f"not a request: {error}") from None


def decode_reply(packet: bytes) -> Reply:
    """HostTierError for anything else."""
    try:
        return _replies.decode(packet)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HostTierError(f"not a reply of the host tier: {error}") from None
