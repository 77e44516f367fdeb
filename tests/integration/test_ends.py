"""How a service ends whose start gets a signal. The last tests of other files end services that run
(tests/support/ends.py)."""

import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.ends import interrupt_everyone
from tests.support.service import BIN, Service, free_port, title_of, wait_for

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_leaves_nothing(number: int) -> None:
    port = free_port()
    service = Service([str(BIN / "tandem"), "serve", "demo", "--port", str(port)], port)
    try:
        wait_for(lambda: [p for p in service.descendants() if "raylet" in title_of(p)], 60, "Ray is starting")
        assert service.stop(number) == 128 + number
        service.check_gone()
    finally:
        service.clean()


NO_PYTHON_YET = "Fatal Python error: init_"
"""What the interpreter says, with status 1, if SIGINT comes while it begins itself, before any of our code."""
MOMENTS_S = {
    signal.SIGINT: (1.2, 0.3, 0.8, 1.6, 2.2, 3.0),
    signal.SIGTERM: (2.4, 0.6, 1.0, 1.4, 1.8, 2.8),
}
"""Seconds from the start to the signal: the first of each always, all in `make chaos`."""


@pytest.mark.parametrize(
    ("number", "moment_s"),
    [
        pytest.param(number, moment_s, marks=pytest.mark.chaos if at else ())
        for number, moments_s in MOMENTS_S.items()
        for at, moment_s in enumerate(moments_s)
    ],
)
def test_a_signal_to_every_process_ends_the_start_soon_whenever_it_comes(
    number: signal.Signals, moment_s: float
) -> None:
    """As service managers send it: Ray's own processes get it, and the launcher may be waiting for one."""
    port = free_port()
    service = Service([str(BIN / "tandem"), "serve", "demo", "--port", str(port)], port)
    began_s = time.monotonic()
    try:
        while time.monotonic() < began_s + moment_s:
            service.descendants()
            time.sleep(0.02)
        interrupt_everyone(service, number)
        signalled_s = time.monotonic()
        wait_for(lambda: service.descendants() is None or service.process.poll() is not None, 10, f"ends: {moment_s}")
        took_s = time.monotonic() - signalled_s
        print(f"{number.name} after {moment_s:.1f} s: {service.process.returncode} after {took_s:.2f} s")
        ends = {128 + number, -number}  # the latter before the launcher listens
        assert service.process.returncode in ends or NO_PYTHON_YET in service.output, service.output
        assert "Traceback" not in service.output or "starting" not in service.output
        service.check_gone()
        wait_for(lambda: not naming(service.temp), 5, f"no process of Ray's runs: {moment_s}")
    finally:
        service.clean()


def naming(folder: Path) -> list[psutil.Process]:
    """Processes with a folder below on their command line, as Ray's own have, seen before or not."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if f"{folder}/td-" in title_of(process):
                found.append(process)
    return found
