"""A group of ranks on nodes of a lab, without Ray, and its coordinator in this process on the network of one."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

from tandem.configs.schema import DeviceSettings, EngineSettings, ModelSettings, ParallelSettings, SchedulerSettings
from tandem.workers.executor.rank_group import RankGroup
from tools.lab import Node

BLOCK_SIZE = 16
RANK = """
import sys
from tandem.workers.rank.rank_server import run_rank
sys.exit(run_rank(int(sys.argv[1]), sys.argv[2], sys.stdin.readline().strip(), group="lab", host=sys.argv[3]))
"""


class LabRanks:
    """RankLauncher of one rank on each node. program: what a rank runs, RANK in the end. kill() reaches nobody: what
    ends by itself, and what the lab ends."""

    def __init__(self, nodes: list[Node], program: str = RANK) -> None:
        self.nodes = nodes
        self.program = program
        self.processes: list[subprocess.Popen[str]] = []
        self.logs: list[IO[str]] = []

    def start(self, rank: int, endpoint: str, secret: str) -> None:
        node = self.nodes[rank]
        command = [sys.executable, "-P", "-c", self.program, str(rank), endpoint, node.address]
        self.logs.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - lab_group closes it
        process = node.start(command, stdin=subprocess.PIPE, stderr=self.logs[-1], text=True)
        assert process.stdin is not None
        process.stdin.write(secret + "\n")
        process.stdin.flush()
        self.processes.append(process)

    def said(self, rank: int) -> str:
        """Returns all that a rank has written to its log."""
        return os.pread(self.logs[rank].fileno(), 1 << 20, 0).decode()

    def lost(self) -> str | None:
        return next((f"rank {rank} has ended" for rank, p in enumerate(self.processes) if p.poll() is not None), None)

    def kill(self, grace_s: float) -> None:
        """Nobody reaches a node that is cut off."""


def settings_for(folder: Path, tp: int, pp: int) -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(model=str(folder), dtype="float32", max_model_len=64),
        parallel=ParallelSettings(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        scheduler=SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=64),
        device=DeviceSettings(device="cpu", cpu_threads=1),
    )


@contextmanager
def lab_group(settings: EngineSettings, launcher: LabRanks, home: Node) -> Iterator[RankGroup]:
    """A group, not started, whose coordinator is in this process, but on the network of a node; its ranks have ended
    afterwards."""
    with home.network():
        made = RankGroup(settings, launcher, name="lab", host=home.address)
        try:
            with closing(made):
                yield made
        finally:
            for process in launcher.processes:
                process.wait(30)
                assert process.stdin is not None
                process.stdin.close()
            for log in launcher.logs:
                log.close()
