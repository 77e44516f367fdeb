"""Ends of a running service other than Ctrl-C. Each is the last test of a file whose service it ends, as a start of its
own would take ten processes."""

import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.service import Service, title_of, wait_for


def wait_until_up(service: Service) -> None:
    """The launcher knows a moment after the gateway does; an end before that is one of the start."""
    wait_for(lambda: "serving demo" in service.output, 60, "the launcher knows that all is up")


def interrupt_everyone(service: Service, number: int) -> None:
    """A signal to the launcher and to every process below it, as service managers send it."""
    service.process.send_signal(number)
    for process in service.descendants():
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def end_by_a_signal_to_all(service: Service) -> None:
    """Nothing can be drained then. A signal to the launcher's process group alone is not that."""
    wait_until_up(service)
    interrupt_everyone(service, signal.SIGTERM)
    began_s = time.monotonic()
    assert service.process.wait(30) in (0, 128 + signal.SIGTERM), service.output
    print(f"ended after {time.monotonic() - began_s:.2f} s")
    assert "Traceback" not in service.output
    service.check_gone()


def end_by_a_dead_ray(service: Service) -> None:
    """The launcher says so in one line."""
    wait_until_up(service)
    (raylet,) = [p for p in service.descendants() if Path(title_of(p).partition(" ")[0]).name == "raylet"]
    raylet.kill()
    assert service.process.wait(30) == 2, service.output
    *_, error, stopped = service.output.splitlines()
    assert error == "tandem: error: Ray's own processes have died; the service cannot go on"
    assert stopped.startswith("tandem: stopped: nothing is left running")
    assert "Traceback" not in service.output
    service.check_gone()


def end_by_a_killed_launcher(service: Service) -> None:
    """The reaper ends everything, and names what it had to kill."""
    wait_until_up(service)
    (reaper,) = service.titled("tandem reaper")
    (launcher,) = reaper.children()
    launcher.kill()
    assert service.process.wait(30) == 1
    *_, died, stopped = service.output.splitlines()
    assert died == "tandem: the launcher died (SIGKILL)"
    assert stopped.startswith("tandem: stopped: nothing is left running") and "; had to be killed: " in stopped
    service.check_gone()
