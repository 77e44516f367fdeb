"""Kernels that one process of a test run has compiled are the next one's: a rank would spend two to four seconds of a
core on them at each start. By a `gcc` of our own, first in PATH, that asks the real one once per library and run.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BIN = Path(__file__).parent / "bin"


@contextmanager
def kept_builds(compiler: str) -> Iterator[None]:
    """For this process and all that it starts; `compiler` is the real one's path."""
    before = {name: os.environ.get(name) for name in ("PATH", "REAL_GCC", "KEPT_BUILDS")}
    with tempfile.TemporaryDirectory(prefix="tandem-builds-") as folder:
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])
        os.environ |= {"PATH": path, "REAL_GCC": compiler, "KEPT_BUILDS": folder}
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
