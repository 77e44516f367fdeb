"""Ranks that live, answer their coordinator and make no progress: known in seconds, whatever they wait for."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.workers.executor.rank_group import RankGroup
from tandem.workers.messages.errors import GroupLost
from tests.lab.lab_ranks import BLOCK_SIZE, RANK, LabRanks, lab_group, settings_for
from tests.support.executor_driver import ExecutorDriver, Job, plan_of_one_row
from tests.support.tiny_models import BY_NAME, save_tiny_model
from tools.lab import Lab, Node

KNOWN_S = 40
"""Until the coordinator knows: 15 s, and more on a busy machine; 600 s if only the bound of a step told."""
STANDS_STILL = (
    """
import threading
from tandem.workers.rank.model_runner import ModelRunner
launch = ModelRunner.launch

def stand_still(self, plan):
    if plan.step_id == 10**6 and self._context.rank == 1:
        threading.Event().wait()
    return launch(self, plan)

ModelRunner.launch = stand_still
"""
    + RANK
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    """Three nodes: the coordinator's, and two for ranks."""
    with Lab("home", "one", "two") as lab:
        yield list(lab.nodes.values())


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME["llama-gqa"], tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.lab)], ids=["tp2", "pp2"])
def test_ranks_that_no_longer_reach_each_other(nodes: list[Node], model_folder: Path, tp: int, pp: int) -> None:
    """Each of them answers its coordinator, and waits for the other in a collective."""
    home, one, two = nodes
    with lab_group(settings_for(model_folder, tp, pp), LabRanks([one, two]), home) as group:
        ready = group.start()
        ExecutorDriver(group, ready, BLOCK_SIZE).generate([Job([3, 1, 4], 4)])
        one.cut_from(two)
        try:
            is_known_in_time(group)
        finally:
            one.mend()
            two.mend()


@pytest.mark.lab
def test_a_rank_that_stands_still(nodes: list[Node], model_folder: Path) -> None:
    """Both are on one node, and sum through its memory."""
    home, one, _ = nodes
    with lab_group(settings_for(model_folder, 2, 1), LabRanks([one, one], STANDS_STILL), home) as group:
        ready = group.start()
        ExecutorDriver(group, ready, BLOCK_SIZE).generate([Job([3, 1, 4], 4)])
        is_known_in_time(group)


def is_known_in_time(group: RankGroup) -> None:
    group.submit(plan_of_one_row())
    began_s = time.monotonic()
    with pytest.raises(GroupLost, match="no rank computes: they wait for each other"):
        group.poll(KNOWN_S)
    print(f"known {time.monotonic() - began_s:.1f} s after the step began")
