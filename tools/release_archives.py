"""What the archives of a release hold: all of the package that git has, nothing else, and metadata that PyPI takes."""

import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

TOPS = ("cluster", "configs", "offload", "parallel", "workers")
OWN = ("tandem/__init__.py", "tandem/py.typed")
LEFT_OUT = re.compile(r"\.md$|/ui/source/")
"""Files of the package's folders that are for readers of the checkout, and sources of built pages."""
TWINE = "twine>=6,<7"


def tracked(root: Path) -> set[str]:
    """The package's files as git has them at `root`, by their names in the wheel."""
    listed = subprocess.run(
        ["git", "ls-files", *TOPS, *OWN], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    kept = (name for name in listed if not LEFT_OUT.search(name))
    return {name if name in OWN else f"tandem/{name}" for name in kept}


def wheel_faults(wheel: Path, wanted: set[str]) -> Iterator[str]:
    """Yields a line for each file that the wheel lacks or has beside `wanted` and its metadata, and for a wheel whose
    metadata lacks a command or a license."""
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if not name.endswith("/")}
        metadata = {name.partition(".dist-info/")[2] for name in names if ".dist-info/" in name}
        commands = next((name for name in names if name.endswith("entry_points.txt")), None)
        if commands is None or "tandem = tandem.cluster.cli.console:main" not in packed.read(commands).decode():
            yield f"{wheel.name} has no command tandem"
    yield from (f"{wheel.name} lacks {name}" for name in sorted(wanted - names))
    others = {name for name in names if ".dist-info/" not in name} - wanted
    yield from (f"{wheel.name} has {name}, which is not in git" for name in sorted(others))
    if "licenses/LICENSE" not in metadata:
        yield f"{wheel.name} has no LICENSE"


def source_faults(source: Path, wheel: Path) -> Iterator[str]:
    """Yields a line for each file in which the wheel that the sdist builds differs from `wheel`, by name and content,
    and for each file beside the package that a builder needs."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(source) as packed:
        packed.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        for name in ("pyproject.toml", "setup.py", "constraints.txt", "README.md", "CHANGELOG.md", "LICENSE"):
            if not (unpacked / name).is_file():
                yield f"{source.name} lacks {name}"
        script = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
        built = subprocess.run(
            [sys.executable, "-c", script, folder], cwd=unpacked, capture_output=True, text=True, check=False
        )
        if built.returncode:
            yield f"{source.name} builds no wheel: {built.stderr.strip().splitlines()[-1]}"
            return
        (again,) = Path(folder).glob("*.whl")
        ours, theirs = _digests(wheel), _digests(again)
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    yield from (f"{source.name} builds another {name}" for name in names)


def _digests(wheel: Path) -> dict[str, int]:
    """CRC by name, without the list of digests, which has times in it."""
    with zipfile.ZipFile(wheel) as packed:
        return {one.filename: one.CRC for one in packed.infolist() if not one.filename.endswith("/RECORD")}


def twine_faults(archives: list[Path], place: Path) -> Iterator[str]:
    """Yields what `twine check --strict` says against the archives. place: a folder for its environment, kept."""
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
    install = [python, "-m", "pip", "--disable-pip-version-check", "-qq", "install", TWINE]
    subprocess.run(install, check=True, timeout=600)
    checked = subprocess.run(
        [python, "-m", "twine", "--no-color", "check", "--strict", *archives],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if checked.returncode:
        yield f"twine: {' '.join((checked.stdout + checked.stderr).split())}"
