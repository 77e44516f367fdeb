"""A peer's process, as its comparison sees it: commands of talk.py and their answers."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Jobs = Sequence[tuple[Sequence[int], int]]


@dataclass(frozen=True)
class Peer:
    """An engine to compare. python: that has `package`; module: of benchmarks.peers; options: of its engine."""

    name: str
    python: str
    package: str
    module: str
    options: Mapping[str, Any]

    @property
    def obstacle(self) -> str | None:
        """Why the peer cannot run, in words; None if its package is there."""
        words = [self.python, "-c", f"import {self.package}"]
        try:
            subprocess.run(words, check=True, capture_output=True, cwd=ROOT)
        except FileNotFoundError:
            return f"{self.python} is not there"
        except subprocess.CalledProcessError as error:
            return f"{self.python} cannot import {self.package}: {error.stderr.decode(errors='replace')[-200:].strip()}"
        return None


class PeerProcess:
    """A peer that runs until it is closed."""

    def __init__(self, peer: Peer, threads: int, log: Path) -> None:
        self.peer = peer
        options = json.dumps({**peer.options, "threads": threads})
        words = [peer.python, "-m", f"benchmarks.peers.{peer.module}", options]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, env=env
            )
        self._answer()

    def ask(self, do: str, **more: object) -> Any:
        """Returns the answer to a command. Raises RuntimeError if the process has ended, with its last words."""
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps({"do": do, **more}) + "\n").encode())
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            words = self._log.read_text(errors="replace")[-600:]
            raise RuntimeError(f"{self.peer.name} has ended with status {self._process.returncode}: {words}")
        return json.loads(line)
