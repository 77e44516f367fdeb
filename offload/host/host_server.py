"""The event loop of the host-tier process: accepts connections of this user, answers each packet, detects their ends.

Run by host_process.py's main. A slow or broken client costs only its own connection. A lease, for which the kernel may
reserve memory for many seconds, is made on a separate thread; the loop then sends the reply.
"""

import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tandem.offload.host.host_messages import (
    MAX_PACKET_BYTES,
    Attach,
    Attached,
    HostTierError,
    Leased,
    LeaseRegion,
    Refused,
    Reply,
    Request,
    decode_request,
    encode,
)
from tandem.offload.host.host_regions import Regions

MAX_CONNECTIONS = 1024
BACKLOG = 128
ACCEPT_PAUSE_S = 0.01
MAX_REASON_CHARACTERS = 500
_PEER = struct.Struct("3i")  # pid, uid, gid


class HostServer:
    """The server. It listens from its construction on; run() returns when standard input ends."""

    def __init__(self, socket_path: Path, budget_bytes: int) -> None:
        self._path = socket_path
        self._regions = Regions(budget_bytes)
        self._connections: dict[int, socket.socket] = {}
        self._last_number = 0
        self._parent_lives = True
        self._leasing: set[int] = set()
        self._leased: deque[tuple[int, Reply, list[int]]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector = selectors.PollSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(socket_path))
        os.chmod(socket_path, 0o600)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._answer_leases)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._read_parent)

    def run(self) -> None:
        while self._parent_lives:
            for key, _ in self._selector.select():
                handle: Callable[[], None] = key.data
                handle()

    def close(self) -> None:
        """Closes the connections and removes the socket's file. Memory lives on only as long as its users."""
        with suppress(FileNotFoundError):
            self._path.unlink()
        for number in list(self._connections):
            self._drop(number)
        self._listener.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
        self._regions.close()

    def _read_parent(self) -> None:
        self._parent_lives = bool(os.read(sys.stdin.fileno(), 4096))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has gone, or no descriptors are left
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
        self._listen_to(number)

    def _receive(self, number: int) -> None:
        """Handles one packet or the end of a connection. An end frees memory: users unmap it before they close."""
        connection = self._connections.get(number)
        if connection is None:
            return  # dropped earlier in this round
        try:
            packet = connection.recv(MAX_PACKET_BYTES + 1)  # descriptors that come with it are closed by the kernel
            if not packet:
                self._drop(number)
                return
            request = decode_request(packet)
        except HostTierError as error:
            self._send(number, _refused(error), [])
        except OSError:  # gone
            self._drop(number)
        else:
            if isinstance(request, LeaseRegion):
                self._lease(number, request)
            else:
                self._send(number, *self._answer(number, request))

    def _send(self, number: int, reply: Reply, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._connections[number], [encode(reply)], descriptors)
        except OSError:  # gone, or the client does not read its replies
            self._drop(number)

    def _lease(self, number: int, request: LeaseRegion) -> None:
        """Makes a lease on a thread. Nothing is read from this connection, its end included, until the reply is
        sent."""
        self._leasing.add(number)
        self._selector.unregister(self._connections[number])

        def work() -> None:
            answer = self._answer(number, request)
            self._leased.append((number, *answer))
            with suppress(OSError):  # closed: the process ends
                self._wake_in.send(b"1")

        threading.Thread(target=work, name="lease", daemon=True).start()  # the process may end without it

    def _answer_leases(self) -> None:
        self._wake_out.recv(4096)
        while self._leased:
            number, reply, descriptors = self._leased.popleft()
            self._leasing.discard(number)
            self._listen_to(number)
            self._send(number, reply, descriptors)

    def _listen_to(self, number: int) -> None:
        self._selector.register(self._connections[number], selectors.EVENT_READ, lambda: self._receive(number))

    def _answer(self, number: int, request: Request) -> tuple[Reply, list[int]]:
        """Returns the reply and the descriptors that go with it."""
        try:
            if isinstance(request, LeaseRegion):
                region, reused = self._regions.lease(number, request)
                return Leased(region.token, reused), [region.index]
            if isinstance(request, Attach):
                descriptor, slab_bytes = self._regions.attach(number, request)
                return Attached(slab_bytes), [descriptor]
            return self._regions.status(), []
        except (HostTierError, OSError) as error:
            return _refused(error), []

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number)
        if number not in self._leasing:
            self._selector.unregister(connection)
        connection.close()
        self._regions.release(number)


def _refused(error: Exception) -> Refused:
    return Refused(str(error)[:MAX_REASON_CHARACTERS])
