"""Places in which a release is installed as a user would: an empty environment of a Python here, or of a Debian."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

DEBIAN_PACKAGES = "python3,python3-venv,ca-certificates"
MAKE_S = 1200
QUIET = {"PIP_QUIET": "2", "PIP_PROGRESS_BAR": "off"}
"""pip says what fails only, whoever calls it."""


class NotHereError(Exception):
    """This place cannot be made on this machine; its text says why."""


class Place(Protocol):
    """Somewhere to install. Paths that `command` gets are of the place."""

    name: str

    def make(self, files: Sequence[Path]) -> str:
        """Makes it, empty but for an environment of Python and copies of `files` in its folder `files`; returns the
        version of its Python. NotHereError."""
        ...

    def command(self, *words: str) -> list[str]:
        """The words of this machine that run WORDS there, in its folder, with `bin` of the environment in PATH."""
        ...


def plain_environment() -> dict[str, str]:
    """This machine's environment without what leads to a checkout, or to an environment of Python."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_CONSTRAINT")
    return {name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("TANDEM_")}


class LocalPython:
    """An environment of a Python of this machine."""

    def __init__(self, python: str, folder: Path) -> None:
        """python: a name in PATH such as python3.13, or a path. folder: is removed and made."""
        self.name = f"{Path(python).name} here"
        self._python = python
        self._folder = folder

    def make(self, files: Sequence[Path]) -> str:
        found = shutil.which(self._python)
        if found is None or subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode:
            raise NotHereError(f"{self._python} is not on this machine, or has no venv")
        shutil.rmtree(self._folder, ignore_errors=True)
        (self._folder / "files").mkdir(parents=True)
        for file in files:
            shutil.copy(file, self._folder / "files")
        subprocess.run([found, "-m", "venv", self._folder / "env"], check=True, env=plain_environment(), timeout=MAKE_S)
        return _version(self)

    def command(self, *words: str) -> list[str]:
        path = f"PATH={self._folder / 'env' / 'bin'}:{os.environ['PATH']}"
        return ["env", "-C", str(self._folder), path, *words]


class DebianTree:
    """A Debian in a folder, made by mmdebstrap and entered by chroot, with the network of this machine."""

    def __init__(self, suite: str, folder: Path, mirror: str = "http://deb.debian.org/debian") -> None:
        """folder: is removed and made."""
        self.name = f"Debian {suite}"
        self._suite = suite
        self._folder = folder
        self._mirror = mirror

    def make(self, files: Sequence[Path]) -> str:
        if os.geteuid() or shutil.which("mmdebstrap") is None or shutil.which("unshare") is None:
            raise NotHereError("it needs root, and mmdebstrap (apt-get install mmdebstrap)")
        shutil.rmtree(self._folder, ignore_errors=True)
        make = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={DEBIAN_PACKAGES}"]
        made = subprocess.run(
            [*make, self._suite, self._folder, self._mirror],
            capture_output=True,
            text=True,
            check=False,
            timeout=MAKE_S,
        )
        if made.returncode:
            raise NotHereError(f"mmdebstrap: {made.stderr.strip().splitlines()[-1]}")
        (self._folder / "srv" / "files").mkdir()
        for file in files:
            shutil.copy(file, self._folder / "srv" / "files")
        shutil.copy("/etc/resolv.conf", self._folder / "etc" / "resolv.conf")
        subprocess.run(self.command("python3", "-m", "venv", "env"), check=True, timeout=MAKE_S)
        return _version(self)

    def command(self, *words: str) -> list[str]:
        """In a mount namespace, so that nothing stays mounted; with what pip's configuration here names."""
        path = "/srv/env/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        settings = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", **QUIET, **_pip_settings()}
        mounts = "".join(_bound(path, self._folder) for path in _paths_of(settings))
        root = str(self._folder)
        variables = shlex.join(f"{name}={value}" for name, value in settings.items())
        script = (
            f"mount --rbind /dev {root}/dev; mount -t proc proc {root}/proc; mount -t tmpfs tmpfs {root}/tmp; {mounts}"
            f'exec env -i {variables} chroot {root} sh -c \'cd /srv && exec "$@"\' sh "$@"'
        )
        return ["unshare", "--mount", "sh", "-ec", script, "sh", *words]


def _pip_settings() -> dict[str, str]:
    """pip's configuration on this machine as variables, with its cache of downloads."""
    listed = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=False).stdout
    found = re.findall(r"^(?:global|install)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    settings = {f"PIP_{name.upper().replace('-', '_')}": value for name, value in found if name != "constraint"}
    cache = subprocess.run(["pip", "cache", "dir"], capture_output=True, text=True, check=False).stdout.strip()
    return settings | ({"PIP_CACHE_DIR": cache} if cache and Path(cache).is_dir() else {})


def _paths_of(settings: dict[str, str]) -> list[Path]:
    """Folders and files of this machine that pip's settings name, as indexes and certificates."""
    values = " ".join(value for name, value in settings.items() if name.startswith("PIP_"))
    found = {Path(path) for path in re.findall(r"(?:file://)?(/[\w./-]+)", values)}
    return sorted(path for path in found if path.exists())


def _bound(path: Path, root: Path) -> str:
    """Commands that show a folder or a file of this machine at the same place in a tree."""
    there = shlex.quote(f"{root}{path}")
    made = f"mkdir -p {there}" if path.is_dir() else f"mkdir -p $(dirname {there}); touch {there}"
    return f"{made}; mount --bind {shlex.quote(str(path))} {there}; "


def _version(place: Place) -> str:
    asked = place.command("python", "-c", "import platform; print(platform.python_version())")
    return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
