"""Installs torch into this Python's environment: the CPU build where there is no NVIDIA driver and pip finds one.

    make install                  # TORCH=cpu or TORCH=cuda chooses

Called before anything else is installed, so it needs the standard library and pip only. A build is the version of
constraints.txt with another local part (`2.13.0+cpu`); PyPI's own, which has none, is a CUDA build on Linux.
"""

import ctypes.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_SIZE, CPU_SIZE = "2.6 GB with NVIDIA's libraries", "0.2 GB"
"""Bytes to download of torch 2.13 on Linux (x86_64), in words."""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


class Choice(NamedTuple):
    """What pip is asked for, and what the user is told: () and "" where torch is there already, or there is only one
    build."""

    arguments: tuple[str, ...]
    words: str
    is_large: bool = False


def pinned(constraints: str) -> str:
    """The version of torch in the text of constraints.txt."""
    found = re.search(r"^torch==(\S+)$", constraints, re.MULTILINE)
    assert found is not None
    return found[1]


def has_driver(root: Path = Path("/")) -> bool:
    """True where programs can find NVIDIA's driver, in WSL too."""
    files = (root / "proc/driver/nvidia/version", root / "dev/nvidiactl", root / "usr/lib/wsl/lib/libcuda.so.1")
    return any(file.exists() for file in files) or bool(shutil.which("nvidia-smi") or ctypes.util.find_library("cuda"))


def is_offered(requirement: str) -> bool:
    """True if pip, as it is configured here, finds a version for the requirement. Nothing is installed."""
    asked = [*PIP, "install", "--dry-run", "--no-deps", "--quiet", "--ignore-installed", requirement]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def choose(
    asked: str, version: str, installed: str | None, driver: bool, offered: Callable[[str], bool], *, has_builds: bool
) -> Choice:
    """Chooses a build. asked: cpu, cuda, or nothing. installed: the version that is there. has_builds: PyPI has a CUDA
    build for this machine, and torch's own index others."""
    if not has_builds:
        return Choice(("torch",), "")
    if not asked and installed is not None and installed.partition("+")[0] == version:
        return Choice((), f"torch {installed} is there and stays (TORCH=cpu or TORCH=cuda for another build)")
    cpu, why = f"torch=={version}+cpu", "an NVIDIA driver is here" if driver else "there is no NVIDIA driver here"
    if asked == "cpu" and not offered(cpu):
        words = f"the CPU build of torch {version} ({CPU_SIZE}), from {CPU_INDEX}: pip's configuration offers none"
        return Choice((cpu, "--extra-index-url", CPU_INDEX), words)
    if asked == "cpu" or (not asked and not driver and offered(cpu)):
        return Choice((cpu,), f"the CPU build of torch {version} ({CPU_SIZE}): {'TORCH=cpu' if asked else why}")
    other = "" if asked else f"{why}; for the CPU build ({CPU_SIZE}): make install TORCH=cpu"
    if not asked and not driver:
        other = (
            f"{why}, but pip's configuration offers no CPU build ({CPU_SIZE}): stop this, and make install TORCH=cpu"
        )
    words = f"a CUDA build of torch {version}, {CUDA_SIZE}: {other or 'TORCH=cuda'}"
    return Choice((f"torch=={version},!={version}+cpu",), words, is_large=True)


def installed_version() -> str | None:
    """The version of torch in this environment."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def main(asked: str, constraints: Path = ROOT / "constraints.txt") -> int:
    """Installs torch; returns the exit status."""
    if asked not in ("", "cpu", "cuda"):
        print(f"tandem: TORCH={asked}: there are cpu and cuda", file=sys.stderr)
        return 2
    version = pinned(constraints.read_text())
    has_builds = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    choice = choose(asked, version, installed_version(), has_driver(), is_offered, has_builds=has_builds)
    if choice.words:
        print(f"tandem: {choice.words}", flush=True)
    if not choice.arguments:
        return 0
    quiet = () if choice.is_large else ("-qq",)  # large ones show a bar
    return subprocess.call([*PIP, *quiet, "install", "-c", str(constraints), *choice.arguments])


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    sys.exit(main(asked, *map(Path, sys.argv[2:3])))
