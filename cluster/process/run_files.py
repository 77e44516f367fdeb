"""Files of a running service, made by the launcher; the reaper sweeps them once the launcher has ended.

<temp>/td-XXXXXXXX/   0700   launcher.lock  token (0600)  ray/  redis/  host/  state/
<memory>/td-XXXXXXXX/ 0700   launcher.lock  gcs/: it holds keys, and is in the other folder where memory has no room
<runtime>/PID.json    0600   address of the service of launcher PID, for `tandem status`

The kernel unlocks launcher.lock when its launcher ends, however it ends. The process id in it is for people: containers
may share /dev/shm, or be started anew with old files, and their process ids say nothing of each other's.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from tandem.configs.environment import memory_folder, runtime_folder, short_temp_folder

PREFIX = "td-"
LOCK = "launcher.lock"
GCS_ROOM_BYTES = 2**30
"""Room in memory without which GCS's files go to the disk: several times what they have."""


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """Facts by which other commands reach a running service. pid: its launcher's. supervisor: the process to signal,
    which the shell that started the service has as $!; None: the launcher itself. stopping: new requests get 503.
    certificate: of its port (PEM), where that speaks TLS. logs: the folder of its log files."""

    pid: int
    started_at: float
    url: str
    model: str
    service_id: str
    redis_url: str
    stopping: bool = False
    certificate: str | None = None
    logs: str | None = None
    supervisor: int | None = None

    @property
    def signalled_pid(self) -> int:
        """The process to show to people."""
        return self.pid if self.supervisor is None else self.supervisor


class PrivateFolder:
    """The td-XXXXXXXX folders of one launcher, until its process ends. Making one sweeps those of launchers that have
    ended. locks: descriptors that hold them."""

    def __init__(self) -> None:
        sweep()
        self.locks: list[int] = []
        self.path = self._new(short_temp_folder())
        self.gcs = _sub(self._in_memory() or self.path, "gcs")
        self.ray = _sub(self.path, "ray")
        self.redis = _sub(self.path, "redis")
        self.host_tier = _sub(self.path, "host")
        self.state = _sub(self.path, "state")

    def write_token(self, token: str) -> Path:
        """Writes the token to a file that only this user can read, and returns its path."""
        path = self.path / "token"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
        return path

    def _in_memory(self) -> Path | None:
        """A folder in memory; None where that has no room, or lets this user make none."""
        memory = memory_folder()
        try:
            has_room = memory is not None and shutil.disk_usage(memory).free >= GCS_ROOM_BYTES
            return self._new(memory) if memory is not None and has_room else None
        except OSError:
            return None

    def _new(self, place: Path) -> Path:
        """A locked folder of this process there, with mode 700."""
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        new = path / f"{LOCK}.new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.locks.append(lock)
        with suppress(OSError):  # a file system without locks: nobody else can lock it either
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, str(os.getpid()).encode())
        os.replace(new, path / LOCK)
        return path


def private_folders() -> list[Path]:
    """The td-XXXXXXXX folders of all launchers, other users' too."""
    memory = memory_folder()
    places = {short_temp_folder()} if memory is None else {short_temp_folder(), memory}
    return [folder for place in places for folder in place.glob(f"{PREFIX}????????")]


def sweep() -> None:
    """Removes this user's folders and run files of launchers that have ended."""
    for folder in private_folders():
        with suppress(OSError):  # its launcher lives; or it is being made or removed at this moment
            if folder.stat().st_uid == os.getuid():
                _remove_unlocked(folder)
    read_run_files()


def _remove_unlocked(folder: Path) -> None:
    """OSError while its launcher lives."""
    lock = os.open(folder / LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _sub(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir(mode=0o700)
    return path


def write_run_file(run: RunFile) -> Path:
    """Writes the run file of `run.pid`, or replaces it, and returns its path. PermissionError for a foreign folder."""
    folder = runtime_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    path = folder / f"{run.pid}.json"
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(run))
    os.replace(new, path)
    return path


def remove_run_file(path: Path) -> None:
    """Removes a run file, and the folder with the last one."""
    path.unlink(missing_ok=True)
    path.with_suffix(".new").unlink(missing_ok=True)  # of one that was killed while it wrote
    try:
        path.parent.rmdir()
    except OSError:
        pass  # other services are running


def running_services() -> list[RunFile]:
    """This user's services that take new requests, newest first."""
    return [run for run in read_run_files() if not run.stopping]


def read_run_files() -> list[RunFile]:
    """All services of this user whose launcher runs, newest first. Files of other launchers are removed."""
    runs: list[RunFile] = []
    for path in runtime_folder().glob("*.json"):
        try:
            run = msgspec.json.decode(path.read_bytes(), type=RunFile)
        except (OSError, msgspec.DecodeError):
            continue
        if psutil.pid_exists(run.pid):
            runs.append(run)
        else:
            remove_run_file(path)
    return sorted(runs, key=lambda run: -run.started_at)
