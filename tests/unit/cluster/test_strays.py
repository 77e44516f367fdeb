"""What a launcher says last is what it has seen: gone by itself, killed, or still there."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from cluster.launcher import Say
from cluster.strays import Strays

STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def stubborn() -> Iterator[psutil.Process]:
    """A process that has no mind to end."""
    child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    yield psutil.Process(child.pid)
    child.kill()
    child.stdout.close()
    child.wait()


def test_with_nothing_left_it_says_so() -> None:
    strays = Strays()
    strays.end([])
    assert strays.stopped_line(1.06) == "stopped: nothing is left running (took 1.1 s)"


def test_what_goes_by_itself_in_time_was_not_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2)"])
    strays = Strays()
    strays.end([psutil.Process(child.pid)], grace_s=20)
    assert (strays.killed, strays.alive) == ([], [])
    child.wait()


def test_what_stays_is_killed_and_named(stubborn: psutil.Process) -> None:
    strays = Strays()
    strays.end([stubborn], grace_s=0.05)
    assert not psutil.pid_exists(stubborn.pid)
    said = strays.stopped_line(2)
    assert said.startswith("stopped: nothing is left running (took 2.0 s); had to be killed: python")
    assert f"(pid {stubborn.pid})" in said


def test_what_survives_is_not_called_gone(stubborn: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "kill", lambda process: None)
    monkeypatch.setattr("cluster.strays.KILL_WAIT_S", 0.05)
    strays = Strays()
    strays.end([stubborn], grace_s=0.05)
    monkeypatch.undo()
    assert "still running" in strays.stopped_line(2) and "nothing" not in strays.stopped_line(2)


def test_a_terminal_that_is_gone_does_not_stop_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: object, **options: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("builtins.print", gone)
    Say().line("stopped")
