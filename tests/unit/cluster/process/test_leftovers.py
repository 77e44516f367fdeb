"""The last look: descendants that ended by themselves, were killed, or run in spite of it. In a process of its own, as
the look takes in everything below the process."""

import subprocess
import sys
import textwrap

import pytest

from tandem.cluster.service.launcher import Console

BEGIN = """
import os, subprocess, sys, time
import psutil
from tandem.cluster.process import leftovers as module
from tandem.cluster.process.leftovers import Leftovers, descendants
from tandem.cluster.process.prctl import adopt_orphans
adopt_orphans()
left = Leftovers()
def start(code, **options):
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, **options)
    return child, child.stdout.readline().strip()
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], " \\
    "start_new_session=True, stdout=subprocess.DEVNULL).pid, flush=True)"
"""


def run(body: str) -> list[str]:
    command = [sys.executable, "-c", BEGIN + textwrap.dedent(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_with_nothing_left_nothing_is_waited_for() -> None:
    body = """
    began_s = time.monotonic()
    left.end(30)
    assert time.monotonic() - began_s < 20
    print(left.stopped_line(1.06))
    """
    assert run(body) == ["stopped: nothing is left running (took 1.1 s)"]


def test_one_that_ends_by_itself_in_time_was_not_killed() -> None:
    body = """
    child, _ = start("import time; print('up', flush=True); time.sleep(0.3)")
    left.end(30)
    print(left.killed, left.alive, descendants())
    """
    assert run(body) == ["[] [] []"]


def test_one_that_stays_is_killed_and_named() -> None:
    body = """
    child, _ = start(STUBBORN)
    left.end(0.05)
    print(psutil.pid_exists(child.pid), child.pid)
    print(left.stopped_line(2))
    """
    alive, line = run(body)
    is_alive, pid = alive.split()
    assert is_alive == "False"
    assert line.startswith("stopped: nothing is left running (took 2.0 s); had to be killed: python")
    assert f"(pid {pid})" in line


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_an_orphan_in_a_session_of_its_own_is_found_and_killed() -> None:
    """Its parent has ended, as a killed launcher has."""
    body = """
    parent, orphan = start(PARENT)
    parent.wait(30)
    assert [process.pid for process in descendants()] == [int(orphan)]
    left.end(0.0)
    print(psutil.pid_exists(int(orphan)), f"(pid {orphan})" in left.killed[0], left.alive)
    """
    assert run(body) == ["False True []"]


def test_one_that_survives_is_not_called_gone() -> None:
    body = """
    child, _ = start(STUBBORN)
    psutil.Process.kill, module.KILL_WAIT_S = lambda process: None, 0.1
    left.end(0.05)
    print(left.stopped_line(2))
    child.kill()
    """
    (line,) = run(body)
    assert "still running" in line and "nothing" not in line


def test_a_terminal_that_is_gone_does_not_stop_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: object, **options: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("builtins.print", gone)
    Console().print_line("stopped")
