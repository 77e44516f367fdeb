"""The lab itself: nodes have what machines have, links do what is asked of them, and nothing is left."""

import os
import socket
import time
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
