"""The compiler of test runs (tests/support/kept_builds.py): the first build is the real one's, in memory; the next is
the same bytes, without it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kept_builds import BIN, kept_builds

BUILD = """
import torch
from workers.kernels.cpu_build import cpu_lora_library
library = cpu_lora_library(torch.float32)
print(open(library._name, "rb").read().hex())
"""


def built(temp: Path) -> str:
    """What a process builds, with its temporary files in `temp`."""
    env = {**os.environ, "TMPDIR": str(temp)}
    done = subprocess.run([sys.executable, "-c", BUILD], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif("REAL_GCC" not in os.environ, reason="there is no gcc")
def test_what_was_built_once_is_taken_and_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temp := tmp_path / "temp").mkdir()
    (log := tmp_path / "log").touch()
    compiler = tmp_path / "gcc"
    compiler.write_text(f'#!/bin/sh\necho asked >> {log}\nexec {os.environ["REAL_GCC"]} "$@"\n')
    compiler.chmod(0o755)
    with kept_builds(str(compiler)):
        assert shutil.which("gcc") == str(BIN / "gcc")
        first, second = built(temp), built(temp)
    assert first == second != ""
    assert log.read_text() == "asked\n"
    assert list(temp.iterdir()) == []
