"""The table of devices says what the classes do: dtypes, packed forms, quantizations, caches, names and refusals."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from tandem.cluster.deploy.preflight import with_device
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.options import OPTIONS
from tandem.configs.platform_facts import (
    CPU,
    CUDA,
    DEVICE_FLAGS,
    DTYPES,
    PLATFORM_FACTS,
    PlatformFacts,
    check_device,
    check_formats,
    sized,
    steps_line,
)
from tandem.configs.schema import (
    CacheSettings,
    Device,
    DType,
    EngineSettings,
    KVCacheDType,
    ModelSettings,
    Quantization,
)
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import can_pack
from tandem.parallel.params import Param, Source
from tandem.parallel.quantization.weight_plan import AT_LOAD
from tandem.workers.kernels.triton.codes.scheme_methods import METHODS as CUDA_METHODS
from tandem.workers.models.spec.weights.weight_config import NAMES
from tandem.workers.platforms import cpu
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import METHODS, CpuPlatform
from tandem.workers.platforms.cpu_invariant import InvariantCpuPlatform
from tandem.workers.platforms.platform_choices import choices
from tests.support.platforms import GpuOnHost, replaced

FACTS = pytest.mark.parametrize("facts", PLATFORM_FACTS.values(), ids=lambda facts: str(facts.name))
TORCH = {name: getattr(torch, name) for name in DTYPES}
KV = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


def platform_of(facts: PlatformFacts) -> Platform:
    if facts is CPU:
        return CpuPlatform()
    gpu = GpuOnHost(cpu.HostAccelerator())
    return replaced(gpu, backend=replace(gpu.backend, name="nccl"))


@FACTS
def test_a_platform_is_of_its_facts(facts: PlatformFacts) -> None:
    platform = platform_of(facts)
    assert platform.facts is facts and (platform.memory() is None) == facts.shares_memory
    for name in facts.dtypes:
        found = {one.subject: one for one in choices(platform, TORCH[name])}
        assert list(found) == list(facts.implementations) and all(one.why for one in found.values())
    for kv_dtype in facts.kv_dtypes:
        found_name = platform.attention(torch.bfloat16, 128, KV.get(kv_dtype) or getattr(torch, kv_dtype)).name
        assert found_name in facts.implementations["attention"]


@FACTS
def test_what_packs(facts: PlatformFacts) -> None:
    """A CPU with products of float16 packs that too; one without AVX512 packs less than a plan assumes."""
    packs = {name for name in DTYPES if platform_of(facts).packs(TORCH[name])}
    if facts is CPU and not can_pack(torch.bfloat16):
        packs.add("bfloat16")
    assert packs - {"float16"} == set(facts.packs)


def test_quantizations_are_plans_of_schemes_that_the_class_multiplies() -> None:
    assert set(CPU.quantizations) == {*AT_LOAD, *NAMES} == set(get_args(Quantization))
    schemes = {scheme for plan in AT_LOAD.values() for scheme in plan.schemes}
    assert {type(scheme) for scheme in schemes} <= METHODS.keys()
    assert CUDA.quantizations == CPU.quantizations and METHODS.keys() == CUDA_METHODS.keys()


@FACTS
def test_what_is_refused_has_no_meaning_and_the_rest_has(facts: PlatformFacts) -> None:
    assert bool(facts.quantizations) == ("--quantization" not in facts.refused)
    assert bool(facts.invariant_dtypes) == ("--batch-invariant" not in facts.refused)
    assert facts.shares_memory == ("--gpu-memory-utilization" in facts.without_effect)
    assert facts.shares_memory == ("--cpu-threads" not in facts.refused)
    flags = {f"--{option.name.replace('_', '-')}" for option in OPTIONS}
    assert flags >= {*facts.refused, *facts.without_effect, *DEVICE_FLAGS}


def test_invariant_dtypes_are_those_of_the_class() -> None:
    platform = InvariantCpuPlatform()
    weight = Param(name="w.weight", shape=(64, 64), role="w", source=Source(("w.weight",)))
    for name in DTYPES:
        try:
            platform.linear((weight,), ParallelContext.single(), dtype=TORCH[name])
        except SettingsError:
            assert name not in CPU.invariant_dtypes or cpu.obstacle(TORCH[name]) is not None
        else:
            assert name in CPU.invariant_dtypes


def test_names_of_dtypes_are_the_flags_values() -> None:
    assert set(get_args(DType)) == {"auto", *DTYPES} and set(get_args(Device)) == set(PLATFORM_FACTS)
    for facts in PLATFORM_FACTS.values():
        assert set(facts.kv_dtypes) == set(get_args(KVCacheDType)) - {"auto"}
        assert {*facts.packs, *facts.invariant_dtypes, *facts.computed_as.values()} <= set(facts.dtypes)


def test_a_flag_that_asks_for_what_a_device_has_not_is_refused() -> None:
    with pytest.raises(SettingsError, match=CUDA.refused["--cpu-threads"]) as refused:
        build_settings("demo", {"device": "cuda", "cpu_threads": 2})
    assert refused.value.flag == "--cpu-threads"


def test_formats_that_a_device_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineSettings(model=ModelSettings(model="m", quantization="w8a8"))
    check_device(settings, "cpu")
    check_device(settings, "cuda")
    monkeypatch.setitem(PLATFORM_FACTS, "cuda", replace(CUDA, quantizations=("int8",)))
    with pytest.raises(SettingsError, match="w8a8 is not to be had with --device cuda") as refused:
        check_device(settings, "cuda")
    assert refused.value.flag == "--quantization"
    monkeypatch.setitem(PLATFORM_FACTS, "cpu", replace(CPU, kv_dtypes=("bfloat16",)))
    with pytest.raises(SettingsError, match="int8 is not to be had with --device cpu") as refused:
        check_formats(EngineSettings(model=ModelSettings(model="m"), cache=CacheSettings(kv_cache_dtype="int8")), "cpu")
    assert refused.value.flag == "--kv-cache-dtype"


GIB = 2**30


@pytest.mark.parametrize(
    ("device", "memory", "flags", "expected"),
    [
        ("cpu", 900 * GIB, {}, (64, 2048)),
        ("cuda", None, {}, (64, 2048)),
        ("cuda", 60 * GIB - 1, {}, (64, 2048)),
        ("cuda", 60 * GIB, {}, (256, 8192)),
        ("cuda", 139 * GIB, {"max_num_seqs": 64}, (64, 8192)),
        ("cuda", 139 * GIB, {"max_num_seqs": 64, "max_num_batched_tokens": 2048}, (64, 2048)),
        ("cuda", 139 * GIB, {"max_num_batched_tokens": 128}, (128, 128)),
        ("cuda", 139 * GIB, {"max_num_seqs": 10_000}, (10_000, 10_000)),
        ("cpu", 900 * GIB, {"max_num_seqs": 3000}, (3000, 3000)),
    ],
)
def test_sizes_of_steps_that_no_flag_gives_are_the_devices(
    device: Device,
    memory: int | None,
    flags: dict[str, int],
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = build_settings("demo", flags)
    service = with_device(settings, device, memory).engine
    for engine in (service, sized(service, "cuda", 200 * GIB), sized(settings.engine, device, memory)):
        assert (engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens) == expected
    line = steps_line(service, device)
    assert line is None if device == "cpu" else f"{expected[0]:,} sequences and {expected[1]:,} tokens" in str(line)


def test_help_says_what_it_said() -> None:
    words = {option.name: option.help for option in OPTIONS}
    assert words["max_num_seqs"].endswith("in one step; 256 on a GPU of 60 GiB or more.")
    assert words["max_num_batched_tokens"].endswith("; 8,192 on a GPU of 60 GiB or more, 16,384 there for LLM.")
    assert words["quantization"].endswith("and are checked. Default: neither.")
    assert words["batch_invariant"].endswith("Slower. CPU, bfloat16 and float32 only.")
    assert words["gpu_memory_utilization"].endswith("KV cache (GPU only).")
    assert words["dtype"].endswith("auto: the checkpoint's; on CPU, bfloat16 for a float16 checkpoint.")
