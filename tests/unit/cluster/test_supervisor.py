"""The supervisor, with a child that is no launcher but behaves as badly as one can."""

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

BEGIN = """
import os, signal, subprocess, sys, time
from pathlib import Path
from cluster import supervisor
supervisor.Supervisor.__init__.__defaults__ = (PATIENCE_S,)
# what comes before it listens
listen = supervisor.Supervisor.run
supervisor.Supervisor.run = lambda *told: (time.sleep(LISTENS_AFTER_S), listen(*told))
told = supervisor.split()
"""
SOON_S, LATE_S = 0.2, 60.0
"""What a start may take after a signal: too little for one that is deaf, enough for any other."""


def not_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def begun(patience_s: float, listens_after_s: float = 0.0) -> str:
    return BEGIN.replace("PATIENCE_S", str(patience_s)).replace("LISTENS_AFTER_S", str(listens_after_s))


def run(
    body: str, number: int | None, *arguments: str, patience_s: float = SOON_S, listens_after_s: float = 0.0
) -> tuple[int, str]:
    """Status and output of a supervisor that gets the signal once its child has said "ready"."""
    begin = begun(patience_s, listens_after_s)
    command = [sys.executable, "-c", begin + textwrap.dedent(body), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=not_under_nohup)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if number is not None:
        process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def test_the_status_is_that_of_the_child() -> None:
    assert run("print('ready', flush=True); told.over(); sys.exit(7)", None) == (7, "")


def test_a_signal_is_passed_on_and_a_start_that_ends_in_time_is_left_alone() -> None:
    body = """
    signal.signal(signal.SIGTERM, lambda *_: told.over() or sys.exit(9))
    print("ready", flush=True)
    time.sleep(45)
    """
    assert run(body, signal.SIGTERM, patience_s=LATE_S) == (9, "")


def test_a_signal_is_passed_on_that_comes_before_anybody_listens() -> None:
    body = """
    signal.signal(signal.SIGTERM, lambda *_: told.over() or sys.exit(9))
    print("ready", flush=True)
    time.sleep(45)
    """
    assert run(body, signal.SIGTERM, patience_s=LATE_S, listens_after_s=0.5) == (9, "")


def inhabitants(folder: Path) -> list[psutil.Process]:
    """Processes that run in a folder below, removed or not."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd().startswith(str(folder)):
                found.append(process)
    return found


DEAF = """
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
folder = Path(sys.argv[1])
(folder / "empty").mkdir()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True, cwd=folder / "empty")
told.folder(folder)
print("ready", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_start_that_does_not_hear_its_signal_is_ended_with_all_it_began(number: int, tmp_path: Path) -> None:
    folder = tmp_path / "td"
    folder.mkdir()
    status, output = run(DEAF + "time.sleep(60)", number, str(folder))
    assert status == 128 + number
    assert output.startswith("tandem: interrupted before the service was up\ntandem: stopped: nothing is left running")
    assert not folder.exists()
    assert not inhabitants(folder)


def test_an_interruption_is_said_once(tmp_path: Path) -> None:
    """By the launcher, whose way down takes longer than a start may."""
    folder = tmp_path / "td"
    folder.mkdir()
    body = DEAF.replace("print", "told.interrupted(); print") + "time.sleep(60)"
    status, output = run(body, signal.SIGINT, str(folder))
    assert status == 128 + signal.SIGINT
    assert output.startswith("tandem: stopped: nothing is left running")


def test_once_started_it_has_all_the_time_it_wants() -> None:
    body = """
    signal.signal(signal.SIGINT, lambda *_: None)
    told.started()
    print("ready", flush=True)
    for _ in range(10):
        time.sleep(0.1)
    print("drained", flush=True)
    told.over()
    """
    assert run(body, signal.SIGINT) == (0, "drained\n")


def test_a_launcher_that_crashes_is_said_and_cleared_up_after(tmp_path: Path) -> None:
    folder = tmp_path / "td"
    folder.mkdir()
    status, output = run(DEAF + "told.started(); os.kill(os.getpid(), signal.SIGKILL)", None, str(folder))
    assert (status, output.splitlines()[0]) == (1, "tandem: the launcher died (SIGKILL)")
    assert not folder.exists()


def test_a_crash_after_a_signal_has_the_status_of_the_signal(tmp_path: Path) -> None:
    body = """
    signal.signal(signal.SIGTERM, lambda *_: os.abort())
    print("ready", flush=True)
    time.sleep(45)
    """
    status, output = run(body, signal.SIGTERM)
    assert (status, output.splitlines()[0]) == (143, "tandem: interrupted before the service was up")


@pytest.mark.parametrize(("number", "status"), [(None, 1), (signal.SIGTERM, 143)])
def test_a_launcher_that_is_ended_by_ray_is_cleared_up_after(number: int | None, status: int, tmp_path: Path) -> None:
    """With status 1 and without a word, while it serves or while it stops."""
    folder = tmp_path / "td"
    folder.mkdir()
    waits = "signal.signal(signal.SIGTERM, lambda *_: os._exit(1)); told.started(); print('ready', flush=True)\n"
    body = DEAF.replace('print("ready", flush=True)\n', waits + ("os._exit(1)" if number is None else "time.sleep(45)"))
    ended, output = run(body, number, str(folder))
    assert (ended, output.splitlines()[0]) == (status, "tandem: the launcher died (exit status 1)")
    assert not folder.exists()
    assert not inhabitants(folder)


def test_a_launcher_that_hangs_may_ask_to_be_ended(tmp_path: Path) -> None:
    folder = tmp_path / "td"
    folder.mkdir()
    status, output = run(DEAF + "told.started(); told.end('no way on'); time.sleep(60)", None, str(folder))
    assert (status, output.splitlines()[0]) == (1, "tandem: no way on")
    assert not folder.exists()


def test_a_killed_supervisor_takes_the_launcher_along() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", begun(1.0) + "print(os.getpid(), flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    child.wait(30)
    assert os.getpid() != child.pid
