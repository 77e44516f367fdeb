"""Tests of Triton's kernels: in its interpreter, in a process of their own, and on a CUDA device where one is.

The interpreter has to be chosen before the kernels are imported, so a test starts pytest on its own file again.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""This process is the one of the interpreter."""
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 540

computes = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no interpreter, no CUDA device"
)
starts = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(), reason="this is the interpreter, or the kernels run on a device here"
)


def rowwise_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the interpreter multiply a tile row by row: numpy's products of matrices sum some rows in another order."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    class Numpy:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def matmul(self, a: Any, b: Any, **more: Any) -> Any:
            return np.stack([np.matmul(row, b, **more) for row in a])

    monkeypatch.setattr(interpreter, "np", Numpy())


@cache
def _server() -> "subprocess.Popen[str]":
    """Of this process, with which it ends, as its input does."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.support.interpreter_server"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def run_in_interpreter(file: str, *arguments: str) -> None:
    """Runs a file's tests in the interpreter; all must pass, and some must run. arguments: more of pytest's."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile() as output:
        server.stdin.write(json.dumps([["-x", *arguments, file], output.name]) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], LIMIT_S)[0]:
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
        status, said = server.stdout.readline().strip(), Path(output.name).read_text(errors="replace")
    assert status == "0", said
    assert " passed" in said
