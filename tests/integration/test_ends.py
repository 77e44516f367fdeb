"""How a service ends: signals in the start, a second signal, drains. The last tests of other files end their services
in other ways (tests/support/ends.py)."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.ends import interrupt_everyone
from tests.support.service import BIN, Service, free_port, run_tandem_status, tandem_serve, title_of, wait_for
from tests.support.stream import Stream

pytestmark = pytest.mark.cluster

PROMPT = "Once upon a time"


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


def test_a_second_signal_does_not_wait_for_requests() -> None:
    """A hundred and twenty rows make steps so slow that none of the requests is over by then."""
    with tandem_serve("demo", "--device", "cpu", "--shutdown-timeout", "60", "--max-num-seqs", "256") as service:
        asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 2000, "n": 10, "ignore_eos": True}
        streams = [Stream(service, asked) for _ in range(12)]
        service.interrupt()
        wait_for(lambda: "stopping" in service.output, 30, "the first signal is heard")
        service.interrupt()
        assert service.process.wait(30) == 0
        for stream in streams:
            *_, error, done = stream.join()
            assert done == "data: [DONE]" and "shutting down" in error
        assert "tandem: 12 requests were cut off by the second signal\n" in service.output
        service.check_gone()


def test_a_drain_ends_short_streams_well_cuts_long_ones_cleanly_and_refuses_late_requests() -> None:
    """A hundred choices over three rows last far longer than the timeout, at any speed; a few tokens far less."""
    asked = {"model": "demo", "prompt": PROMPT, "ignore_eos": True}
    arguments = ["demo", "--device", "cpu", "--shutdown-timeout", "12", "--max-num-seqs", "3"]
    with tandem_serve(*arguments) as service, ThreadPoolExecutor(1) as pool:
        many = {**asked, "max_tokens": 1000, "n": 100}
        long = [Stream(service, many)]
        whole = [pool.submit(service.post, "/v1/completions", many)]
        wait_for(lambda: service.get("/load").json()["requests_in_this_gateway"] == 2, 60, "both are in")
        short = [Stream(service, {**asked, "max_tokens": 50, "priority": -1}) for _ in range(2)]
        service.interrupt(signal.SIGTERM)  # to the process group; Ray's processes are not in it
        wait_for(lambda: service.get("/readyz").status_code == 503, 30, "the gateway drains")
        late = service.post("/v1/completions", {**asked, "max_tokens": 4})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "service_unavailable")
        assert late.headers["retry-after"] and late.headers["x-request-id"] and late.headers["connection"] == "close"
        assert service.get("/livez").status_code == 200
        head, group = run_tandem_status(service).splitlines()[:2]
        assert service.url in head and head.endswith(", stopping") and "running" in group
        for stream in short:
            assert stream.join()[-1] == "data: [DONE]" and not any('"error"' in line for line in stream.join())
        for stream in long:
            *_, error, done = stream.join()
            assert done == "data: [DONE]" and "shutting down" in error
        for answer in whole:
            assert (answer.result().status_code, "shutting down" in answer.result().text) == (503, True)
        assert service.process.wait(30) == 0
        service.check_gone()
        stopping, cut_off, stopped = service.output.partition(f"{service.port}/v1\n")[2].splitlines()
        assert "requests in flight have up to 12 s to finish (--shutdown-timeout)" in stopping
        assert cut_off == "tandem: 2 requests were cut off after 12 s (--shutdown-timeout)"
        assert stopped.startswith("tandem: stopped: nothing is left running")
