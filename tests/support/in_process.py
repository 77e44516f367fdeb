"""What is behind an executor in this process: its rank, and what the rank runs steps with."""

from tandem.workers.engine.executor import Executor
from tandem.workers.executor.in_process_ranks import InProcessRank
from tandem.workers.executor.rank_group import RankGroup
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.rank.rank_server import RankServer


def is_in_process(executor: Executor) -> bool:
    return isinstance(executor, RankGroup) and isinstance(executor.launcher, InProcessRank)


def server_of(executor: Executor) -> RankServer:
    """The rank of an executor that is started."""
    assert isinstance(executor, RankGroup) and isinstance(executor.launcher, InProcessRank)
    server = executor.launcher.server
    assert server is not None
    return server


def runner_of(executor: Executor) -> ModelRunner:
    runner = server_of(executor)._runner
    assert runner is not None
    return runner
