"""What the launcher refuses before Ray starts: memory in the type that is computed in, the model's limits."""

import asyncio
from pathlib import Path

import pytest
import torch

from tandem.cluster.deploy import preflight
from tandem.cluster.deploy.preflight import (
    HOST_TIER_SHARE,
    check_labels,
    check_memory,
    check_model,
    check_processes,
    cpu_weight_bytes,
    fit_host_tier,
    note_on_keys,
)
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.tenants.store import TenantStore
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.schema import (
    DeviceSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    ParallelSettings,
    ServiceSettings,
)
from tandem.parallel.linear_methods import can_pack
from tandem.parallel.mesh import Mesh
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.adapter_room import adapter_room
from tests.support.loading import load_single
from tests.support.private_redis import private_redis
from tests.support.tiny_models import BY_NAME, save_tiny_model


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


def test_more_processes_than_memory_holds_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 8 * 2**30)
    check_processes(service(folder, data_parallel_size=4))
    with pytest.raises(SettingsError, match=r"500 group\(s\) of 2 rank\(s\) need about") as refused:
        check_processes(service(folder, data_parallel_size=500, tensor_parallel_size=2))
    assert refused.value.flag == "--data-parallel-size"
    with pytest.raises(SettingsError) as refused:
        check_processes(build_settings(str(folder), {"device": "cpu"}, {"max_replicas": 500}))
    assert refused.value.flag == "autoscaling_config"
    check_processes(service(folder, data_parallel_size=500, device="cuda"))


def test_adapters_in_host_memory_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as every rank of every group may keep, at the highest rank, beside weights and KV."""
    spec, lora = load_spec(folder), LoraSettings(enable_lora=True, max_cpu_loras=10)
    copies = sum(adapter_room(lora, spec, Mesh(2, 1, rank), 2).host_bytes for rank in range(2))
    weights = cpu_weight_bytes(spec, "bfloat16", ParallelSettings(tensor_parallel_size=2))
    asked = service(folder, enable_lora=True, max_cpu_loras=10, tensor_parallel_size=2, data_parallel_size=2)
    monkeypatch.setattr(preflight, "available_bytes", lambda: 2 * (weights + copies))
    check_memory(asked)
    monkeypatch.setattr(preflight, "available_bytes", lambda: 2 * (weights + copies) - 1)
    check_memory(service(folder, tensor_parallel_size=2, data_parallel_size=2))
    with pytest.raises(SettingsError, match=r"10 adapters in host memory.*--max-lora-rank 16.*2 group.*loras 9") as no:
        check_memory(asked)
    assert no.value.flag == "--max-cpu-loras"
    monkeypatch.setattr(preflight, "available_bytes", lambda: 2 * weights)
    with pytest.raises(SettingsError, match="nothing is left for any"):
        check_memory(asked)


def test_a_context_beyond_the_models_is_refused_in_the_ranks_words(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"--max-model-len 9999 is outside 1\.\.256") as refused:
        check_model(service(folder, max_model_len=9999))
    assert refused.value.flag == "--max-model-len"


def test_labels_select_among_the_nodes_of_a_cluster() -> None:
    groups, gateways = (
        build_settings("m", {name: {"x": "y"}}) for name in ("label_selector", "gateway_label_selector")
    )
    check_labels(groups, private=False)
    for settings, private, flag in ((groups, True, "--label-selector"), (gateways, False, "--gateway-label-selector")):
        with pytest.raises(SettingsError) as refused:
            check_labels(settings, private=private)
        assert refused.value.flag == flag


def test_a_host_tier_beyond_its_share_of_memory_is_left_out_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all groups; one that just fits is kept, and its disk with it."""
    disk = {"kv_disk_path": str(tmp_path), "kv_disk_size": 1}
    asked = build_settings("m", {"device": "cpu", "kv_offloading_size": 2, "data_parallel_size": 3, **disk})
    monkeypatch.setattr(preflight, "available_bytes", lambda: int(6 * 2**30 / HOST_TIER_SHARE) + 1)
    assert fit_host_tier(asked) == (asked, None)
    monkeypatch.setattr(preflight, "available_bytes", lambda: int(6 * 2**30 / HOST_TIER_SHARE) - 2**20)
    fitted, note = fit_host_tier(asked)
    cache = fitted.engine.cache
    assert (cache.kv_offloading_gib, cache.kv_disk_path, cache.kv_disk_gib) == (None, None, None)
    assert note is not None and note.startswith("--kv-offloading-size 2: 6.0 GiB for 3 group(s) is more than 60%")
    assert note.endswith("; serving without tiers below the device")
    assert fitted.engine.parallel == asked.engine.parallel and fitted.gateway == asked.gateway


def test_without_a_host_tier_there_is_nothing_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 0)
    asked = build_settings("m", {"device": "cpu"})
    assert fit_host_tier(asked) == (asked, None)


def test_a_service_whose_every_answer_is_401_says_so(folder: Path) -> None:
    public = service(folder, host="0.0.0.0")
    with private_redis() as server:
        note = note_on_keys(public, server.url)
        assert note is not None and "there is none yet" in note and "tandem tenants add" in note
        note = note_on_keys(service(folder, admin_api_key="root"), server.url)
        assert note is not None and "there is only --admin-api-key" in note and "none yet" not in note
        assert note_on_keys(service(folder), server.url) is None
        assert note_on_keys(service(folder, host="0.0.0.0", api_key="sk"), server.url) is None
        asyncio.run(add_tenant(server.url))
        assert note_on_keys(public, server.url) is None
        asyncio.run(remove_tenant(server.url))
        note = note_on_keys(service(folder), server.url)
        assert note is not None and "stays closed" in note
    assert note_on_keys(public, server.url) is None, "Redis cannot be asked"


async def remove_tenant(url: str) -> None:
    redis = BackgroundClient(url)
    try:
        await TenantStore(redis).remove("acme")
    finally:
        await redis.close()


async def add_tenant(url: str) -> None:
    redis = BackgroundClient(url)
    await TenantStore(redis).add("acme", {})
    await redis.close()
