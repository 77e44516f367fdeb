"""A `tandem serve` of a benchmark, and completions streamed from it.

The service ends by SIGINT, as by a user.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.workload import Job, Timeline
from tandem.cluster.cli.bench.load_client import answer_events

INSTALLED = Path(sys.executable).parent / "tandem"
TANDEM = [str(INSTALLED)] if INSTALLED.exists() else [sys.executable, "-m", "tandem.cluster.cli.main"]
START_DEADLINE_S = 180.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Service:
    """A running `tandem serve MODEL ...` on a free port, as a context manager; its log is `log`."""

    def __init__(self, model: str, arguments: list[str], log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.command = [*TANDEM, "serve", model, "--port", str(self.port), *arguments]

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


async def stream_completion(
    session: aiohttp.ClientSession, service: Service, job: Job, timeline: Timeline, fields: Mapping[str, Any] = {}
) -> Any:
    """Streams one completion of exactly the job's tokens into the timeline; the `usage` of the answer. fields: of the
    body, beside those.

    The tokens of a chunk arrive together, and are counted by the token ids that it returns.
    """
    body = {
        "model": service.model_name,
        "prompt": job.prompt,
        "max_tokens": job.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **fields,
    }
    usage = None
    async with session.post(f"{service.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for data in answer_events(response):
            if data != b"[DONE]":
                chunk = json.loads(data)
                count = len(chunk["choices"][0].get("token_ids") or ()) if chunk["choices"] else 0
                timeline.token_times_s.extend([time.perf_counter()] * count)
                usage = chunk.get("usage") or usage
    assert len(timeline.token_times_s) == job.output_len, (len(timeline.token_times_s), job.output_len)
    return usage
