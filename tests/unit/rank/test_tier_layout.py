"""KV of other weights, another sharding or another revision is never loaded."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from tandem.configs.schema import CacheSettings, EngineSettings, ModelSettings, ParallelSettings
from tandem.workers.executor.tiers import layout_digest
from tandem.workers.messages.handshake import RankLoaded
from tandem.workers.planning.resolve import fingerprint
from tests.support.tiny_models import BY_NAME, save_tiny_model

RANK = RankLoaded(
    rank=0,
    num_blocks=10,
    weight_bytes=1,
    block_bytes=640,
    device="cpu",
    dtype="float32",
    threads=1,
    load_s=0.1,
    is_in_host_memory=True,
)


def settings_for(folder: Path, **model: str) -> EngineSettings:
    return EngineSettings(model=ModelSettings(model=str(folder), **model), cache=CacheSettings(block_size=4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME["llama-gqa"], tmp_path_factory.mktemp("models"))


def test_the_same_weights_in_another_folder_have_the_same_name(folder: Path, tmp_path: Path) -> None:
    other = save_tiny_model(BY_NAME["llama-gqa"], tmp_path)
    assert fingerprint(folder, settings_for(folder)) == fingerprint(other, settings_for(other))


def test_another_start_of_the_same_group_has_the_same_layout_until_a_file_changes(tmp_path: Path) -> None:
    folder = save_tiny_model(BY_NAME["llama-gqa"], tmp_path)
    own = layout_digest(settings_for(folder), [RANK])
    again = msgspec.structs.replace(RANK, load_s=9.9, num_blocks=77, threads=3)
    assert layout_digest(settings_for(folder), [again]) == own
    (file,) = folder.glob("*.safetensors")
    os.utime(file, ns=(1, 1))
    assert layout_digest(settings_for(folder), [RANK]) != own


def test_other_weights_config_or_overrides_are_others(folder: Path, tmp_path: Path) -> None:
    own = fingerprint(folder, settings_for(folder))
    tuned = save_tiny_model(BY_NAME["llama-gqa"], tmp_path / "tuned", seed=1)
    assert fingerprint(tuned, settings_for(tuned)) != own
    changed = save_tiny_model(BY_NAME["llama-gqa"], tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert fingerprint(changed, settings_for(changed)) != own
    settings = EngineSettings(model=ModelSettings(model=str(folder), hf_overrides={"rope_theta": 5.0}))
    assert fingerprint(folder, settings) != own
    assert fingerprint(folder, settings_for(folder, revision="v2")) != own


def test_another_sharding_block_size_or_type_is_another_layout(folder: Path) -> None:
    base = settings_for(folder)
    replace = msgspec.structs.replace
    digests = [
        layout_digest(base, [RANK]),
        layout_digest(base, [RANK, replace(RANK, rank=1)]),
        layout_digest(replace(base, parallel=ParallelSettings(tensor_parallel_size=2)), [RANK, RANK]),
        layout_digest(replace(base, parallel=ParallelSettings(pipeline_parallel_size=2)), [RANK, RANK]),
        layout_digest(replace(base, cache=CacheSettings(block_size=8)), [RANK]),
        layout_digest(base, [replace(RANK, dtype="bfloat16")]),
        layout_digest(base, [replace(RANK, kv_layout="4x0:1*32")]),
        layout_digest(base, [replace(RANK, block_bytes=320)]),
    ]
    assert len(set(digests)) == len(digests) and all(len(digest) == 16 for digest in digests)
