"""The ranks of a group as child processes of this one, without Ray. Torch-free.

For offline runs with more than one rank, tests and benchmarks. Starts `python -m ...rank_process` for each rank; the
secret goes through the child's standard input, which stays open: when this process ends for any reason the children see
its end and exit. Kills only processes it started.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import tandem
from tandem.configs.schema import EngineSettings
from tandem.workers.executor.rank_group import RankGroup
from tandem.workers.planning.resolve import read_spec
from tandem.workers.planning.stored_model import open_checkpoint


def local_group(settings: EngineSettings, name: str = "local") -> RankGroup:
    """Returns an executor over spawned rank processes on this machine, not started. `name` is in their titles."""
    return RankGroup(settings, LocalRanks(settings, name), name=name)


class LocalRanks:
    """RankLauncher of child processes. `processes` by rank."""

    def __init__(self, settings: EngineSettings, group: str) -> None:
        self._settings = settings
        self._group = group
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, endpoint: str, secret: str) -> None:
        if rank == 0:
            self._check()
        self.processes.append(_spawn(rank, self._group, endpoint, secret))

    def _check(self) -> None:
        """Refuses what no rank could load before any is started. SettingsError."""
        spec, model = read_spec(self._settings), self._settings.model
        if model.load_format != "dummy":
            open_checkpoint(Path(model.model), spec, model.hf_overrides)

    def lost(self) -> str | None:
        for rank, process in enumerate(self.processes):
            status = process.poll()
            if status is not None:
                how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
                return f"rank {rank} (pid {process.pid}) {how}"
        return None

    def kill(self, grace_s: float) -> None:
        """Waits for all to end, at most grace_s; kills and reaps the others."""
        _wait_all(self.processes, grace_s)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _spawn(rank: int, group: str, endpoint: str, secret: str) -> subprocess.Popen[bytes]:
    """A rank process in a session of its own (so Ctrl-C reaches only us), importing the same install as we do."""
    install = str(Path(tandem.__file__).parent.parent.absolute())
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [install, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-P", "-m", "tandem.workers.executor.rank_process", "--endpoint", endpoint]
    which = ["--rank", str(rank), "--group", group]
    process = subprocess.Popen([*command, *which], stdin=subprocess.PIPE, env=env, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(secret.encode() + b"\n")
    process.stdin.flush()
    return process


def _wait_all(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Until all have exited, at most timeout_s."""
    deadline_s = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return
