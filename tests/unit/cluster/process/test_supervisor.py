"""Supervisor and reaper, with a launcher that starts no Ray but behaves as badly as one can."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.service import is_alive, wait_for

BEGIN = """
import os, signal, subprocess, sys, time
from tandem.cluster.process import supervisor
from tandem.cluster.process.run_files import PrivateFolder, RunFile, write_run_file
# what comes before it waits for signals
wait = supervisor.supervise
supervisor.supervise = lambda *pipe: (time.sleep(WAITS_AFTER_S), wait(*pipe))
status_pipe = supervisor.split(PATIENCE_S)
"""
READY = "print('ready', flush=True)\n"
DEAF = f"""
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
PrivateFolder()
pid = os.getpid()
write_run_file(RunFile(pid=pid, started_at=1.0, url="", model="m", service_id="s", redis_url=""))
sleeper = [sys.executable, "-c", "import time; time.sleep(120)"]
starts = "import os, subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
subprocess.run([sys.executable, "-c", starts, *sleeper])  # an orphan by now
subprocess.Popen(sleeper)
status_pipe.begun()
{READY}"""
"""A launcher with a folder, a run file, a child and an orphan in a session of its own."""
SOON_S, LATE_S = 0.2, 60.0
"""What a start may take after a signal: too little for one that is deaf, enough for any other."""


@pytest.fixture
def temp() -> Iterator[Path]:
    """The service's temp folder, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        yield Path(folder)


class Split:
    """A supervisor, a reaper and a launcher that runs `body`, which prints "ready"."""

    def __init__(
        self, body: str, temp: Path, patience_s: float = SOON_S, waits_after_s: float = 0.0, before: str = ""
    ) -> None:
        begin = before + BEGIN.replace("PATIENCE_S", str(patience_s)).replace("WAITS_AFTER_S", str(waits_after_s))
        self.temp = temp
        self.process = subprocess.Popen(
            [sys.executable, "-c", begin + textwrap.dedent(body)],
            stdout=subprocess.PIPE,
            bufsize=0,  # readline() takes no more than the line: what follows is communicate()'s
            env={**os.environ, "TMPDIR": str(temp), "XDG_RUNTIME_DIR": ""},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        self.supervisor = psutil.Process(self.process.pid)
        self.everyone = self.supervisor.children(recursive=True)
        self.reaper, self.launcher = self.everyone[:2] if len(self.everyone) > 1 else (None, None)

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Status and output, after the signal to the supervisor."""
        if number is not None:
            self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output.decode()

    def check_gone(self) -> None:
        """No process and no file is left."""
        wait_for(lambda: not [p for p in self.everyone if is_alive(p)], 30, "all end")
        assert list(self.temp.iterdir()) == []


def run(body: str, number: int | None, temp: Path, patience_s: float = SOON_S) -> tuple[int, str]:
    split = Split(body, temp, patience_s)
    ended = split.end(number)
    split.check_gone()
    return ended


def test_the_status_is_that_of_the_launcher(temp: Path) -> None:
    assert run(READY + "time.sleep(0.3); status_pipe.finished(); sys.exit(7)", None, temp) == (7, "")


@pytest.mark.parametrize("waits_after_s", [0.0, 0.5])
def test_a_signal_is_passed_on_whenever_it_comes(waits_after_s: float, temp: Path) -> None:
    body = """
    signal.signal(signal.SIGTERM, lambda *_: status_pipe.finished() or sys.exit(9))
    print("ready", flush=True)
    time.sleep(45)
    """
    assert Split(body, temp, LATE_S, waits_after_s).end(signal.SIGTERM) == (9, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_start_that_does_not_end_after_its_signal_is_ended_with_all_it_began(number: int, temp: Path) -> None:
    status, output = run(DEAF + "time.sleep(60)", number, temp)
    assert status == 128 + number
    assert output.startswith("tandem: interrupted before the service was up\ntandem: stopped: nothing is left running")
    assert output.count("pid") == 3, "the launcher, its child and its orphan"


def test_an_interruption_is_reported_once(temp: Path) -> None:
    """By the launcher, whose way down takes longer than a start may."""
    status, output = run("status_pipe.interrupted()\n" + DEAF + "time.sleep(60)", signal.SIGINT, temp)
    assert status == 128 + signal.SIGINT
    assert output.startswith("tandem: stopped: nothing is left running")


def test_once_started_it_has_all_the_time_it_wants(temp: Path) -> None:
    body = """
    signal.signal(signal.SIGINT, lambda *_: None)
    status_pipe.started()
    print("ready", flush=True)
    for _ in range(10):
        time.sleep(0.1)
    print("drained", flush=True)
    status_pipe.finished()
    """
    assert run(body, signal.SIGINT, temp) == (0, "drained\n")


def test_what_a_launcher_leaves_that_ends_in_order_is_killed_and_named(temp: Path) -> None:
    """After a second of grace. The status is the launcher's."""
    status, output = run(DEAF + "time.sleep(0.5); status_pipe.finished(); sys.exit(0)", None, temp)
    assert status == 0
    assert output.startswith("tandem: stopped: nothing is left running") and output.count("\n") == 1
    assert output.count("pid") == 2, "the child and the orphan"


def test_a_launcher_that_crashes_is_reported_and_cleared_up_after(temp: Path) -> None:
    body = DEAF + "status_pipe.started(); time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"
    status, output = run(body, None, temp)
    assert (status, output.splitlines()[0]) == (1, "tandem: the launcher died (SIGKILL)")


def test_a_crash_after_a_signal_has_the_status_of_the_signal(temp: Path) -> None:
    body = """
    signal.signal(signal.SIGTERM, lambda *_: os.abort())
    print("ready", flush=True)
    time.sleep(45)
    """
    status, output = run(body, signal.SIGTERM, temp)
    assert (status, output.splitlines()[0]) == (143, "tandem: interrupted before the service was up")


@pytest.mark.parametrize(("number", "status"), [(None, 1), (signal.SIGTERM, 143)])
def test_a_launcher_that_is_ended_by_ray_is_cleared_up_after(number: int | None, status: int, temp: Path) -> None:
    """With status 1 and without a word, while it serves or while it stops."""
    waits = "signal.signal(signal.SIGTERM, lambda *_: os._exit(1)); status_pipe.started()\n" + READY
    body = DEAF.replace(READY, waits) + ("time.sleep(0.5); os._exit(1)" if number is None else "time.sleep(45)")
    ended, output = run(body, number, temp)
    assert (ended, output.splitlines()[0]) == (status, "tandem: the launcher died (exit status 1)")


def test_a_launcher_that_hangs_may_ask_to_be_ended(temp: Path) -> None:
    body = DEAF + "status_pipe.started(); time.sleep(0.5); status_pipe.abort('no way on'); time.sleep(60)"
    status, output = run(body, None, temp)
    assert (status, output.splitlines()[0]) == (1, "tandem: no way on")


def test_a_signal_to_every_process_reaches_the_launcher_and_ends_neither_of_the_others(temp: Path) -> None:
    # A handler of Python's would not do: the interpreter takes it back as it ends, and the second signal, the reaper's
    # copy, may come then. The launcher blocks its signals instead.
    body = """
    from tandem.cluster.process.signals import Signals
    signals = Signals()
    signals.raising = False
    signals.install()
    status_pipe.started()
    print("ready", flush=True)
    signals.wait(45)
    status_pipe.finished()
    """
    split = Split(body, temp)
    for process in split.everyone:  # parents first
        process.send_signal(signal.SIGTERM)
    assert split.end(signal.SIGTERM) == (0, "")


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere orphans are not adopted")


@LINUX
@pytest.mark.parametrize("killed", [("supervisor",), ("supervisor", "launcher")])
def test_a_killed_supervisor_takes_all_along(killed: tuple[str, ...], temp: Path) -> None:
    split = Split(DEAF + "status_pipe.started(); time.sleep(60)", temp)
    for name in killed:
        with suppress(psutil.NoSuchProcess):  # the reaper was faster
            getattr(split, name).kill()
    status, output = split.end()
    assert status == -signal.SIGKILL
    why, stopped = output.splitlines()
    assert why == "tandem: the supervisor was killed" or (
        len(killed) == 2 and why.startswith("tandem: the launcher died")
    )
    assert stopped.startswith("tandem: stopped: nothing is left running")
    split.check_gone()


@LINUX
@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_a_killed_reaper_takes_all_along(number: signal.Signals | None, temp: Path) -> None:
    split = Split(DEAF + "status_pipe.started(); time.sleep(60)", temp)
    if number is not None:
        split.process.send_signal(number)
        wait_for(lambda: not pending(split.supervisor), 30, "the signal is passed on")
    assert split.reaper is not None
    split.reaper.kill()
    status, output = split.end()
    assert status == (1 if number is None else 128 + number)
    assert output.startswith("tandem: the reaper died (SIGKILL)\ntandem: stopped: nothing is left running")
    split.check_gone()


def pending(process: psutil.Process) -> int:
    """Signals of a process that wait to be taken, as a mask."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("ShdPnd")).split()[1], 16)


def test_a_reaper_that_fails_leaves_nothing_behind(temp: Path) -> None:
    """Its last act raises, in the reaper only: the supervisor clears up then."""
    fails = """
import os
from tandem.cluster.process import reaper
real, supervising = reaper.clear_up, os.getpid()
def clear_up(grace_s):
    if os.getpid() == supervising:
        return real(grace_s)
    raise PermissionError("not mine")
reaper.clear_up = clear_up
"""
    split = Split(DEAF, temp, LATE_S, before=fails)
    assert split.launcher is not None
    split.launcher.kill()
    status, output = split.end()
    assert status == 1
    assert "tandem: the reaper died (exit status 1)\ntandem: stopped: nothing is left running" in output
    split.check_gone()
