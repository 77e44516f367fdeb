"""The lab itself: nodes have what machines have, links do what is asked of them, and nothing is left."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.service import is_alive, wait_for
from tools.lab import Lab, LabError, Node

DATA = bytes(2**17)


def listening(node: Node) -> socket.socket:
    """A socket that listens on the node."""
    with node.network():
        return socket.create_server((node.address, 0))


def exchange(sender: socket.socket, receiver: socket.socket, data: bytes) -> float:
    """Sends data; returns the seconds until all of it was there."""
    began_s, left = time.monotonic(), len(data)
    sender.sendall(data)
    while left:
        left -= len(receiver.recv(2**16))
    return time.monotonic() - began_s


def test_nodes_are_machines_of_their_own(lab: Lab) -> None:
    a, b = lab.nodes.values()
    assert [node.run("hostname").strip() for node in (a, b)] == ["a", "b"]
    a.run("touch", "/dev/shm/of-a")
    with pytest.raises(LabError, match="No such file"):
        b.run("ls", "/dev/shm/of-a")
    assert not Path("/dev/shm/of-a").exists()
    assert a.run("sh", "-c", "echo $HOME").strip() == str(a.folder) != str(b.folder)
    assert not a.pids() & b.pids() and os.getpid() not in a.pids()
    with a.network(), pytest.raises(OSError):
        socket.create_connection(("10.67.0.1", 80), timeout=5)  # there is no way out


def test_links_are_cut_slowed_and_mended(lab: Lab) -> None:
    a, b = lab.nodes.values()
    with listening(b) as server, a.network():
        with socket.create_connection(server.getsockname(), timeout=30) as client:
            there, _ = server.accept()
            with there:
                b.slow(megabits_per_s=1)
                assert exchange(client, there, DATA) > 0.5, "at 1 Mbit/s it takes a second"
                b.mend()
                b.cut()
                there.settimeout(0.3)
                client.sendall(b"lost, and nobody is told")
                with pytest.raises(TimeoutError):
                    there.recv(1)
                b.mend()
                there.settimeout(60)
                assert there.recv(4) == b"lost", "TCP sends it again"


def test_a_lab_that_is_killed_leaves_its_folder_alone(tmp_path: Path) -> None:
    """No process, no namespace, and so no mount and no link, which have no name outside of those."""
    command = [sys.executable, "-m", "tools.lab", "--nodes", "1", "--", "sh", "-c", "echo runs; sleep 1000"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = psutil.Popen(command, env=env, stdout=subprocess.DEVNULL)

    def runs() -> bool:
        """Others of the lab's children come and go meanwhile."""
        with suppress(psutil.NoSuchProcess):
            return any("sleep" in process.name() for process in killed.children(recursive=True))
        return False

    wait_for(runs, 60, "it runs")
    of_lab = killed.children(recursive=True)
    spaces = set().union(*map(spaces_of, map(str, (process.pid for process in of_lab)))) - spaces_of("self")
    assert {name.partition(":")[0] for name in spaces} == {"net", "pid", "uts", "ipc", "mnt"}
    killed.kill()
    killed.wait(30)
    wait_for(lambda: not any(is_alive(process) for process in of_lab), 30, "its processes end")
    assert not spaces & set().union(*map(spaces_of, filter(str.isdecimal, os.listdir("/proc"))))
    assert [path.name[:4] for path in tmp_path.iterdir()] == ["lab-"]


def spaces_of(pid: str) -> set[str]:
    """The namespaces of a process, none of one that has ended."""
    with suppress(OSError):
        return {os.readlink(link) for link in Path("/proc", pid, "ns").iterdir() if "_for_" not in link.name}
    return set()


def test_a_node_that_cannot_be_made_leaves_nothing(lab: Lab) -> None:
    before = psutil.Process().children()
    with pytest.raises(LabError, match="ip link add"):
        lab.add("a-name-longer-than-a-link-may-have")
    assert psutil.Process().children() == before and [*lab.nodes] == ["a", "b"]


def test_a_killed_node_takes_all_with_it() -> None:
    with Lab("c") as lab:
        (node,) = lab.nodes.values()
        alone = node.pids()
        sleeping = node.start(["sleep", "1000"])
        wait_for(lambda: node.pids() - alone, 30, "it runs")
        held = [psutil.Process(pid) for pid in node.pids()]
        node.kill()
        sleeping.wait(30)
        assert not any(is_alive(process) for process in held)
    assert not lab.folder.exists()
