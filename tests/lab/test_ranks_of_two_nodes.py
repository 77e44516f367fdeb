"""A group whose ranks run on two nodes, without Ray: the tokens of one rank, and a cut link is known on both sides."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tandem.workers.executor.in_process_ranks import in_process_group
from tandem.workers.executor.rank_group import RankGroup
from tandem.workers.messages.errors import GroupLost
from tests.lab.lab_ranks import BLOCK_SIZE, LabRanks, lab_group, settings_for
from tests.support.executor_driver import ExecutorDriver, Job, plan_of_one_row
from tests.support.service import wait_for
from tests.support.tiny_models import BY_NAME, save_tiny_model
from tools.lab import Lab

KNOWN_S = 10
"""Until a coordinator, or a rank, knows of a cut: 6 s, and more on a busy machine."""
ALONE_S = 20
"""Until a rank that nobody probes has ended itself: 15 s, and more on a busy machine."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME["llama-gqa"], tmp_path_factory.mktemp("models"))


@pytest.fixture(params=[pytest.param((2, 1), marks=pytest.mark.lab), (1, 2)], ids=["tp2", "pp2"])
def group(request: pytest.FixtureRequest, lab: Lab, model_folder: Path) -> Iterator[RankGroup]:
    """A group whose coordinator is in this process, but on the network of node a."""
    nodes = list(lab.nodes.values())
    with lab_group(settings_for(model_folder, *request.param), LabRanks(nodes), nodes[0]) as made:
        yield made


def jobs() -> list[Job]:
    return [Job([3, 1, 4], 12), Job(list(range(10, 33)), 10), Job([7], 8)]


def test_tokens_are_those_of_one_rank_and_a_cut_is_known_on_both_sides(
    group: RankGroup, lab: Lab, model_folder: Path
) -> None:
    with closing(in_process_group(settings_for(model_folder, 1, 1))) as alone:
        wanted = ExecutorDriver(alone, alone.start(), BLOCK_SIZE).generate(jobs())
    ready = group.start()
    assert {hello.host for hello in group.hellos} == {node.address for node in lab.nodes.values()}
    assert ExecutorDriver(group, ready, BLOCK_SIZE).generate(jobs(), depth=2) == wanted
    launcher = group.launcher
    assert isinstance(launcher, LabRanks)
    _, far = launcher.processes
    lab.nodes["b"].cut()
    try:
        cut_s = time.monotonic()
        group.submit(plan_of_one_row())  # the near rank waits for the far one, in a collective that never ends
        with pytest.raises(GroupLost, match="rank 1 has given no sign of life"):
            group.poll(KNOWN_S)
        print(f"the coordinator knows after {time.monotonic() - cut_s:.1f} s")
        wait_for(lambda: "no probe for 5 s" in launcher.said(1), KNOWN_S, "the far rank says that it is cut off")
        print(f"the far rank knows after {time.monotonic() - cut_s:.1f} s")
        wait_for(lambda: far.poll() is not None, ALONE_S, "the far rank ends by itself")
        print(f"the far rank has ended after {time.monotonic() - cut_s:.1f} s")
    finally:
        lab.nodes["b"].mend()
