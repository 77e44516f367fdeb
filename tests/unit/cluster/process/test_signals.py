"""Signals in a process of its own: who hears them, when, and how often."""

import signal
import subprocess
import sys
import textwrap

import pytest

from tandem.cluster.process.reaper import StatusPipe
from tandem.cluster.service import launcher as launcher_module
from tandem.configs.load import build_settings

BEGIN = """
import signal, sys, time
from tandem.cluster.process.signals import Signals, StopRequested
signals = Signals()
signals.install()
"""


def run(body: str, number: int | None, begin: str = BEGIN) -> tuple[int, str]:
    """Status and output of a process that gets the signal once it has said "ready"."""
    process = subprocess.Popen(
        [sys.executable, "-c", begin + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        bufsize=0,  # readline() takes no more than the line: what follows is communicate()'s
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    if number is not None:
        process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_raised_in_the_main_thread(number: int) -> None:
    body = """
    try:
        print("ready", flush=True)
        time.sleep(45)
    except StopRequested as stop:
        print(stop.number, signals.first(), signals.is_urgent)
    """
    assert run(body, number) == (0, f"{number:d} {number:d} False\n")


def test_held_it_is_raised_at_the_end() -> None:
    body = """
    try:
        with signals.held():
            print("ready", flush=True)
            assert signals.wait(30)
            print("whole")
    except StopRequested as stop:
        print(stop.number)
    """
    assert run(body, signal.SIGTERM) == (0, "whole\n15\n")


def test_no_handler_of_another_runs_and_no_child_is_deaf() -> None:
    """Ray sets handlers for SIGTERM in Python and in C++; both would be run by a thread that does not block it."""
    body = """
    import subprocess
    from tandem.cluster.process.signals import unblock
    signal.signal(signal.SIGTERM, lambda *_: print("another's", flush=True))
    child = subprocess.Popen(["sleep", "60"], preexec_fn=unblock)
    try:
        print("ready", flush=True)
        time.sleep(45)
    except StopRequested as stop:
        child.terminate()
        print(stop.number, child.wait(30), flush=True)
    """
    assert run(body, signal.SIGTERM) == (0, "15 -15\n")


def test_raised_where_python_cannot_pass_it_on_it_is_raised_again() -> None:
    body = """
    class Finalized:
        def __del__(self):
            print("ready", flush=True)
            time.sleep(45)
    try:
        thing = Finalized()
        del thing
        time.sleep(45)
        print("never raised")
    except StopRequested as stop:
        print("raised", stop.number, signals.first())
    """
    assert run(body, signal.SIGINT) == (0, "raised 2 2\n")


@pytest.mark.realtime
def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    body = """
    print("ready", flush=True)
    print(signals.wait(0.5))
    """
    before = BEGIN.replace("signals = ", "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nsignals = ")
    assert run(body, signal.SIGHUP, before) == (0, "False\n")


def test_one_that_comes_twice_at_once_is_one_and_a_later_one_is_urgent() -> None:
    body = """
    import os
    from tandem.cluster.process import signals as module
    module.TOGETHER_S = 3.0  # so that a busy machine does not come between the two
    signals.raising = False
    print("ready", flush=True)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        while signal.SIGTERM in signal.sigpending():
            time.sleep(0.001)
    assert signals.wait(30)
    print(signals.is_urgent)
    module.TOGETHER_S = 0.01
    os.kill(os.getpid(), signal.SIGINT)
    while not signals.is_urgent:
        time.sleep(0.01)
    print(signals.first())
    """
    assert run(body, None) == (0, "False\n15\n")


def test_one_that_comes_while_the_launcher_sets_them_up_interrupts_its_start() -> None:
    begin = """
import signal, threading, time
from tandem.cluster.process.reaper import StatusPipe
from tandem.cluster.service.launcher import Console, Launcher
from tandem.configs.load import build_settings
start = threading.Thread.start
def slow_start(thread):
    start(thread)
    if thread.name == "tandem-signals":
        print("ready", flush=True)
        time.sleep(45)
threading.Thread.start = slow_start
"""
    body = """
    print(Launcher(build_settings("demo", {}), None, Console(), StatusPipe(-1)).run())
    """
    status, output = run(body, signal.SIGTERM, begin)
    assert status == 0 and output.endswith("143\n"), output


def test_one_that_comes_after_another_process_failed_because_of_it_interrupts_the_start() -> None:
    begin = """
from tandem.cluster.process.reaper import StatusPipe
from tandem.cluster.service import launcher
from tandem.configs.load import build_settings
launcher.SIGNAL_AFTER_ERROR_S = 60.0
def failing(self):
    print("ready", flush=True)
    raise RuntimeError("a process that it started has died of the signal")
launcher.Launcher._start = failing
"""
    body = """
    print(launcher.Launcher(build_settings("demo", {}), None, launcher.Console(), StatusPipe(-1)).run())
    """
    status, output = run(body, signal.SIGINT, begin)
    assert status == 0 and output.endswith("130\n"), output


def test_an_error_of_the_start_without_a_signal_is_raised() -> None:
    made = launcher_module.Launcher(build_settings("demo", {}), None, launcher_module.Console(), StatusPipe(-1))
    made._signals = SilentSignals()  # type: ignore[assignment]
    made._start = failing_start  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="disk"):
        made.run()


class SilentSignals:
    raising = True

    def install(self) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        return False

    def first(self) -> None: ...


def failing_start() -> None:
    raise RuntimeError("the disk is full")
