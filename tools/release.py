"""Makes a release: checks the tree, builds sdist and wheel, tries them in empty places, and tags the commit.

    make release VERSION=0.1.0              # DRY_RUN=1: all but the tag

The version must be that of pyproject.toml and of the newest block of CHANGELOG.md, whose text is the tag's message.
Nothing is pushed or published. Archives are built from a clone of the commit, so that nothing else gets in, and are
installed and served where there is nothing else (tools/release_check.py), which takes minutes.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+")
BLOCK = re.compile(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d{2}-\d{2})\)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


class NotReleasable(Exception):
    """The tree cannot be released as this version; its text says why."""


def git(root: Path, *arguments: str) -> str:
    """The output of a command of git, without the line break at its end."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReleasable(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def notes_of(version: str, changelog: str) -> str:
    """The changelog's text of a version; NotReleasable unless it is the newest one and nothing is unreleased."""
    unreleased = changelog.partition("## Unreleased\n")[2].partition("\n## ")[0].strip()
    if unreleased:
        raise NotReleasable(f"CHANGELOG.md has entries under Unreleased: move them to a block '## {version} (date)'")
    newest = BLOCK.search(changelog)
    if newest is None or newest[1] != version or not newest[3].strip():
        raise NotReleasable(f"CHANGELOG.md does not begin with a block '## {version} (YYYY-MM-DD)' with entries")
    return newest[3].strip()


def check(root: Path, version: str) -> str:
    """Return the release's notes; NotReleasable says what is wrong with the tree at `root`."""
    if not VERSION.fullmatch(version):
        raise NotReleasable(f"VERSION={version!r} is no version such as 0.1.0")
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    if declared != version:
        raise NotReleasable(f"pyproject.toml has version {declared}")
    if changes := git(root, "status", "--porcelain"):
        raise NotReleasable(f"the tree is not clean:\n{changes}")
    if git(root, "tag", "--list", f"v{version}"):
        raise NotReleasable(f"the tag v{version} exists")
    return notes_of(version, (root / "CHANGELOG.md").read_text())


def build(root: Path, target: Path) -> list[Path]:
    """Build sdist and wheel of the commit into `target`; return them."""
    script = "import sys, setuptools.build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "tandem"
        git(root, "clone", "--quiet", "--no-local", "--depth", "1", root.as_uri(), str(clone))
        done = subprocess.run(
            [sys.executable, "-c", script, target], cwd=clone, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise NotReleasable(f"the build failed:\n{done.stderr[-2000:]}")
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return sorted(target.glob(f"tandem_serve-{version}*"))


def release(root: Path, version: str, try_archives: Callable[[Sequence[Path]], None], *, dry_run: bool) -> None:
    """Check, build into dist/, try and tag; NotReleasable if it cannot be. try_archives: raises it."""
    notes = check(root, version)
    archives = build(root, root / "dist")
    for archive in archives:
        print(f"built {archive.relative_to(root)}, {archive.stat().st_size / 2**20:.1f} MiB")
    try_archives(archives)
    if dry_run:
        print(f"a dry run: no tag v{version}, whose message would be\n\n{notes}")
        return
    git(root, "tag", "--annotate", "--cleanup=verbatim", f"v{version}", "--message", f"Tandem {version}\n\n{notes}\n")
    print(f"tagged v{version}; push it with: git push origin v{version}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--root", type=Path, default=ROOT)
    asked = parser.parse_args()
    from tools.release_check import check_archives  # which builds by this module

    try:
        release(asked.root, asked.version, check_archives, dry_run=asked.dry_run)
    except NotReleasable as error:
        print(f"tandem: no release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
