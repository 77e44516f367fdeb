"""Private folders and files of a running service: made at start, gone at its end, swept when a launcher was killed.

<temp>/td-XXXXXXXX/   0700   launcher.pid  token (0600)  ray/  redis/  host/  state/  empty/
<runtime>/PID.json    0600   where the service of launcher PID answers, for `tandem status`
"""

import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import psutil

from configs.environment import runtime_folder, short_temp_folder

PREFIX = "td-"


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """What `tandem status` needs to know of a running service. stopping: it takes no new requests."""

    pid: int
    started_at: float
    url: str
    model: str
    service_id: str
    redis_url: str
    stopping: bool = False


class PrivateFolder:
    """The td-XXXXXXXX folder of one launcher."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=short_temp_folder()))
        (self.path / "launcher.pid").write_text(str(os.getpid()))
        self.ray = self._sub("ray")
        self.redis = self._sub("redis")
        self.empty = self._sub("empty")
        self.host_tier = self._sub("host")
        self.state = self._sub("state")

    def write_token(self, token: str) -> Path:
        """A file that only this user can read."""
        path = self.path / "token"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
        return path

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _sub(self, name: str) -> Path:
        path = self.path / name
        path.mkdir(mode=0o700)
        return path


def sweep() -> None:
    """Removes the folders of launchers that no longer live (kill -9)."""
    for folder in short_temp_folder().glob(f"{PREFIX}????????"):
        try:
            if folder.stat().st_uid == os.getuid() and not psutil.pid_exists(
                int((folder / "launcher.pid").read_text())
            ):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, ValueError):
            continue  # being made or removed at this moment


def write_run_file(run: RunFile) -> Path:
    """Tells other commands of this user about the service, in place of what was told of it; the caller removes the
    file."""
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
    path.unlink(missing_ok=True)
    path.with_suffix(".new").unlink(missing_ok=True)  # of one that was killed while it wrote
    try:
        path.parent.rmdir()
    except OSError:
        pass  # other services are running


def running_services() -> list[RunFile]:
    """Those that are not on their way out, newest first: what is new is theirs."""
    return [run for run in read_run_files() if not run.stopping]


def read_run_files() -> list[RunFile]:
    """All services of this user whose launcher lives, newest first; files of dead ones are removed."""
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
