"""A running `tandem serve` (or `serve run`) for integration tests: real processes, free ports, private temp folders.

Every wait has a deadline and polls a condition. stop() is what a user's Ctrl-C is, and checks that nothing stays.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from tandem.cluster.process.run_files import LOCK
from tandem.configs.environment import memory_folder, short_temp_folder
from tests.support.plain_http import plain_http

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "configs" / "demo" / "model"
BIN = Path(sys.executable).parent
START_S = 120.0
STOP_S = 30.0
T = TypeVar("T")


RAYS_OWN = 8265
"""Ray means its dashboard by this port, also where it starts none, and refuses it for anything else."""


def free_port() -> int:
    """A port below Ray's worker ports that nobody listens on now, and Ray has no use for. Up to four workers of one
    run have a range each: a service that starts does not hold its port yet."""
    first = 8100 + 450 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4)
    for port in range(first + os.getpid() % 200, first + 450):
        if port == RAYS_OWN:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def wait_for(condition: Callable[[], T], timeout_s: float, what: str, period_s: float = 0.05) -> T:
    """The condition's first true value."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(period_s)
    return value


class Service:
    """One child process in a session of its own, and all that it started."""

    def __init__(self, command: Sequence[str], port: int, cwd: Path | None = None, env: Mapping[str, str] = {}) -> None:
        self.temp = Path(tempfile.mkdtemp(prefix="tt-", dir=short_temp_folder()))
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = self.temp.with_suffix(".log")
        self.state = self.temp.with_suffix(".state")
        self._seen: dict[int, psutil.Process] = {}
        own = {"TMPDIR": str(self.temp), "XDG_RUNTIME_DIR": "", "XDG_STATE_HOME": str(self.state)}
        self.environment = {**os.environ, **own, **env}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=cwd or self.temp,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def log_files(self) -> dict[str, str]:
        """What its processes have logged, by file; the files outlive it, until clean()."""
        return {path.name: path.read_text() for path in self.state.rglob("*.log*")}

    def wait_ready(self, timeout_s: float = START_S) -> "Service":
        """Until it answers; the output is in the error when it does not."""
        wait_for(self._is_ready_or_dead, timeout_s, f"ready: {self.output}")
        assert self.process.poll() is None, self.output
        self.descendants()
        return self

    def descendants(self) -> list[psutil.Process]:
        """All processes below the service now; they are remembered for check_gone."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._seen |= {p.pid: p for p in found}
        return found

    def titled(self, title: str) -> list[psutil.Process]:
        """Descendants whose command line begins with `title`."""
        return [p for p in self.descendants() if title_of(p).startswith(title)]

    def get(self, path: str, **options: Any) -> httpx.Response:
        return plain_http.get(self.url + path, timeout=30, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return plain_http.post(self.url + path, json=json, timeout=120, **options)

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        beginnings = f"tandem:{name}{{", f"tandem:{name} "
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(beginnings)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """The signal to the whole process group, as a terminal sends it."""
        self.descendants()
        os.killpg(self.process.pid, number)

    def stop(self, number: int = signal.SIGINT) -> int:
        """Ctrl-C, and the exit status."""
        if self.process.poll() is None:
            self.interrupt(number)
        return self.process.wait(STOP_S)

    def check_gone(self, timeout_s: float = 5.0) -> None:
        """No process of the service runs, no file of it is left."""
        wait_for(lambda: not self._alive(), timeout_s, f"processes end: {[title_of(p) for p in self._alive()]}")
        left = sorted(str(p.relative_to(self.temp)) for p in self.temp.rglob("*"))
        assert left == [], left
        assert not [p for p in (memory_folder() or self.temp).glob(f"td-*/{LOCK}") if self._made(p)]

    def clean(self) -> None:
        """Whatever happened: ends what this service started and removes its folder."""
        self.descendants()
        for process in self._alive():
            with suppress(psutil.NoSuchProcess):  # some end with those that were killed before them
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(STOP_S)
        shutil.rmtree(self.temp, ignore_errors=True)
        shutil.rmtree(self.state, ignore_errors=True)
        self.log.unlink(missing_ok=True)

    def _made(self, file: Path) -> bool:
        """Whether the process of a private folder is of this service."""
        with suppress(OSError, ValueError):  # another service's is being made or removed
            return int(file.read_text()) in self._seen
        return False

    def _alive(self) -> list[psutil.Process]:
        return [p for p in self._seen.values() if is_alive(p)]

    def _is_ready_or_dead(self) -> bool:
        if self.process.poll() is not None:
            return True
        try:
            return plain_http.get(self.url + "/readyz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False


@contextmanager
def tandem_serve(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] = {}) -> Iterator[Service]:
    """`tandem serve ARGUMENTS --port FREE`, ready; cleaned up whatever the test does."""
    port = free_port()
    service = Service([str(BIN / "tandem"), "serve", *arguments, "--port", str(port)], port, cwd=cwd, env=env)
    try:
        yield service.wait_ready()
    finally:
        service.clean()


def run_tandem(
    *arguments: str, timeout_s: float = 60.0, cwd: Path | None = None, temp: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A verb that ends by itself; temp: a temp folder of its own."""
    return subprocess.run(
        [str(BIN / "tandem"), *arguments],
        cwd=cwd,
        env=None if temp is None else {**os.environ, "TMPDIR": str(temp), "XDG_RUNTIME_DIR": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """Holds the processes."""
    held = set(pids)
    for pid in held:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in held:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def is_alive(process: psutil.Process) -> bool:
    """It may end between the questions."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title_of(process: psutil.Process) -> str:
    """Its command line; empty when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
