"""KV-02 with real ranks at length: eight clients, two choices a turn, a pool for two of them and tiers not much larger;
what they hear is what they hear without tiers and without need. make chaos."""

from pathlib import Path
from typing import Any

import pytest

from configs.load import build_settings
from tests.support.clients import Clients
from tests.support.tiny_models import BY_NAME, TINY_MODELS, save_tiny_model
from workers.build import model_facts, offline_settings, open_executor
from workers.engine.copy_costs import CopyCosts
from workers.engine.engine import Engine
from workers.engine.stats import EngineStats

pytestmark = pytest.mark.chaos

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": 4,
    "cpu_threads": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
CUTS = [
    pytest.param({"tensor_parallel_size": 2}, id="tp2"),
    pytest.param({"pipeline_parallel_size": 2}, id="pp2"),
]
FIRST_OF_FAMILY = {model.model_type: model.name for model in reversed(TINY_MODELS)}


@pytest.fixture(autouse=True)
def copying_always_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models on a busy machine: whether a copy is worth it would depend on what else runs."""
    monkeypatch.setattr(CopyCosts, "recompute_s", lambda self, tokens: float("inf"))


def heard(folder: Path, turns: int, **flags: Any) -> tuple[list[list[list[list[int]]]], EngineStats, int]:
    """What eight clients hear, and the bytes of a block; then no block is used, no ticket open, and every law holds."""
    settings = offline_settings(build_settings(str(folder), SMALL | flags).engine)
    executor = open_executor(settings)
    try:
        ready, clients = executor.start(), Clients()
        engine = Engine(settings, model_facts(settings, ready), executor, ready, clients)
        said = clients.converse(engine, turns)
        engine.settle(20.0)
        engine.check_laws()
        assert engine.stats().used_blocks == 0 and not engine.is_copying and not engine.has_work()
        return said, engine.stats(), ready.block_bytes
    finally:
        executor.close()


def assert_tiers_change_nothing(folder: Path, disk: Path, turns: int, cut: dict[str, int]) -> None:
    wanted, plain, block_bytes = heard(folder, turns, num_gpu_blocks_override=400, **cut)
    assert plain.preemptions == 0 and plain.offload is None
    tiers = {
        "num_gpu_blocks_override": 36,
        "kv_offloading_size": 24.5 * block_bytes / 2**30,
        "kv_disk_path": str(disk),
        "kv_disk_size": 400 * block_bytes / 2**30,
    }
    said, stats, _ = heard(folder, turns, **tiers, **cut)
    offload = stats.offload
    assert said == wanted and sum(map(len, said)) > 0.9 * 8 * turns
    assert offload is not None and offload.swapped_out > 0 and offload.failed_blocks == 0, offload
    assert all(offload.blocks[kind] > 0 for kind in ("store", "load", "spill", "fetch")), offload


@pytest.mark.parametrize("cut", CUTS)
def test_kv_02_eight_clients_thrash_tiny_tiers(cut: dict[str, int], tmp_path: Path) -> None:
    folder = save_tiny_model(BY_NAME["llama-gqa"], tmp_path)
    assert_tiers_change_nothing(folder, tmp_path / "kv", 60, cut)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", [*FIRST_OF_FAMILY.values(), "qwen2-window", "llama-mqa-biased"])
def test_every_family_at_every_cut(name: str, cut: dict[str, int], tmp_path: Path) -> None:
    assert_tiers_change_nothing(save_tiny_model(BY_NAME[name], tmp_path), tmp_path / "kv", 12, cut)
