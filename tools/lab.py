"""A lab of nodes: namespaces of one Linux machine that act as machines of their own, with links to cut, slow and mend.

    python -m tools.lab --nodes 2 -- ip -brief address    # as root: runs a command on every node, one after the other

A node has a network, processes, a host name, mounts and a /dev/shm of its own, and the files of this machine. All nodes
hang on one switch. Nothing has a name outside: the kernel ends a node's processes with its first one, and takes links
and mounts down with the last. So nothing is left behind, but by a lab that was killed its folder, `lab-*` in that of
temporary files. No traffic leaves the lab, and no node reaches anything outside of it. Linux and root only. Used by
tests/lab.
"""

import argparse
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

NETWORK: Final = "10.66.0"
NOBODY: Final = "02:00:00:00:00:99"
"""The hardware's address of no node."""
SPACES: Final = ("--net", "--pid", "--uts", "--ipc", "--mount")
CLONE_NEWNET: Final = 0x40000000
FIRST_OF_NODE: Final = """
mount -t tmpfs -o size=2g tmpfs /dev/shm
hostname "$1"
ip link set lo up
echo ready
read -r _  # until the lab closes the other end, or has ended itself
"""
FIRST_OF_SWITCH: Final = """
ip link add switch type bridge
ip link set switch up
echo ready
read -r _
"""


class LabError(RuntimeError):
    """The lab cannot be built, or a command on a node has failed; says which, and what it said."""


def lack() -> str | None:
    """Return which program a lab lacks here, None if none."""
    for tool in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` here (packages util-linux and iproute2)"
    return None


def refusal() -> str | None:
    """Return why this machine allows no lab, None where it does. Needs what lack() looks for."""
    done = subprocess.run(["unshare", *SPACES, "--fork", "true"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"unshare is refused: {done.stderr.strip()}"


class Namespaces:
    """Namespaces of their own, held by a first process, with which all others in them end. pid: its number outside."""

    def __init__(self, kinds: Sequence[str], script: str, name: str) -> None:
        extra = ("--mount-proc",) if "--pid" in kinds else ()
        words = ["unshare", *kinds, *extra, "--fork", "--kill-child", "bash", "-ec", script, "bash", name]
        self._holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            self._holder.kill()
            raise LabError(f"{name} has not started: {' '.join(words[:-4])}")
        (pid,) = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self.pid = int(pid)
        self._ended = os.pidfd_open(self.pid)

    def close(self) -> None:
        """End all processes in them; return when there is none. Idempotent."""
        if self._holder.returncode is not None:
            return
        self._holder.kill()  # --kill-child: its child, the first process, is killed with it
        self._holder.wait()
        select.select([self._ended], [], [])  # the kernel ends a first process when it has ended the others
        os.close(self._ended)
        for pipe in (self._holder.stdin, self._holder.stdout):
            assert pipe is not None
            pipe.close()


class Node:
    """A node of a lab. name: its host name. address: at which the others reach it. folder: for files of its own, HOME
    and TMPDIR among them. Commands run as root, in this process's working directory."""

    def __init__(self, name: str, address: str, folder: Path, switch: Namespaces) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self._switch = switch
        self._port = f"to-{name}"
        folder.mkdir()
        self._spaces = Namespaces(SPACES, FIRST_OF_NODE, name)
        try:
            self._connect()
        except BaseException:
            self._spaces.close()
            raise

    def _connect(self) -> None:
        switch, address = self._switch, self.address
        ends = ["name", self._port, "netns", str(switch.pid), "type", "veth", "peer", "name", "eth0"]
        _run(["ip", "link", "add", *ends, "netns", str(self._spaces.pid)])
        _run(self.command(["ip", "address", "add", f"{address}/24", "dev", "eth0"]))
        _run(self.command(["ip", "link", "set", "eth0", "up"]))
        self._at_switch("ip", "link", "set", self._port, "master", "switch", "up")

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the words that run a command on the node."""
        return ["nsenter", "--target", str(self._spaces.pid), *SPACES, *words]

    def start(self, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on the node. options: Popen's; env: is added to the node's. The result is nsenter's, whose
        child is the command: it tells of the command's end, but signals reach only nsenter."""
        env = self._environment(options.pop("env", {}))
        return subprocess.Popen(self.command(words), env=env, start_new_session=True, **options)

    def run(self, *words: str, timeout_s: float = 60, env: Mapping[str, str] | None = None) -> str:
        """Run a command on the node; return what it wrote to standard output. LabError if it fails."""
        return _run(self.command(words), timeout_s, self._environment(env or {}))

    def pids(self) -> set[int]:
        """Return the processes of the node, by their numbers outside of it."""
        space = os.stat(f"/proc/{self._spaces.pid}/ns/pid").st_ino
        found = set()
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):  # it has ended meanwhile
                if os.stat(f"/proc/{name}/ns/pid").st_ino == space:
                    found.add(int(name))
        return found

    @contextmanager
    def network(self) -> Iterator[None]:
        """Let sockets that the calling thread opens meanwhile be the node's: for clients of what is served there."""
        with open("/proc/thread-self/ns/net") as before, open(f"/proc/{self._spaces.pid}/ns/net") as of_node:
            _enter(of_node.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def cut(self) -> None:
        """Cut the node off: packets vanish both ways, and nobody is told."""
        self._at_switch("ip", "link", "set", self._port, "nomaster")

    def cut_from(self, other: "Node") -> None:
        """Cut the way between two nodes, which all others still reach: packets vanish both ways, and nobody is told."""
        for here, there in ((self, other), (other, self)):
            _run(
                here.command(
                    ["ip", "neigh", "replace", there.address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent"]
                )
            )

    def slow(self, megabits_per_s: int) -> None:
        """Let no more than so much through, each way."""
        limit = ["tbf", "rate", f"{megabits_per_s}mbit", "burst", "64kb", "latency", "400ms"]
        self._at_switch("tc", "qdisc", "replace", "dev", self._port, "root", *limit)
        _run(self.command(["tc", "qdisc", "replace", "dev", "eth0", "root", *limit]))

    def mend(self) -> None:
        """End what cut(), cut_from() and slow() did."""
        self._at_switch("ip", "link", "set", self._port, "master", "switch")
        _run(self.command(["ip", "neigh", "flush", "dev", "eth0", "nud", "permanent"]))
        with suppress(LabError):  # it was not slow
            self._at_switch("tc", "qdisc", "delete", "dev", self._port, "root")
            _run(self.command(["tc", "qdisc", "delete", "dev", "eth0", "root"]))

    def kill(self) -> None:
        """End the node with all its processes at once, as a loss of power does. Idempotent."""
        self._spaces.close()

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        own = {"HOME": str(self.folder), "TMPDIR": str(self.folder), "XDG_STATE_HOME": str(self.folder / "state")}
        return {**os.environ, **own, **more}

    def _at_switch(self, *words: str) -> None:
        _run(["nsenter", "--target", str(self._switch.pid), "--net", *words])


class Lab:
    """A context manager: nodes of the names given, on one switch; at its end they are gone with their processes.
    folder: has one for each node; its path is short, as sockets of Ray lie below it."""

    def __init__(self, *names: str) -> None:
        self.nodes: dict[str, Node] = {}
        self._names = names
        self._switch: Namespaces | None = None

    def __enter__(self) -> Self:
        if (why := lack() or refusal()) is not None:
            raise LabError(why)
        self.folder = Path(tempfile.mkdtemp(prefix="lab-"))
        try:
            self._switch = Namespaces(("--net",), FIRST_OF_SWITCH, "switch")
            for name in self._names:
                self.add(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str) -> Node:
        """Add a node; it is the last in `nodes`, also when others have been killed."""
        assert self._switch is not None
        self.nodes[name] = Node(name, f"{NETWORK}.{len(self.nodes) + 1}", self.folder / name, self._switch)
        return self.nodes[name]

    def close(self) -> None:
        """End all nodes and remove their files. Idempotent."""
        for node in self.nodes.values():
            node.kill()
        if self._switch is not None:
            self._switch.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _enter(network: int) -> None:
    """Moves the calling thread into a network namespace, by its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, CLONE_NEWNET):
        raise LabError(f"setns: {os.strerror(ctypes.get_errno())}")


def _run(words: Sequence[str], timeout_s: float = 10, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, env=env)
    if done.returncode:
        raise LabError(f"`{' '.join(words)}` ended with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="how many (default 2)")
    parser.add_argument("command", nargs="+", help="what each of them runs, behind --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        with Lab(*(f"node{number}" for number in range(1, options.nodes + 1))) as lab:
            for node in lab.nodes.values():
                print(f"{node.name} ({node.address}):", flush=True)
                print(node.run(*options.command, timeout_s=3600), end="", flush=True)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
