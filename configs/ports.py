"""Ports at which the processes of a service listen for each other: any free ones, or those of --port-range.

Used by coordinators, gateways, ranks and the private Redis of `serve run`. Listening ports of clients are elsewhere
(--port), and what the machine's kernel gives to libraries (gloo, NCCL) follows its own setting, KERNEL_RANGE.
"""

import errno
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tandem.configs.errors import SettingsError

FLAG: Final = "--port-range"
KERNEL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Where Linux says which ports it gives to sockets that ask for any."""


class Ports(NamedTuple):
    """A range of ports, both ends included; 0 to 0: whatever is free."""

    first: int = 0
    last: int = 0

    def tries(self) -> Iterator[int]:
        """Yields every port once, from a random one on: 0 stands for any. Neighbours of one node seldom meet so."""
        size = self.last - self.first + 1
        begin = random.randrange(size)
        return (self.first + (begin + step) % size for step in range(size))

    def none_free(self, host: str) -> SettingsError:
        """Returns the error for a range without a free port on this machine."""
        return SettingsError(f"{self.first}-{self.last}: none of these ports is free at {host} on this machine", FLAG)


ANY: Final = Ports()


def parse_ports(text: str | None) -> Ports:
    """Reads "FIRST-LAST"; None: any. ValueError for other texts, and for ends that are no ports or the wrong way."""
    if text is None:
        return ANY
    first, _, last = text.partition("-")
    ports = Ports(int(first), int(last))
    if not 1024 <= ports.first <= ports.last <= 65535:
        raise ValueError(text)
    return ports


def kernel_ports(file: Path = KERNEL_RANGE) -> Ports | None:
    """Returns the ports that the kernel gives to sockets that ask for any; None where it does not say."""
    try:
        first, last = map(int, file.read_text().split())
    except (OSError, ValueError):
        return None
    return Ports(first, last)


def listen(address: str, ports: Ports = ANY) -> socket.socket:
    """Returns a socket that listens at one address of this machine. OSError; SettingsError if none of the ports is
    free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports.tries():
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen()
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or not port:
                raise
        else:
            return listener
    raise ports.none_free(address)
