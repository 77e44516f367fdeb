"""Private folders and run files: modes, and sweeping once their launcher has ended."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tandem.cluster.process import run_files
from tandem.cluster.process.run_files import (
    LOCK,
    PrivateFolder,
    RunFile,
    read_run_files,
    remove_run_file,
    running_services,
    sweep,
    write_run_file,
)
from tandem.cluster.service.launcher import with_state_folder
from tandem.configs.schema import EngineSettings, GatewaySettings, ModelSettings, RedisSettings, ServiceSettings


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temp folder of this test's own, short enough for sockets. tmp_path: pytest's own, made before."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setattr(run_files, "memory_folder", lambda: None)
        yield Path(folder)


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def end(folder: PrivateFolder) -> None:
    """What the kernel does when its launcher ends."""
    for lock in folder.locks:
        os.close(lock)


def run_file(pid: int) -> RunFile:
    return RunFile(pid=pid, started_at=1.0, url="http://h:1", model="m", service_id="s", redis_url="unix:///r")


def test_the_folder_and_its_token_are_the_users_alone(temp: Path) -> None:
    folder = PrivateFolder()
    token = folder.write_token("secret")
    assert folder.path.parent == temp
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    end(folder)
    sweep()
    assert list(temp.iterdir()) == []


@pytest.mark.parametrize("has_room", [True, False])
def test_what_gcs_keeps_is_in_memory_that_has_room(
    temp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    monkeypatch.setattr(run_files, "memory_folder", lambda: tmp_path)
    monkeypatch.setattr(run_files, "GCS_ROOM_BYTES", 1 if has_room else 2**60)
    folder = PrivateFolder()
    base = folder.gcs.parent
    assert base.parent == tmp_path if has_room else base == folder.path
    assert [stat.S_IMODE(path.stat().st_mode) for path in (base, folder.gcs)] == [0o700, 0o700]
    end(folder)
    sweep()
    assert not [*tmp_path.iterdir(), *temp.iterdir()]


def test_a_user_who_may_not_write_to_memory_has_all_on_disk(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "memory_folder", lambda: Path("/proc/self"))
    monkeypatch.setattr(run_files, "GCS_ROOM_BYTES", 0)
    folder = PrivateFolder()
    assert folder.gcs.parent == folder.path
    end(folder)


def test_folders_of_dead_launchers_are_swept_and_others_stay(temp: Path) -> None:
    live, dead, foreign = PrivateFolder(), PrivateFolder(), temp / "td-12345678"
    foreign.mkdir()
    end(dead)
    sweep()
    assert live.path.exists() and foreign.exists() and not dead.path.exists()


@pytest.mark.parametrize("lives", [True, False])
def test_a_process_id_of_another_container_says_nothing(temp: Path, lives: bool) -> None:
    """Containers with one /dev/shm (--ipc=host), or one that is started again, with the same number."""
    there = PrivateFolder()
    (there.path / LOCK).write_text(str(dead_pid() if lives else os.getpid()))
    if not lives:
        end(there)
    sweep()
    assert there.path.exists() == lives


def test_run_files_of_dead_launchers_are_swept(temp: Path) -> None:
    live, dead = (write_run_file(run_file(pid)) for pid in (os.getpid(), dead_pid()))
    sweep()
    assert live.exists() and not dead.exists()


def test_run_files_are_found_while_their_launcher_lives(temp: Path) -> None:
    path = write_run_file(run_file(os.getpid()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert write_run_file(msgspec.structs.replace(run_file(os.getpid()), stopping=True)) == path
    assert [run.stopping for run in read_run_files()] == [True], "what is new takes the place of the old"
    assert running_services() == [], "nothing new is for one on its way out"
    write_run_file(run_file(dead_pid()))
    assert [run.pid for run in read_run_files()] == [os.getpid()]
    remove_run_file(path)
    assert read_run_files() == []
    assert list(temp.iterdir()) == []


@pytest.mark.parametrize(("state_dir", "redis_url"), [(None, None), ("kept", None), (None, "redis://there")])
def test_only_the_state_of_a_private_redis_goes_with_the_private_folder(
    temp: Path, state_dir: str | None, redis_url: str | None
) -> None:
    folder = PrivateFolder()
    engine = EngineSettings(model=ModelSettings(model="demo"))
    gateway, redis = GatewaySettings(state_dir=state_dir), RedisSettings(url=redis_url)
    settings = with_state_folder(ServiceSettings(engine=engine, gateway=gateway, redis=redis), folder)
    is_private = state_dir is None and redis_url is None
    assert settings.gateway.state_dir == (str(folder.state) if is_private else state_dir)
