"""The loop of the host-tier process: accepts connections of this user, answers one packet with one, notices their ends.

Run by host_process.py's main. Single-threaded; a slow or broken client costs only its own connection.
"""

import os
import resource
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from offload.host_messages import (
    MAX_PACKET_BYTES,
    Attach,
    Attached,
    HostTierError,
    Lease,
    Leased,
    Refused,
    Reply,
    decode_request,
    encode,
)
from offload.host_regions import Regions

MAX_CONNECTIONS = 1024
BACKLOG = 128
ACCEPT_PAUSE_S = 0.01
MAX_REASON_CHARACTERS = 500
_PEER = struct.Struct("3i")  # pid, uid, gid


class HostServer:
    """Listens from its construction on; run() returns when standard input ends."""

    def __init__(self, socket_path: Path, budget_bytes: int) -> None:
        self._path = socket_path
        self._regions = Regions(budget_bytes)
        self._connections: dict[int, socket.socket] = {}
        self._last_number = 0
        self._parent_lives = True
        self._selector = selectors.PollSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(socket_path))
        os.chmod(socket_path, 0o600)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._read_parent)

    def run(self) -> None:
        while self._parent_lives:
            for key, _ in self._selector.select():
                handle: Callable[[], None] = key.data
                handle()

    def close(self) -> None:
        """The socket's file goes; memory stays only as long as its holders live."""
        with suppress(FileNotFoundError):
            self._path.unlink()
        for number in list(self._connections):
            self._drop(number)
        self._listener.close()
        self._selector.close()
        self._regions.close()

    def _read_parent(self) -> None:
        self._parent_lives = bool(os.read(sys.stdin.fileno(), 4096))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it went away again, or there are no descriptors left
            time.sleep(ACCEPT_PAUSE_S)
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(credentials)[1] != os.getuid() or len(self._connections) >= MAX_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        self._last_number += 1
        number = self._last_number
        self._connections[number] = connection
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._receive(number))

    def _receive(self, number: int) -> None:
        """One packet or the end of a connection. An end frees memory: holders unmap it before they close."""
        connection = self._connections.get(number)
        if connection is None:
            return  # dropped earlier in this round
        try:
            packet = connection.recv(MAX_PACKET_BYTES + 1)  # descriptors that come with it are closed by the kernel
            if not packet:
                self._drop(number)
                return
            reply, descriptors = self._answer(number, packet)
            socket.send_fds(connection, [encode(reply)], descriptors)
        except OSError:  # gone, or it does not read its answers
            self._drop(number)

    def _answer(self, number: int, packet: bytes) -> tuple[Reply, list[int]]:
        """The reply and the descriptors that go with it."""
        try:
            request = decode_request(packet)
            if isinstance(request, Lease):
                region, reused = self._regions.lease(number, request)
                return Leased(region.token, reused), [region.index]
            if isinstance(request, Attach):
                descriptor, slab_bytes = self._regions.attach(number, request)
                return Attached(slab_bytes), [descriptor]
            return self._regions.status(), []
        except HostTierError as error:
            return Refused(str(error)[:MAX_REASON_CHARACTERS]), []

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number)
        self._selector.unregister(connection)
        connection.close()
        self._regions.release(number)


def allow_many_descriptors() -> None:
    """A connection and a slab cost one each; the usual soft limit of 1024 is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
