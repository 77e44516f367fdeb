"""What the launcher refuses before Ray starts: memory in the type that is computed in, the model's limits."""

import asyncio
from pathlib import Path

import pytest
import torch

from cluster import preflight
from cluster.coordination.client import BackgroundClient
from cluster.preflight import check_memory, check_model, cpu_weight_bytes, open_to_others
from cluster.tenants.store import TenantStore
from configs.errors import SettingsError
from configs.load import build_settings
from configs.schema import DeviceSettings, EngineSettings, ModelSettings, ServiceSettings
from parallel.matmul import can_pack
from tests.support.private_redis import private_redis
from tests.support.tiny_models import BY_NAME, save_tiny_model
from workers.models.registry import load_spec
from workers.rank.loading import load_single


@pytest.fixture(scope="module", params=["llama-mha-tied", "qwen3-untied", "llama-mqa-biased"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME[request.param], tmp_path_factory.mktemp("models"), dtype=torch.bfloat16)


def service(folder: Path, **values: str | int) -> ServiceSettings:
    return build_settings(str(folder), {"device": "cpu", **values})


def test_weights_are_counted_as_a_rank_holds_them(folder: Path) -> None:
    settings = EngineSettings(
        model=ModelSettings(model=str(folder), dtype="float32"), device=DeviceSettings(device="cpu", cpu_threads=1)
    )
    assert can_pack(torch.float32)
    assert cpu_weight_bytes(load_spec(folder), "float32") == load_single(settings).facts.weight_bytes


def test_a_wider_type_than_the_checkpoints_needs_more_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = cpu_weight_bytes(load_spec(folder), "bfloat16") + 1
    monkeypatch.setattr(preflight, "available_bytes", lambda: free)
    check_memory(service(folder))
    with pytest.raises(SettingsError, match=r"1 x .* of weights in float32") as refused:
        check_memory(service(folder, dtype="float32"))
    assert refused.value.flag == "MODEL"


def test_every_group_that_may_run_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2 * cpu_weight_bytes(load_spec(folder), "bfloat16")
    monkeypatch.setattr(preflight, "available_bytes", lambda: free)
    check_memory(service(folder, data_parallel_size=2))
    with pytest.raises(SettingsError, match="3 x ") as refused:
        check_memory(service(folder, data_parallel_size=3))
    assert refused.value.flag == "--data-parallel-size"
    with pytest.raises(SettingsError, match="3 x ") as refused:
        check_memory(build_settings(str(folder), {"device": "cpu"}, {"max_replicas": 3}))
    assert refused.value.flag == "autoscaling_config"


def test_a_context_beyond_the_models_is_refused_in_the_ranks_words(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"--max-model-len 9999 is outside 1\.\.256") as refused:
        check_model(service(folder, max_model_len=9999))
    assert refused.value.flag == "--max-model-len"


def test_an_api_without_keys_is_warned_of_where_others_reach_it(folder: Path) -> None:
    public = service(folder, host="0.0.0.0")
    with private_redis() as server:
        warning = open_to_others(public, server.url)
        assert warning is not None and "neither an --api-key nor a tenant" in warning
        assert open_to_others(service(folder), server.url) is None
        assert open_to_others(service(folder, host="0.0.0.0", api_key="sk"), server.url) is None
        asyncio.run(add_tenant(server.url))
        assert open_to_others(public, server.url) is None
    warning = open_to_others(public, server.url)
    assert warning is not None, "Redis cannot be asked"


async def add_tenant(url: str) -> None:
    redis = BackgroundClient(url)
    await TenantStore(redis).add("acme", {})
    await redis.close()
