"""Files of a running service, made by the launcher; the reaper sweeps them once the launcher has ended.

<temp>/td-XXXXXXXX/   0700   launcher.pid  token (0600)  ray/  redis/  host/  state/
<runtime>/PID.json    0600   address of the service of launcher PID, for `tandem status`
"""

import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import psutil

from tandem.configs.environment import runtime_folder, short_temp_folder

PREFIX = "td-"


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """Facts by which other commands reach a running service. pid: its launcher's. stopping: new requests get 503.
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


class PrivateFolder:
    """The td-XXXXXXXX folder of one launcher. Making one sweeps those of launchers that have ended."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=short_temp_folder()))
        (self.path / "launcher.pid").write_text(str(os.getpid()))
        self.ray = self._sub("ray")
        self.redis = self._sub("redis")
        self.host_tier = self._sub("host")
        self.state = self._sub("state")

    def write_token(self, token: str) -> Path:
        """Writes the token to a file that only this user can read, and returns its path."""
        path = self.path / "token"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
        return path

    def _sub(self, name: str) -> Path:
        path = self.path / name
        path.mkdir(mode=0o700)
        return path


def sweep() -> None:
    """Removes this user's folders and run files of launchers that have ended."""
    for folder in short_temp_folder().glob(f"{PREFIX}????????"):
        try:
            if folder.stat().st_uid == os.getuid() and not psutil.pid_exists(
                int((folder / "launcher.pid").read_text())
            ):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, ValueError):
            continue  # being made or removed at this moment
    read_run_files()


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
