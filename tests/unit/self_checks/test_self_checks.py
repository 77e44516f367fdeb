"""Each self-check fails, with its reason, where what it checks is wrong, and says so where there is no kernel."""

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.configs.platform_facts import CUDA
from tandem.offload.copies.kv_copies import CpuCopier
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import as_given, plain
from tandem.workers.attention.cpu_paged import CpuAttention
from tandem.workers.attention.latents.torch_latents import TorchLatents
from tandem.workers.attention.torch_sdpa import TorchAttention
from tandem.workers.graphs.cpu_graphs import CpuGraphs
from tandem.workers.kernels.cpu import cpu_build, cpu_skinny_gemm
from tandem.workers.kernels.cpu.attention.cpu_latent_attention import CpuLatentAttention
from tandem.workers.kernels.cpu.cpu_experts import CpuExperts, DenseExperts, Int8Experts
from tandem.workers.kernels.cpu.cpu_fused_ops import CpuFusedOps
from tandem.workers.kernels.cpu.cpu_int8_gemm import CpuInt8Method, Int8CodesMethod, int8_kernel
from tandem.workers.kernels.cpu.cpu_kv_quant import CpuKVStore
from tandem.workers.kernels.cpu.cpu_lora import CpuLora
from tandem.workers.kernels.cpu.cpu_sampling import CpuSampling
from tandem.workers.kernels.expert_ops import TorchExperts
from tandem.workers.kernels.fused_ops import TorchFusedOps
from tandem.workers.kernels.invariant.row_gemm import RowMethod
from tandem.workers.kernels.lora_ops import TorchLora
from tandem.workers.kernels.sampling_ops import TorchSampling
from tandem.workers.platforms import cpu
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.platforms.platform_choices import choices
from tandem.workers.self_checks import kernel_checks, step_checks, two_ranks
from tandem.workers.self_checks.outcome import Check, CheckFailed, relative_error, require
from tandem.workers.self_checks.self_check_run import all_checks, outcome
from tests.support.platforms import replaced
from tests.support.traced_accelerator import TracedAccelerator, traced_platform

CHECKS = {check.name: check for check in all_checks()}
INT8_METHOD = CpuInt8Method if int8_kernel(torch.bfloat16) else Int8CodesMethod
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def result_spoiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose first result is 5 % off."""

    def spoiled(*args: Any, **more: Any) -> Any:
        out = original(*args, **more)
        out.view(-1)[:] *= 1.05
        return out

    return spoiled


def first_spoiled(original: Callable[..., Any]) -> Callable[..., Any]:
    def spoiled(*args: Any) -> Any:
        best, ids = original(*args)
        return best, ids + 1

    return spoiled


def nothing_done(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *_: None


def one_block_missing(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, slots, blocks, on_layer: original(self, slots[1:], blocks[1:], on_layer)


def attention_spoiled(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, batch: SimpleNamespace(attend=result_spoiled(original(self, batch).attend))


def replay_spoiled(original: Callable[..., Any]) -> Callable[..., Any]:
    def replay(*args: Any) -> Any:
        branch, residual = original(*args)
        return branch + 1, residual

    return replay


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "wrap", "words"),
    [
        ("kernel add_rms_norm", CpuFusedOps, "add_rms_norm", result_spoiled, "differs from its torch twin by 0.0"),
        ("kernel norm_rotate", CpuFusedOps, "norm_rotate", result_spoiled, "differs from its torch twin by 0.0"),
        ("kernel add_layer_norm", CpuFusedOps, "add_layer_norm", result_spoiled, "differs from its torch twin by 0.0"),
        ("kernel activate", CpuFusedOps, "activate", result_spoiled, "differs from its torch twin by 0.0"),
        ("kernel silu_mul", CpuFusedOps, "silu_mul", result_spoiled, "differs from its torch twin by 0.0"),
        ("kernel KV quantization", CpuKVStore, "write", nothing_done, "keys in torch.int8 differ"),
        ("kernel KV quantization", CpuKVStore, "gather", result_spoiled, "what is read from torch.int8 differs"),
        ("kernel skinny GEMM", cpu_skinny_gemm._Product, "__call__", result_spoiled, "differs from its torch twin"),
        ("kernel row GEMM", RowMethod, "apply", result_spoiled, "differs from its torch twin"),
        ("kernel int8 GEMM", INT8_METHOD, "apply", result_spoiled, "differs from its torch twin by 0.0"),
        ("kernel experts", DenseExperts, "apply", result_spoiled, "differs from its torch twin by 0.0"),
        ("kernel experts", Int8Experts, "apply", result_spoiled, "differs from its torch twin by 0.0"),
        ("kernel experts", CpuExperts, "combine", result_spoiled, "differs from its torch twin by 0.0"),
        ("kernel sampling", CpuSampling, "draw", nothing_done, "a token is drawn that its torch twin does not draw"),
        ("kernel sampling", CpuSampling, "best", first_spoiled, "a best token is not its torch twin's"),
        ("kernel grouped LoRA", CpuLora, "add", nothing_done, "differs from its torch twin"),
        ("kernel decode attention", CpuAttention, "prepare", attention_spoiled, "differs from its torch twin"),
        ("kernel chunk attention", CpuAttention, "prepare", attention_spoiled, "differs from its torch twin"),
        (
            "kernel latent attention",
            CpuLatentAttention,
            "release",
            result_spoiled,
            "differs from its torch twin by 0.0",
        ),
        ("replayed steps", CpuGraphs, "_replay", replay_spoiled, "differs from the eager one"),
        ("KV store and load", CpuCopier, "load", one_block_missing, "came back from the host slab changed"),
        ("KV store and load", CpuCopier, "store", nothing_done, "came back from the host slab changed"),
    ],
)
def test_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: Any, attribute: str, wrap: Wrap, words: str
) -> None:
    if outcome(CHECKS[name])["status"] == "not here":
        pytest.skip("no such kernel on this machine")
    monkeypatch.setattr(owner, attribute, wrap(getattr(owner, attribute)))
    found = outcome(CHECKS[name])
    assert found["status"] == "failed" and words in str(found["detail"]), found


def test_a_sum_of_two_ranks_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(*_: object, listener: socket.socket) -> ParallelContext:
        listener.close()
        return ParallelContext.single()

    monkeypatch.setattr(two_ranks, "init_parallel", alone)
    found = outcome(CHECKS["all-reduce of two ranks"])
    assert (found["status"], found["detail"]) == ("failed", "two ranks got a wrong sum")


def test_an_error_in_a_check_is_its_outcome_and_nan_is_wrong() -> None:
    def broken() -> str:
        raise OSError("no memory")

    assert outcome(Check("x", broken))["detail"] == "OSError: no memory"

    def contradicted() -> str:
        raise AssertionError

    assert str(outcome(Check("x", contradicted))["detail"]).endswith(": raise AssertionError")
    with pytest.raises(CheckFailed, match="nan"):
        kernel_checks._worst([0.0, relative_error(torch.tensor([float("nan"), 1.0]), torch.ones(2)), 0.0])
    require(True, "holds")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Platform:
    """As on a machine without a compiler; returns the platform there."""
    made = replaced(
        CpuPlatform(),
        attention=lambda *_: TorchAttention(),
        latent_attention=lambda *_: TorchLatents(),
        experts=lambda *_: TorchExperts(plain, as_given),
        fused_ops=lambda _: TorchFusedOps(),
        lora_ops=lambda _: TorchLora(),
        sampling_ops=lambda: TorchSampling(),
    )
    for module in (kernel_checks, step_checks):
        monkeypatch.setattr(module, "CpuPlatform", lambda *_, **__: made)
    monkeypatch.setattr(kernel_checks, "multiplies_int8", lambda _: False)
    for module in (kernel_checks, cpu):
        monkeypatch.setattr(module, "skinny_gemm", lambda _: None)
        monkeypatch.setattr(module, "multiplies_by_row", lambda _: False)
    monkeypatch.setattr(cpu_build, "cpu_invariant_library", lambda _: None)
    monkeypatch.setattr(CpuKVStore, "make", lambda *_: None)
    return made


@pytest.mark.usefixtures("without_kernels")
def test_what_is_not_here_is_said() -> None:
    for name, check in CHECKS.items():
        if name.startswith("kernel") or name == "replayed steps":
            found = outcome(check)
            assert found["status"] == "not here" and found["detail"], found


@pytest.mark.parametrize(
    ("failures", "reason"),
    [([], "there is no C compiler (gcc or cc)"), (["gcc: no 'as'"], "the C compiler does not compile the kernels")],
)
def test_a_missing_compiler_is_not_blamed_on_the_cpu(
    without_kernels: Platform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failures: list[str], reason: str
) -> None:
    monkeypatch.setattr(cpu_build, "failures", failures)
    if not failures:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(cpu_build, "_compiler", lambda: "/usr/bin/gcc")
    for name, check in CHECKS.items():
        if name.startswith("kernel") or name == "replayed steps":
            assert str(outcome(check)["detail"]).startswith(f"{reason}; "), name
    why = {one.subject: one.why for one in choices(replaced(without_kernels, packs=lambda _: True))}
    assert all(
        reason in why[subject] for subject in ("attention", "fused ops", "linear", "experts", "LoRA ops", "graphs")
    )


def test_choices_are_said_with_their_reasons() -> None:
    here = {one.subject: one for one in choices(CpuPlatform())}
    assert list(here) == [
        "attention",
        "fused ops",
        "linear",
        "experts",
        "LoRA ops",
        "sampling",
        "collectives",
        "graphs",
    ]
    assert here["attention"].chosen == CpuPlatform().attention(torch.bfloat16, 128).name
    traced = traced_platform(TracedAccelerator())
    traced.backend = replace(traced.backend, name="nccl")
    platform = replaced(traced, lora_ops=lambda _: SimpleNamespace())
    gpu = {one.subject: one.chosen for one in choices(platform)}
    assert list(gpu) == list(here)
    assert (gpu["attention"], gpu["linear"], gpu["LoRA ops"], gpu["collectives"]) == (
        "torch-sdpa", "cuBLAS", "Triton", "nccl",
    )  # fmt: skip
    assert choices(traced)[4].why == CUDA.implementations["experts"]["torch, expert by expert"].why


@pytest.mark.parametrize(("packs", "linear"), [(True, "oneDNN"), (False, "torch")])
def test_choices_without_kernels(without_kernels: Platform, packs: bool, linear: str) -> None:
    found = {one.subject: one.chosen for one in choices(replaced(without_kernels, packs=lambda _: packs))}
    assert found | {"collectives": ""} == {
        "attention": "torch-sdpa",
        "fused ops": "torch",
        "linear": linear,
        "experts": "torch, expert by expert",
        "LoRA ops": "torch",
        "sampling": "torch",
        "collectives": "",
        "graphs": "none",
    }


def test_a_compiler_that_does_not_compile_fails_by_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = [check for check in kernel_checks.kernel_checks() if check.name == "compiled kernels"]
    monkeypatch.setattr(kernel_checks.cpu_build, "failures", ["gcc: fatal error:\n cannot execute 'as'"])
    with pytest.raises(CheckFailed, match="the C compiler says: gcc: fatal error: cannot execute 'as'"):
        check.run()
