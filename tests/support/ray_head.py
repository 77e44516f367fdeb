"""A Ray cluster of one node that somebody else runs, for services that join it or are deployed in it."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.service import BIN, Service, free_port, wait_for


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder for Ray's sockets, whose paths must be short."""
    service = Service([sys.executable, "-c", ""], 0)
    try:
        service.process.wait(30)
        yield service.temp
    finally:
        service.clean()


@contextmanager
def ray_head(temp: Path, *, asks_for_token: bool = True) -> Iterator[tuple[str, dict[str, str]]]:
    """A Ray that somebody else runs on this machine: its address, and the environment of who may use it."""
    token = temp / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    env = {"RAY_AUTH_MODE": "token" if asks_for_token else "disabled", "RAY_AUTH_TOKEN_PATH": str(token)}
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "TMPDIR": str(temp)}
    env["RAY_raylet_start_wait_time_s"] = "120"  # 30 are too few on a machine with other work
    address = f"127.0.0.1:{free_port()}"
    options = ("--include-dashboard=false", "--include-log-monitor=false", "--no-monitor", "--num-cpus=4")
    command = [str(BIN / "ray"), "start", "--head", "--block", f"--port={address.rpartition(':')[2]}", *options]
    log = temp / "ray.out"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, f"--temp-dir={temp}", "--object-store-memory=80000000", "--node-ip-address=127.0.0.1"],
            env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(lambda: "--block" in log.read_text() or process.poll() is not None, 120, "Ray runs", 0.2)
        assert process.poll() is None, log.read_text()
        yield address, env
    finally:
        end_all(process)


def end_all(head: "subprocess.Popen[bytes]") -> None:
    """At once: an orderly end of Ray waits half a minute for what runs in it, and no test is about that."""
    started = [] if head.poll() is not None else psutil.Process(head.pid).children(recursive=True)
    for process in (*started, head):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    head.wait(60)
    psutil.wait_procs(started, 60)
