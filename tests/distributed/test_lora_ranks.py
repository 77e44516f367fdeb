"""Adapters over real rank processes: TP2 and PP3 write what one rank writes; what is refused harms nobody."""

import os
import signal
from pathlib import Path

import pytest

from tandem.configs.schema import (
    CacheSettings,
    DeviceSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
)
from tandem.workers.build import open_executor
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.executor.rank_group import RankGroup
from tandem.workers.lora.peft.peft_folder import WEIGHT_FILE
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.step import StepResult
from tandem.workers.messages.transfer import DropAdapter, TransferResult
from tests.support.adapters import AdapterDriver, error_of, ref_of, save_random_adapter
from tests.support.executor_driver import ExecutorDriver, Job, plan_of_one_row
from tests.support.paged_rows import prompt_ids
from tests.support.tiny_models import BY_NAME, save_tiny_model

BLOCK_SIZE = 8
SLOTS = [0, None, 1, 2, 0, 2]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME["qwen3"], tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    last_layer = {"modules": ("o_proj", "up_proj"), "layers_to_transform": [3]}
    return [
        save_random_adapter(base, folder / "all", rank=64, seed=1),
        save_random_adapter(base, folder / "some", rank=4, seed=2, modules=("q_proj", "v_proj")),
        save_random_adapter(base, folder / "last", rank=64, seed=3, **last_layer),
    ]


def settings_for(base: Path, tp_size: int, pp_size: int) -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(model=str(base), dtype="float32"),
        parallel=ParallelSettings(tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size),
        cache=CacheSettings(num_blocks=100, block_size=BLOCK_SIZE),
        scheduler=SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=128),
        device=DeviceSettings(device="cpu", cpu_threads=1),
        lora=LoraSettings(enable_lora=True, max_loras=3, max_lora_rank=64),
    )


def check_that_a_transfer_waits_for_no_step(executor: RankGroup) -> None:
    """Rank 0 is inside a collective, whose other rank stands still."""
    os.kill(executor.rank_pids[1], signal.SIGSTOP)
    executor.submit(plan_of_one_row())
    assert executor.poll(0.3) is None
    executor.transfer(DropAdapter(ticket=10**6, adapter=AdapterRef(name="a", digest="d", source="s")))
    first = executor.poll(3.0)
    assert isinstance(first, TransferResult) and (first.rank, first.ticket, first.failure) == (0, 10**6, None)
    os.kill(executor.rank_pids[1], signal.SIGCONT)
    others = [executor.poll(60.0) for _ in range(2)]
    assert {type(message) for message in others} == {TransferResult, StepResult}


class Run:
    """What one group wrote, and the pages that each adapter took on its fullest rank; at TP2 also that a transfer waits
    for no step."""

    def __init__(
        self, base: Path, adapters: list[Path], tp_size: int, pp_size: int, broken: Path | None = None
    ) -> None:
        executor = open_executor(settings_for(base, tp_size, pp_size))
        try:
            self.ready: ExecutorReady = executor.start()
            num_ranks = tp_size * pp_size
            moves = AdapterDriver(executor, num_ranks)
            self.pages = [moves.load(ref_of(folder), slot) for slot, folder in enumerate(adapters)]
            if broken is not None:
                ref = ref_of(broken)
                data = (broken / WEIGHT_FILE).read_bytes()
                (broken / WEIGHT_FILE).write_bytes(data[:-4] + b"\0\0\0\0")
                self.refusals = [error_of(done) for done in moves.fetch(ref)]
            jobs = [
                Job(prompt_ids(3 + 4 * row, 200, seed=row), 16, adapter_slot=slot) for row, slot in enumerate(SLOTS)
            ]
            self.texts = ExecutorDriver(executor, self.ready, BLOCK_SIZE).generate(jobs, depth=pp_size)
            if tp_size == 2:
                check_that_a_transfer_waits_for_no_step(executor)
        finally:
            executor.close()


@pytest.fixture(scope="module")
def alone(base: Path, adapters: list[Path]) -> Run:
    return Run(base, adapters, 1, 1)


@pytest.fixture
def broken(base: Path, tmp_path: Path) -> Path:
    return save_random_adapter(base, tmp_path / "broken", rank=2, seed=9)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 3)])
def test_ranks_write_what_one_rank_writes(
    base: Path, adapters: list[Path], alone: Run, broken: Path, tp_size: int, pp_size: int
) -> None:
    run = Run(base, adapters, tp_size, pp_size, broken)
    assert run.texts == alone.texts
    assert len({tuple(text) for text in run.texts}) == len(run.texts)
    assert len(run.refusals) == tp_size * pp_size and all("has changed" in (words or "") for words in run.refusals)
    assert run.ready.adapter_pages == 3 * run.pages[0], "room for --max-loras of the highest rank, on every stage"
    assert any(note.startswith("adapters: ") for note in run.ready.tier_notes)
