"""LocalExecutor: the ranks of a group as child processes of this one, without Ray. Torch-free.

Used for offline runs with more than one rank, by tests and benchmarks. Starts `python -m workers.rank.rank_worker` per
rank; the secret goes through the child's standard input, which stays open: when this process ends for any reason the
children see its end and exit. Kills only processes it started.
"""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import workers
from configs.schema import EngineSettings
from workers.channel import new_secret
from workers.engine.executor import ExecutorReady
from workers.messages import AdapterMove, StepPlan, StepResult, Transfer, TransferDone
from workers.rank_group import RankGroup
from workers.resolve import read_spec

log = logging.getLogger(__name__)

SHUTDOWN_S = 3.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")


class LocalExecutor:
    """Executor over spawned rank processes on this machine. `group` names it in process titles."""

    def __init__(self, settings: EngineSettings, group: str = "local") -> None:
        self._settings = settings
        self._name = group
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._group: RankGroup | None = None

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Process ids by rank; empty before start()."""
        return tuple(process.pid for process in self._ranks)

    def start(self) -> ExecutorReady:
        """Spawns the ranks and brings them up. After an error nothing is left running."""
        assert self._group is None, "start() is called once"
        read_spec(self._settings)  # what no rank could load is refused before any is started
        secret = new_secret()
        self._group = RankGroup(self._settings, secret, self._lost)
        try:
            for rank in range(self._group.world_size):
                self._ranks.append(_spawn(rank, self._name, self._group.endpoint, secret))
            return self._group.start()
        except BaseException:
            self.close()
            raise

    def submit(self, plan: StepPlan) -> None:
        assert self._group is not None
        self._group.submit(plan)

    def wait(self, timeout_s: float) -> StepResult | None:
        assert self._group is not None
        return self._group.wait(timeout_s)

    def transfer(self, transfer: Transfer | AdapterMove) -> None:
        assert self._group is not None
        self._group.transfer(transfer)

    def transfers_done(self) -> list[TransferDone]:
        assert self._group is not None
        return self._group.transfers_done()

    def close(self) -> None:
        """Asks the ranks to exit, kills those that have not after 3 s, reaps all. Idempotent."""
        if self._group is None:
            return
        if self._group.lost() is None:
            self._group.shut_down()
            _wait_all(self._ranks, SHUTDOWN_S)
        for process in self._ranks:
            if process.poll() is None:
                process.kill()
        for process in self._ranks:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._group.close()

    def _lost(self) -> str | None:
        for rank, process in enumerate(self._ranks):
            status = process.poll()
            if status is not None:
                how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
                return f"rank {rank} (pid {process.pid}) {how}"
        return None


def _spawn(rank: int, group: str, endpoint: str, secret: str) -> subprocess.Popen[bytes]:
    """A rank process in a session of its own (so Ctrl-C reaches only us), importing the same install as we do."""
    install = str(Path(workers.__file__).resolve().parents[1])
    env = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [install, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "workers.rank.rank_worker", "--rank", str(rank), "--group", group]
    process = subprocess.Popen(
        [*command, "--endpoint", endpoint], stdin=subprocess.PIPE, env=env, start_new_session=True
    )
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
