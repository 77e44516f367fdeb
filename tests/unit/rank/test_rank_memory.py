"""How many KV blocks fit, and that a refusal names the flag and the numbers."""

from pathlib import Path

import pytest

from tandem.configs.errors import SettingsError
from tandem.configs.schema import CacheSettings
from tandem.workers.planning.budget import MIB, KVNeeds, available_bytes, cpu_blocks, cuda_blocks

NEEDS = KVNeeds(block_bytes=MIB, block_size=16, max_model_len=100, max_num_seqs=3)  # 7 blocks a context


def test_cpu_takes_the_lesser_of_need_and_share() -> None:
    assert cpu_blocks(CacheSettings(), NEEDS, 1000 * MIB, 1) == 21
    assert cpu_blocks(CacheSettings(), NEEDS, 40 * MIB, 1) == 16
    assert cpu_blocks(CacheSettings(), NEEDS, 40 * MIB, 2) == 8


def test_explicit_sizes_beat_the_share() -> None:
    assert cpu_blocks(CacheSettings(kv_cache_memory_bytes=30 * MIB), NEEDS, 40 * MIB, 1) == 30
    assert cpu_blocks(CacheSettings(num_blocks=2, kv_cache_memory_bytes=1), NEEDS, 40 * MIB, 1) == 2


def test_cuda_takes_what_weights_and_activations_leave() -> None:
    assert cuda_blocks(CacheSettings(), NEEDS, 100 * MIB, 70 * MIB, 30 * MIB) == 60
    assert cuda_blocks(CacheSettings(num_blocks=9), NEEDS, 100 * MIB, 70 * MIB, 30 * MIB) == 9


@pytest.mark.parametrize(
    ("cache", "flag", "words"),
    [
        (CacheSettings(), "--max-model-len", ["100", "7.0 MiB", "6.0 MiB", "96"]),
        (CacheSettings(kv_cache_memory_bytes=2 * MIB), "--kv-cache-memory-bytes", ["7.0 MiB", "2.0 MiB", "32"]),
        (CacheSettings(kv_cache_memory_bytes=16 * MIB), "--kv-cache-memory-bytes", ["15.0 MiB"]),
        (CacheSettings(num_blocks=16), "--num-gpu-blocks-override", ["16", "16.0 MiB", "15.0 MiB"]),
    ],
)
def test_too_little_is_refused_with_flag_and_numbers(cache: CacheSettings, flag: str, words: list[str]) -> None:
    with pytest.raises(SettingsError) as refused:
        cpu_blocks(cache, NEEDS, 15 * MIB, 1)
    assert refused.value.flag == flag
    assert all(word in str(refused.value) for word in words), refused.value


def test_cuda_refusal_names_the_share() -> None:
    with pytest.raises(SettingsError, match=r"--gpu-memory-utilization 0\.9 of 100 MiB less 88 MiB"):
        cuda_blocks(CacheSettings(), NEEDS, 100 * MIB, 12 * MIB, 88 * MIB)


def test_a_container_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert available_bytes(tmp_path) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == pytest.approx(available_bytes(tmp_path / "none"), rel=0.2)
