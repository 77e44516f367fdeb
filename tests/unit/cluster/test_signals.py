"""StartGuard in a process of its own: it ends what a signal alone does not, and leaves everything else alone."""

import signal
import subprocess
import sys
import textwrap

import pytest

BEGIN = """
import signal, sys, time
from cluster.signals import Signals, StartGuard, StopRequested
signals = Signals()
signals.install()
def overdue(number):
    print("overdue", number, flush=True)
"""


def run(body: str, number: int | None) -> tuple[int, str]:
    """Status and output of a process that gets the signal once it has said "ready"."""
    process = subprocess.Popen([sys.executable, "-c", BEGIN + textwrap.dedent(body)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if number is not None:
        process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    return process.returncode, output


STUCK = """
signals.raising = False  # as in a call that runs no handler
with StartGuard(overdue, patience_s=0.2):
    print("ready", flush=True)
    time.sleep(15)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_start_that_does_not_hear_its_signal_is_ended(number: int) -> None:
    assert run(STUCK, number) == (128 + number, f"overdue {number:d}\n")


def test_it_ends_the_process_even_when_taking_down_fails() -> None:
    status, output = run(STUCK.replace("overdue,", "lambda number: 1 / 0,"), signal.SIGTERM)
    assert (status, output) == (128 + signal.SIGTERM, "")


def test_a_start_that_ends_in_time_is_left_alone() -> None:
    body = """
    try:
        with StartGuard(overdue, patience_s=0.3):
            print("ready", flush=True)
            time.sleep(15)
    except StopRequested as stop:
        time.sleep(0.5)
        sys.exit(7)
    """
    assert run(body, signal.SIGTERM) == (7, "")


def test_once_dismissed_it_is_deaf_also_to_an_earlier_signal() -> None:
    body = """
    signals.raising = False
    with StartGuard(overdue, patience_s=0.3) as guard:
        print("ready", flush=True)
        assert signals.wait(10)
        guard.dismiss()
        time.sleep(0.6)
    """
    assert run(body, signal.SIGINT) == (0, "")
    assert run("StartGuard(overdue).__enter__().dismiss(); print('ready')", None) == (0, "")
