"""Runs the self-checks of workers/self_checks/ in a process of their own and yields their events. Torch-free.

A kernel that this CPU cannot run, or a check that hangs, ends that process, not the command.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import IO, Any

COMMAND = (sys.executable, "-m", "tandem.workers.self_checks.self_check_run")
LIMIT_S = 330.0
"""The most seconds between two events. A check compiles its kernels first, and gcc has cpu_build.TIMEOUT_S for each
library: on CPUs without AVX512 those of quantized KV alone take two minutes."""
Event = dict[str, Any]


def self_checks(command: Sequence[str] = COMMAND, limit_s: float = LIMIT_S) -> Generator[Event]:
    """Yields the events of self_check_run.py. When its process does not finish, the last event is a failed check.

    Nothing of the process is left when the iterator is closed.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        assert process.stdout is not None
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        current, started_s = "the start of the checks", time.monotonic()
        try:
            while True:
                try:
                    line = lines.get(timeout=limit_s)
                except queue.Empty:
                    yield _failed(current, f"did not end within {limit_s:g} s", started_s)
                    return
                if not line:
                    break
                event = json.loads(line)
                current, started_s = event.get("begins", "the next check"), time.monotonic()
                yield event
            if status := process.wait():
                yield _failed(current, f"{_end(status)}{_last_line(errors)}", started_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the rank that a check may have started
            process.wait()


def _read(output: IO[bytes], lines: "queue.SimpleQueue[bytes]") -> None:
    """Passes on the lines; an empty one at the end."""
    with output:
        for line in output:
            lines.put(line)
    lines.put(b"")


def _failed(name: str, detail: str, started_s: float) -> Event:
    return {"name": name, "status": "failed", "detail": detail, "seconds": time.monotonic() - started_s}


def _end(status: int) -> str:
    return f"the process ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""
