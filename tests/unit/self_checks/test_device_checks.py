"""The checks of a device, on the GPU's platform over the host's memory: what is right passes, what is not is named."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.workers.attention.latents.torch_latents import TorchLatents
from tandem.workers.attention.torch_sdpa import TorchAttention
from tandem.workers.graphs.cuda_graphs import Replay
from tandem.workers.graphs.graph_runner import Outputs
from tandem.workers.kernels.fused_ops import TorchFusedOps
from tandem.workers.kernels.lora_ops import TorchLora
from tandem.workers.kernels.sampling_ops import TorchSampling
from tandem.workers.platforms.base import DeviceMemory, Platform
from tandem.workers.platforms.cpu import CpuPlatform, HostAccelerator
from tandem.workers.self_checks import device_checks
from tandem.workers.self_checks.outcome import Check
from tandem.workers.self_checks.self_check_run import all_checks, outcome
from tests.support.platforms import GpuOnHost, replaced
from tests.support.recorded_graph import recorded

MEMORY = DeviceMemory(2**24, 2**25)


class Fused(TorchFusedOps):
    """A device's kernels, which are the twin's."""


class Lora(TorchLora):
    """The same."""


class Sampling(TorchSampling):
    """The same."""


def device(**members: Any) -> Platform:
    """A device with kernels for all but experts."""
    kernels: dict[str, Any] = {
        "attention": lambda *_: SimpleNamespace(prepare=TorchAttention().prepare),
        "latent_attention": lambda *_: SimpleNamespace(prepare=TorchLatents().prepare),
        "fused_ops": lambda _: Fused(),
        "lora_ops": lambda _: Lora(),
        "sampling_ops": Sampling,
        "memory": lambda: MEMORY,
    }
    return replaced(GpuOnHost(HostAccelerator()), **kernels | members)


def outcomes(platform: Platform, *names: str) -> dict[str, Any]:
    checks = {check.name: check for check in device_checks.device_checks(platform)}
    return {name: outcome(checks[name]) for name in names}


def kernels(platform: Platform) -> dict[str, Any]:
    names = [check.name for check in device_checks.device_checks(platform) if "kernel" in check.name]
    return outcomes(platform, *names)


def test_a_machine_without_a_device_says_so() -> None:
    (found,) = [outcome(check) for check in all_checks() if check.name.startswith("device")]
    assert found["status"] == "not here" and "there is no device" in str(found["detail"])
    assert [check.name for check in device_checks.device_checks(CpuPlatform())] == ["device"]


def test_kernels_are_held_against_their_twins() -> None:
    found = kernels(device())
    assert len(found) == 12 and found.pop("device kernel experts")["status"] == "not here"
    assert {one["status"] for one in found.values()} == {"ok"}, found
    assert "equal bit for bit" in found["device kernel rotate_store"]["detail"]
    without = kernels(GpuOnHost(HostAccelerator()))
    assert without.pop("device kernel sampling")["status"] == "ok", "the host's own stands for the device's"
    assert {one["status"] for one in without.values()} == {"not here"}


def test_a_kernel_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def store(self: Fused, k: torch.Tensor, v: torch.Tensor, kv: Any, slots: torch.Tensor) -> None:
        TorchFusedOps().store(k * 1.01, v, kv, slots)

    monkeypatch.setattr(Fused, "store", store)
    monkeypatch.setattr(Fused, "silu_mul", lambda self, x: TorchFusedOps().silu_mul(x) * 1.05)
    names = [f"device kernel {name}" for name in ("silu_mul", "rotate_store", "decode attention", "activate")]
    product, stored, attention, untouched = outcomes(device(), *names).values()
    assert [one["status"] for one in (product, stored, attention, untouched)] == ["failed"] * 3 + ["ok"]
    assert "differs from its torch twin by 0.0" in product["detail"]
    assert "keys in torch.int8 differ" in stored["detail"] and "not in the cache" in attention["detail"]


def test_speeds_are_measured() -> None:
    rates = device_checks.device_rates(device(), square=64)
    assert all(rate > 0 for rate in rates) and rates.memory_bytes_per_s >= rates.read_bytes_per_s


def test_copies_to_the_host_and_back() -> None:
    (found,) = outcomes(device(), "device KV store and load").values()
    assert found["status"] == "ok", found


def test_replayed_steps_write_the_tokens_of_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(body: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        raise RuntimeError("not in a capture")

    for capture, status, words in ((recorded, "ok", "the same tokens"), (broken, "failed", "no decode step")):
        platform = replaced(GpuOnHost(HostAccelerator(), capture), memory=lambda: DeviceMemory(2**30, 2**31))
        monkeypatch.setattr("tandem.workers.rank.rank_server.open_platform", lambda *_, made=platform: made)
        (found,) = outcomes(platform, "device replayed steps").values()
        assert found["status"] == status and words in found["detail"], found


def test_what_two_devices_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device is the CPU under its other name."""
    first = replaced(device(), name="cpu")
    second = replaced(device(), device=torch.device("cpu", 0))
    monkeypatch.setattr(device_checks, "LINK_BYTES", 2**16)
    monkeypatch.setattr(device_checks, "open_platform", lambda *_, rank, **__: (first, second)[rank % 2])
    found = [outcome(Check("x", partial(check, first))) for check in PAIRS]
    assert [one["status"] for one in found] == ["ok", "ok"], found
    assert "2 devices, " in str(found[0]["detail"]) and "us for 16 KiB" in str(found[1]["detail"])
    monkeypatch.setattr(device_checks, "open_platform", lambda *_, **__: first)
    alone = [outcome(Check("x", partial(check, first)))["detail"] for check in PAIRS]
    assert alone == ["there is one device"] * 2


PAIRS = (device_checks._copies_between, device_checks._all_reduce)
