"""Kernels of --batch-invariant: right, and to the last bit the same for a row alone and among any others."""

from dataclasses import replace
from functools import partial
from platform import machine
from shutil import which
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.configs.environment import CPU_ISA, CpuIsa
from tandem.configs.errors import SettingsError
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import LinearMethod, as_given, packed
from tandem.parallel.params import Param, Source
from tandem.parallel.quantization.schemes import Coded, Codes, Inputs, Int8Rows
from tandem.workers.kernels.cpu import cpu_build
from tandem.workers.kernels.cpu.cpu_build import cpu_invariant_library, cpu_library
from tandem.workers.kernels.cpu.cpu_experts import cpu_experts
from tandem.workers.kernels.cpu.cpu_fused_ops import CpuFusedOps
from tandem.workers.kernels.cpu.cpu_int8_gemm import int8_kernel
from tandem.workers.kernels.cpu.cpu_skinny_gemm import skinny_gemm
from tandem.workers.kernels.expert_ops import TorchExperts
from tandem.workers.kernels.invariant import row_gemm
from tandem.workers.kernels.invariant.row_gemm import RowMethod, SkinnyMethod, row_methods
from tandem.workers.kernels.lora_ops import AdapterRows, ProjectionTables
from tandem.workers.models.spec.arch import Activation, ClampedSwiglu
from tandem.workers.platforms.cpu_invariant import InvariantCpuPlatform

pytestmark = pytest.mark.skipif(which("gcc") is None and which("cc") is None, reason="needs a C compiler")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ROWS = 131
RUNS = [(0, 1), (5, 6), (2, 9), (0, 13), (1, 61), (0, 64), (3, 68), (0, 130)]
"""First row and last + 1 of those that are multiplied without the others."""


def library(dtype: torch.dtype) -> Any:
    found = cpu_invariant_library(dtype)
    assert found is not None
    return found


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def param_of(outputs: int, inputs: int) -> Param:
    return Param(name="w.weight", shape=(outputs, inputs), role="w", source=Source(("w.weight",)))


def method_of(outputs: int, inputs: int, dtype: torch.dtype) -> LinearMethod:
    make = row_methods(library(dtype), skinny_gemm(dtype, max_rows=10**9))
    return make([param_of(outputs, inputs)], ParallelContext.single())


@DTYPES
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (203, 64), (33, 80), (100, 1000), (1, 7)])
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    method = method_of(outputs, inputs, dtype)
    is_skinny = skinny_gemm(dtype) is not None and inputs % 32 == 0
    assert isinstance(method, SkinnyMethod if is_skinny else RowMethod)
    weight, bias = draw(outputs, inputs, dtype=dtype), draw(outputs, dtype=dtype, seed=1)
    x = draw(ROWS, 2 * inputs, dtype=dtype, seed=2)[:, :inputs]
    for given in (None, bias):
        method.take(weight, given)
        y = method.apply(x)
        expected = x.double() @ weight.double().T + (0 if given is None else given.double())
        eps = torch.finfo(dtype).eps if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(y.double(), expected, rtol=eps, atol=2e-6 * inputs**0.5)
        for first, last in RUNS:
            assert torch.equal(method.apply(x[first:last]), y[first:last]), (first, last)


@pytest.mark.skipif(machine() != "x86_64", reason="imitates x86 CPUs")
@DTYPES
@pytest.mark.parametrize("isa", CpuIsa)
def test_prompts_have_the_bits_of_single_rows_on_every_cpu(
    dtype: torch.dtype, isa: CpuIsa, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several groups of tiles and pieces of inputs, with any number of threads, and the instructions of older
    CPUs."""
    monkeypatch.setattr(row_gemm, "WIDE_FLOATS", 0)
    monkeypatch.setenv(CPU_ISA, isa)
    older = cpu_build._compiled(cpu_build.INVARIANT_SOURCES, dtype, None)
    assert older is not None
    outputs, inputs, count = 130, 331, 2 * row_gemm.LEAST_WIDE_ROWS + 3
    weight, bias, x = (draw(*shape, dtype=dtype) for shape in ((outputs, inputs), (outputs,), (count, inputs)))
    ours, theirs = (row_methods(each, None)((), ParallelContext.single()) for each in (library(dtype), older))
    for method in (ours, theirs):
        method.take(weight, bias)
    y = ours.apply(x)
    expected = x.double() @ weight.double().T + bias.double()
    eps = torch.finfo(dtype).eps if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(y.double(), expected, rtol=eps, atol=2e-6 * inputs**0.5)
    assert torch.equal(torch.cat([theirs.apply(row[None]) for row in x[:20]]), y[:20])
    for first, last in [(0, count), (7, count), (1, 14), (3, 60), (0, row_gemm.LEAST_WIDE_ROWS + 1)]:
        assert torch.equal(theirs.apply(x[first:last]), y[first:last]), (first, last)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    by_three = theirs.apply(x)
    torch.set_num_threads(before)
    assert torch.equal(by_three, y) and theirs.apply(x[:0]).shape == (0, outputs)


@DTYPES
@pytest.mark.parametrize("kind", list(Activation))
def test_an_activation_is_the_same_alone_and_among_others(dtype: torch.dtype, kind: Activation) -> None:
    usual = cpu_library(dtype)
    assert usual is not None
    ops = CpuFusedOps(usual)
    for width in (64, 72, 1000):
        given = 4 * draw(ROWS, 2 * width, dtype=dtype)
        for x in (given, given[:, :width], given[:, width:]):
            y = ops.activate(x, kind, gated=False)
            function = {Activation.SILU: F.silu, Activation.RELU: F.relu}.get(kind)
            approximate = "tanh" if kind is Activation.GELU_TANH else "none"
            expected = F.gelu(x.double(), approximate=approximate) if function is None else function(x.double())
            torch.testing.assert_close(
                y.double(), expected, rtol=max(torch.finfo(dtype).eps / 2, 1e-6), atol=5e-7, msg=str(kind)
            )
            for first, last in RUNS:
                assert torch.equal(ops.activate(x[first:last], kind, gated=False), y[first:last]), (width, first, last)


@DTYPES
def test_the_experts_activation_is_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    """Also where a rank's part of an expert is no multiple of a vector."""
    ops, twin = cpu_experts(dtype, packed(None), as_given), TorchExperts(packed(None), as_given)
    spec = ClampedSwiglu(1.702, 7.0)
    for width in (64, 24, 360, 5):
        rows = 4 * draw(ROWS, 2 * width, dtype=dtype)
        y = ops.clamped_swiglu(spec, rows)
        expected = twin.clamped_swiglu(spec, rows.float())
        torch.testing.assert_close(y.float(), expected, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=1e-6)
        for first, last in RUNS:
            assert torch.equal(ops.clamped_swiglu(spec, rows[first:last]), y[first:last]), (width, first, last)


@DTYPES
@pytest.mark.parametrize("outputs", [304, 301])
def test_an_adapter_of_any_width_is_the_same_alone_and_among_others(dtype: torch.dtype, outputs: int) -> None:
    """As one on the head of a vocabulary of any size."""
    inputs, rank, stride = 64, 16, 320
    ops = InvariantCpuPlatform().lora_ops(dtype)
    slab, starts = draw(2 * rank * stride, dtype=dtype), torch.arange(2 * rank)[None] * stride
    a_rows, b_rows = (part.contiguous() for part in starts.split(rank, dim=1))
    ranks, scales = torch.tensor([rank], dtype=torch.int32), torch.tensor([0.5])
    tables = ProjectionTables(a_rows, b_rows, ranks, scales, inputs, outputs, start=0)
    x, before = draw(ROWS, inputs, dtype=dtype, seed=1), draw(ROWS, outputs, dtype=dtype, seed=2)

    def added(first: int, last: int) -> torch.Tensor:
        y, slots = before[first:last].clone(), torch.zeros(last - first, dtype=torch.int32)
        ops.add(y, x[first:last], slab, [tables], AdapterRows(slots, [(0, last - first, 0)]))
        return y

    y = added(0, ROWS)
    a, b = (slab.view(-1, stride)[rows] for rows in (slice(rank), slice(rank, None)))
    expected = before.double() + 0.5 * (x.double() @ a[:, :inputs].double().T) @ b[:, :outputs].double()
    torch.testing.assert_close(y.double(), expected, rtol=max(torch.finfo(dtype).eps, 1e-5), atol=1e-3)
    for first, last in RUNS:
        assert torch.equal(added(first, last), y[first:last]), (first, last)


@pytest.mark.parametrize(
    ("inputs", "refused"), [(96, None), (94, "there is no kernel for int8 weights of 94 inputs, as w")]
)
def test_int8_products_that_would_sum_in_float32_are_refused(inputs: int, refused: str | None) -> None:
    if int8_kernel(torch.float32) is None:
        pytest.skip("needs a CPU with AVX512-VNNI")
    platform = InvariantCpuPlatform()
    weight = replace(param_of(70, inputs), merge="w", scheme=Int8Rows())
    make = partial(platform.linear, dtype=torch.float32)
    if refused is not None:
        with pytest.raises(SettingsError, match=refused) as found:
            make([weight], ParallelContext.single())
        assert found.value.flag == "--batch-invariant"
        weight = replace(weight, scheme=Int8Rows(Inputs.INT8))
    method = make([weight], ParallelContext.single())
    method.take(draw(70, inputs, dtype=torch.float32), None)
    x = draw(ROWS, inputs, dtype=torch.float32, seed=1)
    y = method.apply(x)
    for first, last in RUNS:
        assert torch.equal(method.apply(x[first:last]), y[first:last]), (first, last)


def test_codes_are_multiplied_row_by_row_or_refused() -> None:
    if int8_kernel(torch.float32) is None:
        pytest.skip("needs a CPU with AVX512-VNNI")
    make = partial(InvariantCpuPlatform().linear, dtype=torch.float32)
    weight = replace(param_of(70, 94), merge="w", scheme=Coded(Codes.NF4, group=32))
    method = make([weight], ParallelContext.single())
    method.take(draw(70, 94, dtype=torch.float32), None)
    x = draw(ROWS, 94, dtype=torch.float32, seed=1)
    y = method.apply(x)
    for first, last in RUNS:
        assert torch.equal(method.apply(x[first:last]), y[first:last]), (first, last)
    fp8 = replace(weight, scheme=Coded(Codes.E4M3, bits=8, group=None))
    with pytest.raises(SettingsError, match="there is no kernel for fp8 weights on this CPU"):
        make([fp8], ParallelContext.single())


@DTYPES
def test_infinities_and_nans_stay_in_their_rows(dtype: torch.dtype) -> None:
    method = method_of(70, 64, dtype)
    method.take(draw(70, 64, dtype=dtype), None)
    x = draw(9, 64, dtype=dtype, seed=3)
    clean = method.apply(x)
    x[4, 3], x[7, 0] = float("nan"), float("inf")
    y = method.apply(x)
    assert y[4].isnan().all() and not y[7].isfinite().any()
    others = [0, 1, 2, 3, 5, 6, 8]
    assert torch.equal(y[others], clean[others])
