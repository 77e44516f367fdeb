"""Messages between coordinators, ranks and the host-tier process over its unix socket: one msgpack packet each.

The server answers each packet with one packet, and with a descriptor beside it where it grants memory. Used by
host_client.py and host_server.py only. A packet of any other form is refused; the connection stays open.
"""

from typing import Annotated

import msgspec

from tandem.configs.errors import TandemError

MAX_PACKET_BYTES = 16_384
MAX_RANKS = 64

Bytes = Annotated[int, msgspec.Meta(ge=1, le=2**50)]


class HostTierError(TandemError):
    """The host-tier process refused, did not answer, or is not running."""


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class LeaseRegion(_Message, frozen=True, tag="Lease"):
    """Asks, for a coordinator, for a region of this shape. It is held until this connection and those of its ranks
    close."""

    layout: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    index_bytes: Bytes
    rank_bytes: Annotated[list[Bytes], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]


class Attach(_Message, frozen=True):
    """Asks, for a rank, for its slab of the region that its coordinator has leased."""

    token: Annotated[str, msgspec.Meta(max_length=64)]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]


class AskStatus(_Message, frozen=True, tag="Status"):
    """Asks for the process's counts; any process may send it."""


class Leased(_Message, frozen=True):
    """Grants a region, with the index's descriptor. reused: the content of an earlier lease of this shape, else
    zeros."""

    token: str
    reused: bool


class Attached(_Message, frozen=True):
    """Grants a slab, with its descriptor."""

    slab_bytes: int


class HostStatus(_Message, frozen=True):
    """Counts of the process. leases: regions in use; users: connections that use them; bytes: of all regions."""

    regions: int
    leases: int
    users: int
    bytes: int
    budget_bytes: int


class Refused(_Message, frozen=True):
    """Refuses a request. Nothing has changed, except that unused regions may have been evicted to make room."""

    reason: str


Request = LeaseRegion | Attach | AskStatus
Reply = Leased | Attached | HostStatus | Refused

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(packet: bytes) -> Request:
    """Decodes a packet that a client sent. HostTierError for anything but a request."""
    if len(packet) > MAX_PACKET_BYTES:
        raise HostTierError(f"a packet of more than {MAX_PACKET_BYTES} bytes")
    try:
        return _requests.decode(packet)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HostTierError(f"not a request: {error}") from None


def decode_reply(packet: bytes) -> Reply:
    """Decodes a packet that the server sent. HostTierError for anything but a reply."""
    try:
        return _replies.decode(packet)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HostTierError(f"not a reply of the host tier: {error}") from None
