"""Limits of what a process may use of its machine: cores, files that are open at once, ports.

Ports are those at which the processes of a service listen for each other, any free ones or those of --port-range:
coordinators, gateways, ranks and the private Redis of `serve run`. Clients' are elsewhere (--port), and what the
machine's kernel gives to libraries (gloo, NCCL) follows its own setting, KERNEL_RANGE.
"""

import errno
import os
import random
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tandem.configs.errors import SettingsError

CGROUP: Final = Path("/sys/fs/cgroup")
MANY_FILES: Final = 65_536
PORT_RANGE: Final = "--port-range"
KERNEL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File in which Linux says which ports it gives to sockets that ask for any."""


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
        return SettingsError(
            f"{self.first}-{self.last}: none of these ports is free at {host} on this machine", PORT_RANGE
        )


ANY_PORTS: Final = Ports()


def available_cores(cgroup: Path = CGROUP) -> int:
    """Return the number of cores that this process may use, at least 1: those of its affinity, or fewer where its
    container has a limit of CPU time, as a pod of Kubernetes has. More threads would be stopped in turns, in the middle
    of what others wait for. cgroup: the control group's folder, of version 2 or 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cpu_limit(cgroup)
    return cores if limit is None else max(1, min(cores, int(limit)))


def cpu_limit(cgroup: Path = CGROUP) -> float | None:
    """Return the CPU seconds that the control group may use in a second, None without a limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((cgroup / file).read_text() for file in files).split()
            limit = int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):  # no such group, or one without a limit: "max"
            continue
        return limit if limit > 0 else None  # -1: no limit, of version 1
    return None


def allow_many_open_files() -> int:
    """Raise the soft limit of open files to 65,536, as far as the hard limit allows; return the soft limit then.

    A connection costs one. The usual soft limit, 1,024, is for programs that use select(), which ours do not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MANY_FILES
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def parse_ports(text: str | None) -> Ports:
    """Reads "FIRST-LAST"; None: any. ValueError for other texts, and for ends that are no ports or the wrong way."""
    if text is None:
        return ANY_PORTS
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


def listen(address: str, ports: Ports = ANY_PORTS) -> socket.socket:
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
