"""Ends of a running service other than Ctrl-C. Each is the last test of a file whose service it ends, as a start of its
own would take ten processes."""

import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.service import Service, title_of, wait_for
from tests.support.stream import Stream
from tests.support.verbs import run_verb_of

ASKED = {"model": "demo", "prompt": "Once upon a time", "ignore_eos": True}
LONG = {**ASKED, "max_tokens": 1000, "n": 100}
"""Many times the tokens that the cache of these services holds: its choices take turns for longer than any end lasts,
at any speed."""


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
    assert error == "tandem: error: Ray's raylet has died, and with it every group; the service cannot go on"
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


def end_by_a_second_signal(service: Service) -> None:
    """It does not wait for requests, however long --shutdown-timeout is: one that streams, and one that waits."""
    wait_until_up(service)
    with ThreadPoolExecutor(1) as pool:
        stream = Stream(service, LONG)
        whole = pool.submit(service.post, "/v1/completions", LONG)
        wait_for(lambda: service.get("/load").json()["requests_in_this_gateway"] == 2, 60, "both are in")
        service.interrupt()
        wait_for(lambda: "stopping" in service.output, 30, "the first signal is heard")
        service.interrupt()
        assert service.process.wait(30) == 0
        *_, error, done = stream.join()
        assert done == "data: [DONE]" and "shutting down" in error
        assert (whole.result().status_code, "shutting down" in whole.result().text) == (503, True)
    assert "tandem: 2 requests were cut off by the second signal\n" in service.output
    service.check_gone()


def end_by_a_drain(service: Service, headers: Mapping[str, str], timeout_s: int) -> None:
    """Short streams end well, long ones are cut cleanly, late requests are refused. timeout_s: --shutdown-timeout. A
    hundred choices over three or four rows last far longer, at any speed; a few tokens far less."""
    wait_until_up(service)
    with ThreadPoolExecutor(1) as pool:
        long = Stream(service, LONG, headers)
        whole = pool.submit(service.post, "/v1/completions", LONG, headers=headers)
        wait_for(lambda: service.get("/load").json()["requests_in_this_gateway"] == 2, 60, "both are in")
        short = [Stream(service, {**ASKED, "max_tokens": 50, "priority": -1}, headers) for _ in range(2)]
        service.interrupt(signal.SIGTERM)  # to the process group; Ray's processes are not in it
        wait_for(lambda: service.get("/readyz").status_code == 503, 30, "the gateway drains")
        _check_refused(service, headers)
        for stream in short:
            assert stream.join()[-1] == "data: [DONE]" and not any('"error"' in line for line in stream.join())
        *_, error, done = long.join()
        assert done == "data: [DONE]" and "shutting down" in error
        assert (whole.result().status_code, "shutting down" in whole.result().text) == (503, True)
    assert service.process.wait(30) == 0
    service.check_gone()
    lines = service.output.partition("tandem: stopping")[2].splitlines()
    said = [line for line in lines if " serve " not in line]  # Ray Serve says where a busy machine makes it wait
    assert len(said) == 3, said
    stopping, cut_off, stopped = said
    assert f"requests in flight have up to {timeout_s} s to finish (--shutdown-timeout)" in stopping
    assert cut_off == f"tandem: 2 requests were cut off after {timeout_s} s (--shutdown-timeout)"
    assert stopped.startswith("tandem: stopped: nothing is left running")


def _check_refused(service: Service, headers: Mapping[str, str]) -> None:
    """A service that drains tells late requests so, and who asks what it does."""
    late = service.post("/v1/completions", {**ASKED, "max_tokens": 4}, headers=headers)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "service_unavailable")
    assert late.headers["retry-after"] and late.headers["x-request-id"] and late.headers["connection"] == "close"
    assert service.get("/livez").status_code == 200
    head, gateway, group = run_verb_of(service.temp, "status").stdout.splitlines()[:3]
    assert service.url in head and head.endswith(", stopping") and "in flight" in gateway and "running" in group
