"""Client of the host-tier process: coordinators lease a region, ranks attach their slabs. Blocking calls with
deadlines.

The open connection is the claim on the memory. It closes only after the memory is unmapped, by close() or by the kernel
when the process ends. Import it through host_process.py. It does not interpret the memory's content.
"""

import mmap
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.offload.host.host_messages import (
    MAX_PACKET_BYTES,
    AskStatus,
    Attach,
    Attached,
    HostStatus,
    HostTierError,
    Leased,
    LeaseRegion,
    Refused,
    Reply,
    Request,
    decode_reply,
    encode,
)

_RETRY_S = 0.01
LEASE_S = 10.0
LEASE_RETRY_S = 5.0
RESERVE_S_PER_GIB = 4.0


@dataclass(eq=False)
class RegionLease:
    """A coordinator's claim on a region; keep it as long as `index` is used. reused: the content of an earlier lease is
    there."""

    token: str
    reused: bool
    index: mmap.mmap
    _connection: socket.socket

    def close(self) -> None:
        """Ends the lease. Idempotent. BufferError, and the lease stays, while a view of `index` is alive."""
        self.index.close()
        self._connection.close()


@dataclass(eq=False)
class SlabAttachment:
    """A rank's claim on its slab; keep it as long as `slab` is used. No tensor over the slab may be used after
    close()."""

    slab: mmap.mmap
    _connection: socket.socket

    def close(self) -> None:
        """Detaches the slab. Idempotent. BufferError, and the slab stays attached, while a view of `slab` is alive."""
        self.slab.close()
        self._connection.close()


def lease(socket_path: Path, layout: str, index_bytes: int, rank_bytes: Sequence[int], timeout_s: float) -> RegionLease:
    """Leases a region of this layout and these sizes: one that an earlier group left, else a new one filled with zeros.

    index_bytes: size of the index; rank_bytes: size of each rank's slab. New memory is reserved before the call
    returns, about 0.5 s per GiB. HostTierError when the process refuses or does not answer within timeout_s.
    """
    call = _HostCall(socket_path, timeout_s)
    try:
        reply, descriptor = call.send(LeaseRegion(layout, index_bytes, list(rank_bytes)))
        if not isinstance(reply, Leased):
            raise _unexpected(reply)
        return RegionLease(reply.token, reply.reused, _map(descriptor, index_bytes), call.keep())
    finally:
        call.close()


def lease_soon(socket_path: Path, layout: str, index_bytes: int, rank_bytes: Sequence[int]) -> RegionLease:
    """Leases as lease() does, with time for new memory. A group that this one replaces may still hold the only region
    that fits for a moment."""
    timeout_s = LEASE_S + sum(rank_bytes) / 2**30 * RESERVE_S_PER_GIB
    deadline_s = time.monotonic() + LEASE_RETRY_S
    while True:
        try:
            return lease(socket_path, layout, index_bytes, rank_bytes, timeout_s)
        except HostTierError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


def attach(socket_path: Path, token: str, rank: int, timeout_s: float) -> SlabAttachment:
    """Attaches one rank's slab of the leased region. `token` comes from its coordinator's lease.

    HostTierError when the process refuses or does not answer within timeout_s.
    """
    call = _HostCall(socket_path, timeout_s)
    try:
        reply, descriptor = call.send(Attach(token, rank))
        if not isinstance(reply, Attached):
            raise _unexpected(reply)
        return SlabAttachment(_map(descriptor, reply.slab_bytes), call.keep())
    finally:
        call.close()


def status(socket_path: Path, timeout_s: float) -> HostStatus:
    """Returns the process's counts of regions, leases and bytes. HostTierError when it does not answer within
    timeout_s."""
    call = _HostCall(socket_path, timeout_s)
    try:
        reply, _ = call.send(AskStatus())
        if not isinstance(reply, HostStatus):
            raise _unexpected(reply)
        return reply
    finally:
        call.close()


class _HostCall:
    """One connection for one request, within one deadline. close() ends it unless keep() took it."""

    def __init__(self, socket_path: Path, timeout_s: float) -> None:
        self._path = socket_path
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._connection: socket.socket | None = None
        self._descriptor: int | None = None

    def send(self, request: Request) -> tuple[Reply, int | None]:
        """Sends the request; returns the reply and its descriptor, which the call still owns. HostTierError when it is
        refused."""
        try:
            connection = self._connection = self._connect()
            connection.settimeout(self._left_s())
            connection.send(encode(request))
            connection.settimeout(self._left_s())
            packet, descriptors, _, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise HostTierError(f"the host tier at {self._path} did not answer in {self._timeout_s:g} s") from None
        except OSError as error:
            raise HostTierError(f"no host tier at {self._path}: {error.strerror or error}") from error
        if descriptors:
            self._descriptor = descriptors[0]
        if not packet:
            raise HostTierError(f"the host tier at {self._path} closed the connection")
        reply = decode_reply(packet)
        if isinstance(reply, Refused):
            raise HostTierError(f"the host tier refused: {reply.reason}")
        return reply, self._descriptor

    def keep(self) -> socket.socket:
        """Transfers the connection to the caller."""
        connection, self._connection = self._connection, None
        assert connection is not None
        return connection

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)  # a mapping has its own
            self._descriptor = None
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            while True:
                connection.settimeout(self._left_s())
                try:
                    connection.connect(str(self._path))
                    return connection
                except BlockingIOError:  # too many are waiting to be accepted
                    time.sleep(_RETRY_S)
        except BaseException:
            connection.close()
            raise

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


def _map(descriptor: int | None, length: int) -> mmap.mmap:
    if descriptor is None or os.fstat(descriptor).st_size != length:
        raise HostTierError("the host tier sent no memory of the size that was asked for")
    try:
        return mmap.mmap(descriptor, length)
    except OSError as error:
        raise HostTierError(f"{length} bytes of host memory cannot be mapped: {error.strerror}") from error


def _unexpected(reply: Reply) -> HostTierError:
    return HostTierError(f"the host tier answered something else: {type(reply).__name__}")
