"""A folder of wheels from which lab nodes, which reach no index, install what the launch files name."""

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.service import REPOSITORY

PLACE = REPOSITORY / "out" / "launch"
DOWNLOAD_S = 1800
WANTED = (("-c", "constraints.txt", "torch"), ("-c", "constraints.txt", ".", "boto3"), ("setuptools>=77,<84", "wheel"))
"""As setup_commands say it, and what pip builds the checkout with."""


def wheel_folder() -> Path:
    """The folder, filled by pip, with the index of its configuration, where the pins have changed. The machine's own
    python3 downloads: the nodes' too. subprocess.SubprocessError where that fails."""
    said = "".join((REPOSITORY / name).read_text() for name in ("constraints.txt", "pyproject.toml"))
    stamp = PLACE / "wheels" / ".pins"
    pins = hashlib.sha256(said.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != pins:
        pip = PLACE / "pip" / "bin" / "pip"
        if not pip.exists():
            _run("/usr/bin/python3", "-m", "venv", str(PLACE / "pip"))
        for wanted in WANTED:
            _run(str(pip), "wheel", "-qq", "-w", str(stamp.parent), *wanted)
        for own in stamp.parent.glob("tandem_serve-*.whl"):
            own.unlink()  # nodes install the checkout that they are sent
        stamp.write_text(pins)
    return stamp.parent


def environment(name: str, requirements: Sequence[str]) -> Path:
    """An environment of its own for what a player needs beside Tandem, made if need be. subprocess.SubprocessError
    where that fails."""
    place = PLACE / name
    stamp = place / ".installed"
    wanted = "\n".join(requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        _run("/usr/bin/python3", "-m", "venv", "--clear", str(place))
        _run(str(place / "bin" / "pip"), "install", "-qq", *requirements)
        stamp.write_text(wanted)
    return place


def _run(*command: str) -> None:
    env = {**os.environ, "PATH": "/usr/local/bin:/usr/bin:/bin"}
    env.pop("PYTHONPATH", None)
    subprocess.run(command, cwd=REPOSITORY, env=env, check=True, timeout=DOWNLOAD_S)
