"""Starts `tandem serve` for a benchmark, waits until it answers, and stops it (SIGINT, as a user would)."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

TANDEM = Path(sys.executable).parent / "tandem"
START_DEADLINE_S = 180.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Service:
    """A running `tandem serve MODEL ...` on a free port. Use as a context manager; its log is `log`."""

    def __init__(self, model: str, arguments: list[str], log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.command = [str(TANDEM), "serve", model, "--port", str(self.port), *arguments]

    def __enter__(self) -> "Service":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.started_s = time.perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        self.first_answer_s = self._await_first_answer()
        return self

    def _await_first_answer(self) -> float:
        """Seconds from exec until a completion of one token was answered."""
        while time.perf_counter() - self.started_s < START_DEADLINE_S:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"tandem serve ended with {self.process.returncode}:\n{self.log.read_text()[-2000:]}"
                )
            try:
                models = json.load(urllib.request.urlopen(f"{self.url}/v1/models", timeout=2))
                self.model_name = models["data"][0]["id"]
                body = json.dumps({"model": self.model_name, "prompt": "Hello", "max_tokens": 1}).encode()
                request = urllib.request.Request(
                    f"{self.url}/v1/completions", body, {"content-type": "application/json"}
                )
                json.load(urllib.request.urlopen(request, timeout=30))
                return time.perf_counter() - self.started_s
            except (urllib.error.URLError, OSError, ValueError):
                time.sleep(0.05)
        raise TimeoutError(f"no answer within {START_DEADLINE_S} s:\n{self.log.read_text()[-2000:]}")

    def __exit__(self, *_: object) -> None:
        os.kill(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
