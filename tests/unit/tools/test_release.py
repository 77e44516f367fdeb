"""`make release` on a clone: what is refused, what is built and tagged, and what a dry run leaves."""

import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools import release
from tools.release import ROOT, NotReleasable
from tools.release_archives import source_faults, tracked, wheel_faults

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
COMMANDS = f"tandem_serve-{VERSION}.dist-info/entry_points.txt"
BLOCK = "## {} (2026-11-27)\n\n### Added\n\n- # a line\n"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This repository's commit, with one block of changelog, committed."""
    folder = tmp_path_factory.mktemp("clone") / "tandem"
    release.git(ROOT, "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(folder))
    release.git(folder, "config", "user.email", "test@localhost")
    release.git(folder, "config", "user.name", "test")
    committed(folder, "# Changelog\n\n## Unreleased\n\n" + BLOCK.format(VERSION))
    return folder


def committed(folder: Path, changelog: str) -> None:
    (folder / "CHANGELOG.md").write_text(changelog)
    release.git(folder, "commit", "--all", "--allow-empty", "--quiet", "--message", "A changelog")


def test_archives_are_built_and_the_commit_is_tagged(
    clone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(archives: object) -> None:
        raise NotReleasable("it does not serve")

    seen: list[Path] = []
    release.release(clone, VERSION, seen.extend, dry_run=True)
    assert "no tag" in capsys.readouterr().out and not release.git(clone, "tag")
    wheel, source = (
        clone / "dist" / f"tandem_serve-{VERSION}-py3-none-any.whl",
        clone / "dist" / f"tandem_serve-{VERSION}.tar.gz",
    )
    names = zipfile.ZipFile(wheel).namelist()
    assert {"tandem/__init__.py", "tandem/py.typed", "tandem/workers/engine/engine.py"} <= set(names)
    assert any(name.endswith(".safetensors") for name in names) and any(name.endswith(".c") for name in names)
    with tarfile.open(source) as packed:
        assert f"tandem_serve-{VERSION}/pyproject.toml" in packed.getnames()
    assert not list(wheel_faults(wheel, tracked(clone)))
    wanted = tracked(clone) - {"tandem/py.typed"} | {"tandem/cluster/page.html"}
    assert list(wheel_faults(wheel, wanted)) == [
        f"{wheel.name} lacks tandem/cluster/page.html",
        f"{wheel.name} has tandem/py.typed, which is not in git",
    ]
    other = clone / "dist" / "other.whl"
    with zipfile.ZipFile(wheel) as packed, zipfile.ZipFile(other, "w") as changed:
        for name in packed.namelist():
            changed.writestr(name, b"x" if name in ("tandem/py.typed", COMMANDS) else packed.read(name))
    assert list(source_faults(source, other)) == [
        f"{source.name} builds another {n}" for n in ("tandem/py.typed", COMMANDS)
    ]
    assert list(wheel_faults(other, tracked(clone))) == [f"{other.name} has no command tandem"]
    other.unlink()
    monkeypatch.setattr(release, "build", lambda root, target: [wheel, source])
    with pytest.raises(NotReleasable, match="it does not serve"):
        release.release(clone, VERSION, refuse, dry_run=False)
    assert not release.git(clone, "tag")
    release.release(clone, VERSION, seen.extend, dry_run=False)
    assert seen == [wheel, source] * 2
    assert release.git(clone, "cat-file", "-t", f"v{VERSION}") == "tag"
    assert "- # a line" in release.git(clone, "tag", "--list", "--format=%(contents)", f"v{VERSION}")
    with pytest.raises(NotReleasable, match="exists"):
        release.check(clone, VERSION)
    release.git(clone, "tag", "--delete", f"v{VERSION}")


def test_what_does_not_fit_is_refused_by_name(clone: Path) -> None:
    with pytest.raises(NotReleasable, match=f"has version {VERSION}"):
        release.check(clone, "9.9.9")
    with pytest.raises(NotReleasable, match="no version"):
        release.check(clone, "v1")
    (clone / "new.py").write_text("")
    with pytest.raises(NotReleasable, match=r"not clean:\n\?\? new.py"):
        release.check(clone, VERSION)
    (clone / "new.py").unlink()


@pytest.mark.parametrize(
    ("changelog", "said"),
    [
        ("## Unreleased\n\n- x\n\n" + BLOCK.format("0.1.0"), "under Unreleased"),
        (BLOCK.format("0.2.0") + BLOCK.format("0.1.0"), "does not begin"),
        ("## 0.1.0 (unreleased)\n\n- x\n", "does not begin"),
        ("## 0.1.0 (2026-11-27)\n\n## 0.0.1 (2026-11-26)\n\n- x\n", "with entries"),
    ],
)
def test_the_changelog_needs_the_versions_block_on_top(changelog: str, said: str) -> None:
    with pytest.raises(NotReleasable, match=said):
        release.notes_of("0.1.0", f"# Changelog\n\n{changelog}")


def test_the_goal_calls_it() -> None:
    command = ["make", "--dry-run", "release", "VERSION=1.2.3", "DRY_RUN=1"]
    planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-m tools.release 1.2.3 --dry-run" in planned
    assert subprocess.run(["make", "--dry-run", "release"], cwd=ROOT, capture_output=True, check=False).returncode
