"""--cpu-offload-gb from the flag to a running rank: what is said, what is refused, what is the same as without."""

import logging
import threading
from pathlib import Path

import pytest
import torch

import tandem.workers.planning.budget as memory
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.schema import DeviceSettings, EngineSettings, ModelSettings, SchedulerSettings
from tandem.offload.weights.weight_copiers import ThreadCopier
from tandem.workers.executor.in_process_ranks import in_process_group
from tandem.workers.messages.errors import GroupLost
from tandem.workers.planning.budget import GIB
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.loading import LoadedRank
from tests.support.executor_driver import ExecutorDriver, Job
from tests.support.loading import load_single
from tests.support.tiny_models import BASE, TinyModel, save_tiny_model

NUM_LAYERS = 8
HIDDEN, WIDTH = BASE["hidden_size"], BASE["intermediate_size"]
LAYER_BYTES = 4 * (HIDDEN * HIDDEN * 2 + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * WIDTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = TinyModel("deep", "llama", {"num_hidden_layers": NUM_LAYERS})
    return save_tiny_model(tiny, tmp_path_factory.mktemp("models"))


def settings_for(folder: Path, offload_gib: float) -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(model=str(folder), dtype="float32"),
        scheduler=SchedulerSettings(max_num_seqs=3, max_num_batched_tokens=40),
        device=DeviceSettings(device="cpu", cpu_threads=1, cpu_offload_gib=offload_gib),
    )


def load(folder: Path, layers_saved: float) -> LoadedRank:
    return load_single(settings_for(folder, layers_saved * LAYER_BYTES / GIB))


def generate(settings: EngineSettings) -> list[list[int]]:
    executor = in_process_group(settings)
    driver = ExecutorDriver(executor, executor.start(), 16)
    texts = driver.generate([Job([5, 6, 7], 12), Job(list(range(3, 60)), 20)], chunk=30)
    executor.close()
    return texts


@pytest.mark.parametrize(("saved", "streamed"), [(0, 0), (0.5, 3), (1, 3), (4, 6), (5, 7), (6, 8)])
def test_facts_have_resident_and_streamed_layers(folder: Path, saved: float, streamed: int) -> None:
    rank = load(folder, saved)
    facts = rank.facts
    assert (facts.resident_layers, facts.streamed_layers) == (NUM_LAYERS - streamed, streamed)
    assert facts.host_weight_bytes == streamed * LAYER_BYTES
    assert facts.buffer_bytes == min(2, streamed) * LAYER_BYTES
    assert facts.weight_bytes == load(folder, 0).facts.weight_bytes
    rank.decoder.close()


def test_a_model_of_twice_the_budget_gives_the_same_tokens(folder: Path) -> None:
    """Half of the layers' bytes may be on the device: two resident layers and two buffers."""
    assert generate(settings_for(folder, 4 * LAYER_BYTES / GIB)) == generate(settings_for(folder, 0))


def test_one_line_reports_the_placement(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load(folder, 4).decoder.close()
    [line] = [record.getMessage() for record in caplog.records if record.name == "tandem.workers.planning.placing"]
    assert "2 layers resident (0.2 MiB), 6 streamed from host memory (0.7 MiB) through buffers of 0.2 MiB" in line
    caplog.clear()
    with caplog.at_level(logging.INFO):
        load(folder, 0)
    assert not [record for record in caplog.records if record.name == "tandem.workers.planning.placing"]


def test_more_than_the_weights_streams_all_layers_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rank = load(folder, 100)
    assert rank.facts.streamed_layers == NUM_LAYERS
    assert "--cpu-offload-gb 0.0114: 0 layers resident" in caplog.text
    assert "11.7 MiB less was wanted, all layers streaming save 0.7 MiB" in caplog.text
    rank.decoder.close()


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x", "1e300"])
def test_no_amount_is_refused_by_name(value: str) -> None:
    with pytest.raises(SettingsError, match=value.replace("1e300", "1e.?300")) as refused:
        build_settings("m", {"cpu-offload-gb": float(value) if value != "x" else value})
    assert refused.value.flag == "--cpu-offload-gb"


def test_more_than_the_machine_has_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_bytes", lambda: 2 * GIB)
    with pytest.raises(
        SettingsError, match=r"--cpu-offload-gb 2.5 is more than the 2.0 GiB of this machine"
    ) as refused:
        load_single(settings_for(folder, 2.5))
    assert refused.value.flag == "--cpu-offload-gb"
    monkeypatch.setattr(memory, "available_bytes", lambda: LAYER_BYTES)
    with pytest.raises(SettingsError, match=r"--cpu-offload-gb 1 keeps 0.0 GiB .* are free"):
        load_single(settings_for(folder, 1))


def test_a_failing_copy_ends_the_rank_with_its_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = in_process_group(settings_for(folder, 6 * LAYER_BYTES / GIB))
    driver = ExecutorDriver(executor, executor.start(), 16)
    driver.generate([Job([5, 6, 7], 2)])

    def fail(self: ThreadCopier, copies: object) -> object:
        raise OSError("the bus is gone")

    monkeypatch.setattr(ThreadCopier, "start", fail)
    with pytest.raises(GroupLost, match="the bus is gone"):
        driver.generate([Job([5, 6, 7], 2)])
    executor.close()


def test_opening_and_closing_leaves_no_thread(folder: Path) -> None:
    before = set(threading.enumerate())
    for _ in range(5):
        generate(settings_for(folder, 6 * LAYER_BYTES / GIB))
    assert set(threading.enumerate()) <= before


@pytest.fixture(scope="module", autouse=True)
def same_threads() -> object:
    """load_single sets this process's thread count."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("cores", "threads", "ranks", "beside"), [(2, 2, 1, False), (2, 1, 1, True), (2, 1, 2, False)])
def test_copies_go_beside_steps_only_with_a_core_that_no_rank_computes_on(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, ranks: int, beside: bool
) -> None:
    monkeypatch.setattr("tandem.workers.platforms.cpu.available_cores", lambda: cores)
    assert CpuPlatform.open(threads, ranks).copies_beside is beside
