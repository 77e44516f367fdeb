"""The folder in memory: only where it is one, and where systemd leaves files of a user who logs out."""

import os
import pwd
from pathlib import Path

import pytest

from tandem.configs import environment
from tandem.configs.environment import FIRST_USER, memory_folder

SHM = "shm /dev/shm tmpfs rw 0 0\n"


def system(root: Path, mounts: str, *, systemd: bool = False, lingers: str | None = None) -> Path:
    """A root of a file system."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mounts").write_text("/dev/sda1 / ext4 rw 0 0\n" + mounts)
    if systemd:
        (root / "run/systemd/users").mkdir(parents=True)
    if lingers is not None:
        (root / "var/lib/systemd/linger").mkdir(parents=True)
        (root / "var/lib/systemd/linger" / lingers).touch()
    return root


@pytest.mark.parametrize(
    ("mounts", "uid", "systemd", "found"),
    [
        (SHM, FIRST_USER, False, True),
        (SHM, FIRST_USER, True, False),
        (SHM, FIRST_USER - 1, True, True),
        (SHM, 0, True, True),
        ("", 0, False, False),
        (SHM + "/dev/sdb1 /dev/shm ext4 rw 0 0\n", 0, False, False),
    ],
)
def test_where_files_stay_in_memory(tmp_path: Path, mounts: str, uid: int, systemd: bool, found: bool) -> None:
    root = system(tmp_path, mounts, systemd=systemd)
    assert memory_folder(root, uid) == (root / "dev/shm" if found else None)


@pytest.mark.parametrize("lingers", [True, False])
def test_what_a_user_who_lingers_has_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lingers: bool) -> None:
    monkeypatch.setattr(environment, "FIRST_USER", 0)
    name = pwd.getpwuid(os.getuid()).pw_name
    root = system(tmp_path, SHM, systemd=True, lingers=name if lingers else "another")
    assert (memory_folder(root) is not None) == lingers


def test_a_system_without_mounts_has_none(tmp_path: Path) -> None:
    assert memory_folder(tmp_path) is None
