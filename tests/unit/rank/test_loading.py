"""What a rank decides at start: dtype, context, device, threads, blocks; and the profiling step at its fullest."""

import io
import json
import os
import re
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from tandem.configs.errors import SettingsError
from tandem.configs.schema import CacheSettings, DeviceSettings, EngineSettings, ModelSettings, SchedulerSettings
from tandem.parallel.context import ParallelContext
from tandem.parallel.mesh import Mesh
from tandem.workers.engine.executor import Executor
from tandem.workers.executor.in_process_ranks import in_process_group
from tandem.workers.executor.local_ranks import LocalRanks
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.core_share import PERIOD_S, CoreShare
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.rank.loading import LoadedRank, choose_dtype, open_links
from tandem.workers.rank.profiling import fullest_plan, run_fullest_steps
from tests.support.executor_driver import ExecutorDriver, Job
from tests.support.in_process import runner_of
from tests.support.loading import load_single
from tests.support.tiny_models import BY_NAME, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME["llama-gqa"], tmp_path_factory.mktemp("models"), dtype=torch.float16)


def settings_for(folder: Path, **model: str | int) -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(**({"model": str(folder)} | model)),
        scheduler=SchedulerSettings(max_num_seqs=3, max_num_batched_tokens=40),
        device=DeviceSettings(device="cpu", cpu_threads=1),
    )


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedRank:
    return load_single(settings_for(folder, dtype="float32"))


class Chain:
    """The ends of links between stages; notes who exchanges with whom."""

    def __init__(self, rank: int, log: list[tuple[str, int, int]]) -> None:
        self._rank, self._log = rank, log

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        self._log.append(("from", self._rank, peer))

    def isend(self, tensor: torch.Tensor, peer: int) -> "Chain":
        self._log.append(("to", self._rank, peer))
        return self

    def wait(self) -> None:
        self._log.append(("sent", self._rank, self._rank))


def test_links_between_stages_are_opened_with_each_neighbour() -> None:
    """Three stages of two ranks: each receives before it sends, so that no stage waits for a later one."""
    log: list[tuple[str, int, int]] = []
    for rank in range(6):
        context: Any = ParallelContext(Mesh(2, 3, rank), world=Chain(rank, log))  # type: ignore[arg-type]
        open_links(context, torch.device("cpu"))
    assert [one for one in log if one[0] == "to"] == [("to", 0, 2), ("to", 1, 3), ("to", 2, 4), ("to", 3, 5)]
    assert [one for one in log if one[1] == 3] == [("from", 3, 1), ("to", 3, 5), ("sent", 3, 3)]
    assert [one for one in log if one[1] == 4] == [("from", 4, 2)]


def test_blocks_are_sized_for_full_contexts(loaded: LoadedRank) -> None:
    """256 positions of 16 tokens a block, 3 sequences; 4 layers x 2 heads x 16 x 4 bytes, keys and values."""
    facts = loaded.facts
    assert (facts.num_blocks, facts.block_bytes, facts.threads) == (48, 2 * 4 * 16 * 2 * 16 * 4, 1)
    assert (facts.device, facts.dtype) == ("cpu", "float32")
    assert facts.weight_bytes > 4 * 203 * 64 and facts.load_s > 0


def test_dtype_follows_the_checkpoint_but_for_float16_on_cpu(folder: Path) -> None:
    spec = load_spec(folder)
    assert choose_dtype(settings_for(folder), spec, "cpu") == torch.bfloat16
    assert choose_dtype(settings_for(folder), spec, "cuda") == torch.float16
    assert choose_dtype(settings_for(folder, dtype="float16"), spec, "cpu") == torch.float16


@pytest.mark.parametrize("terminal", [True, False])
def test_the_weights_show_a_bar_on_a_terminal_only(
    folder: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    load_single(settings_for(folder))
    assert ("loading weights" in screen.getvalue()) == terminal


@pytest.mark.parametrize("length", [0, 257])
def test_a_context_beyond_the_models_is_refused(folder: Path, length: int) -> None:
    with pytest.raises(SettingsError, match=rf"--max-model-len {length} .*256") as refused:
        load_single(settings_for(folder, max_model_len=length))
    assert refused.value.flag == "--max-model-len"
    advice = re.search("--hf-overrides '(.*)'", str(refused.value))
    if length > 256:
        assert advice is not None
        assert load_spec(folder, json.loads(advice[1])).max_position_embeddings >= length


def test_a_rank_that_finds_no_room_for_kv_closes_what_it_has_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else threads of streamed layers, and pinned memory, would stay in this process."""
    closed: list[Decoder] = []
    monkeypatch.setattr(Decoder, "close", lambda decoder: closed.append(decoder))
    settings = settings_for(folder)
    cache = CacheSettings(num_blocks=2**40)
    with pytest.raises(SettingsError, match="--num-gpu-blocks-override"):
        load_single(msgspec.structs.replace(settings, cache=cache))
    assert len(closed) == 1


def test_what_no_rank_could_load_starts_none(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, broken := tmp_path / "broken")
    save_file({}, broken / "model.safetensors")
    ranks = LocalRanks(settings_for(broken), "broken")
    with pytest.raises(SettingsError, match=r"broken: tensor \S+ is in none of its safetensors files"):
        ranks.start(0, "ipc:///nowhere", "secret")
    assert not ranks.processes


def test_a_shorter_context_needs_fewer_blocks(folder: Path) -> None:
    assert load_single(settings_for(folder, max_model_len=20)).facts.num_blocks == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(folder: Path) -> None:
    settings = msgspec.structs.replace(settings_for(folder), device=DeviceSettings(device="cuda"))
    with pytest.raises(SettingsError, match="cuda"):
        open_platform(settings, rank=0, ranks_on_node=1)


def test_threads_are_the_cores_over_all_ranks_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    before = torch.get_num_threads()
    settings = EngineSettings(model=ModelSettings(model="m"), device=DeviceSettings(device="cpu"))
    counts = []
    try:
        for ranks_on_node in (1, 2, 3, 4, 16):
            open_platform(settings, 0, ranks_on_node)
            counts.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert counts == [8, 4, 2, 2, 1]


def test_threads_follow_the_ranks_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, now_s = [8], [0.0]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores[0])))
    settings = EngineSettings(model=ModelSettings(model="m"), device=DeviceSettings(device="cpu"))
    fixed = EngineSettings(model=ModelSettings(model="m"), device=DeviceSettings(device="cpu", cpu_threads=3))
    before = torch.get_num_threads()
    share = CoreShare("a test's", clock=lambda: now_s[0])

    def seen(platform: Platform) -> tuple[int, bool]:
        now_s[0] += PERIOD_S
        platform.begin_step()
        return torch.get_num_threads(), platform.has_core

    try:
        platform = open_platform(settings, 0, ranks_on_node=4, cores=share)
        assert (torch.get_num_threads(), platform.has_core) == (8, True), "as many as there are, not as there may be"
        others = [CoreShare("a test's") for _ in range(2)]
        platform.begin_step()
        assert torch.get_num_threads() == 8, "it looks once a second"
        assert seen(platform) == (2, True)
        cores[0] = 2
        assert seen(platform) == (1, False), "a container's limit may change"
        assert seen(open_platform(fixed, 0, ranks_on_node=4, cores=share)) == (3, False)
        cores[0] = 8
        for other in others:
            other.close()
        assert seen(platform) == (8, True)
        share.close()
        assert seen(platform) == (8, True), "a system that does not tell changes nothing"
    finally:
        torch.set_num_threads(before)


def test_each_step_looks_at_the_cores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []
    monkeypatch.setattr(CpuPlatform, "begin_step", lambda self: looked.append(True))
    settings = settings_for(folder)
    with closing(in_process_group(settings)) as group:
        ExecutorDriver(group, group.start(), settings.cache.block_size).generate([Job([3, 1, 4], 4)])
    assert len(looked) >= 4


def test_one_process_refuses_more_than_one_rank(folder: Path) -> None:
    settings = msgspec.convert({"model": {"model": "m"}, "parallel": {"tensor_parallel_size": 2}}, EngineSettings)
    with pytest.raises(SettingsError, match="one rank"):
        in_process_group(settings)


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("max_model_len", [1, 2, 256])
def test_any_block_size_and_context_warms_up(folder: Path, block_size: int, max_model_len: int) -> None:
    settings = msgspec.structs.replace(
        settings_for(folder, max_model_len=max_model_len), cache=CacheSettings(block_size=block_size)
    )
    rank = load_single(settings)
    rank.build_runner(rank.facts.num_blocks)


def test_the_profiling_step_fills_rows_and_tokens(loaded: LoadedRank) -> None:
    plan = fullest_plan(3, 40, 256, 16)
    assert {init.num_computed for init in plan.new_rows} == {256 - 13}, "the longest context"
    assert {len(w.new_block_ids) for w in plan.work} == {16}
    assert [w.num_tokens for w in plan.work] == [13, 13, 13]
    assert [w.num_tokens for w in fullest_plan(8, 100, 5, 4).work] == [5] * 8
    used = run_fullest_steps(
        loaded.decoder,
        ParallelContext.single(),
        loaded.settings,
        CpuPlatform(),
        hidden_size=loaded.spec.hidden_size,
        vocab_size=loaded.spec.vocab_size,
        max_model_len=256,
        dtype=torch.float32,
        kv_dtype=torch.float32,
    )
    assert used == 3 * loaded.facts.block_bytes, "the single row's chunk of 40 tokens"


def test_what_a_failed_row_left_harms_nobody(folder: Path) -> None:
    """NaN in every block of the pool, as if failed rows had had them: new owners, long and short, read none of it."""
    executor = in_process_group(settings_for(folder, dtype="float32"))
    driver = ExecutorDriver(executor, executor.start(), 16)
    texts = []
    for stale in (0.0, float("nan")):
        kv_slab(executor).fill_(stale)
        texts.append(driver.generate([Job([5, 6, 7], 4), Job(list(range(3, 60)), 20)], chunk=30))
    assert texts[0] == texts[1]
    assert [len(tokens) for tokens in texts[1]] == [4, 20]


def kv_slab(executor: Executor) -> torch.Tensor:
    """The cache behind the executor's back."""
    return runner_of(executor).kv.slab
