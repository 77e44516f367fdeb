"""Rank processes whose layers stream from host memory: the text of a resident rank, at TP2 and PP2; clear refusals."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.configs.errors import SettingsError
from tandem.configs.schema import (
    CacheSettings,
    DeviceSettings,
    EngineSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
)
from tandem.workers.engine.executor import Executor
from tandem.workers.executor.in_process_ranks import in_process_group
from tandem.workers.executor.local_ranks import local_group
from tandem.workers.planning.budget import GIB, machine_bytes
from tests.support.executor_driver import ExecutorDriver, Job
from tests.support.tiny_models import BY_NAME, save_tiny_model

BLOCK_SIZE = 4
ALL_LAYERS_GIB = 2**20 / GIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = replace(BY_NAME["qwen3"], changes={**BY_NAME["qwen3"].changes, "num_hidden_layers": 8})
    return save_tiny_model(tiny, tmp_path_factory.mktemp("models"))


def settings_for(folder: Path, tp: int, pp: int, offload_gib: float) -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(model=str(folder), dtype="float32"),
        parallel=ParallelSettings(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        cache=CacheSettings(block_size=BLOCK_SIZE, num_blocks=96),
        scheduler=SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=64),
        device=DeviceSettings(device="cpu", cpu_offload_gib=offload_gib),
    )


def greedy_text(executor: Executor, depth: int, notes: list[str]) -> list[list[int]]:
    """What the ranks say; on the way, that they say which of their layers stream."""
    try:
        ready = executor.start()
        assert [note[:25] for note in ready.tier_notes] == notes
        driver = ExecutorDriver(executor, ready, BLOCK_SIZE)
        return driver.generate([Job([3, 1, 4], 12), Job(list(range(10, 33)), 9), Job([7], 6)], depth=depth)
    finally:
        executor.close()


@pytest.fixture(scope="module")
def resident(folder: Path) -> list[list[int]]:
    """The text of one rank with all layers; those of resident ranks are the same (test_local_executor.py)."""
    return greedy_text(in_process_group(settings_for(folder, 1, 1, 0.0)), 1, [])


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_ranks_with_streamed_layers_give_the_text_of_a_resident_one(
    folder: Path, resident: list[list[int]], tp: int, pp: int
) -> None:
    group = local_group(settings_for(folder, tp, pp, ALL_LAYERS_GIB), name="streams")
    assert greedy_text(group, pp, ["weights of rank 0, 1: 0 l"]) == resident


def test_a_rank_refuses_more_than_the_machine_has(folder: Path) -> None:
    too_much = machine_bytes() / GIB + 1
    executor = local_group(settings_for(folder, 1, 1, too_much), name="streams")
    with pytest.raises(SettingsError, match=r"--cpu-offload-gb .* is more than the .* GiB of this machine"):
        executor.start()
    executor.close()
