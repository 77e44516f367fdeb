"""Products with int8 weights against their torch twins: any number of rows, odd shapes, threads, NaN and infinity."""

from collections.abc import Iterator
from shutil import which

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import LinearMethod, MakeMethod
from tandem.parallel.params import Param, Source
from tandem.parallel.quantization.int8 import Int8Method, W8A8Method
from tandem.workers.kernels.cpu.cpu_int8_gemm import (
    CpuInt8Method,
    Int8CodesMethod,
    int8_kernel,
    int8_methods,
    multiplies_int8,
    w8a8_methods,
)
from tests.support.cpu_flags import cpu_flags

BF16 = torch.bfloat16
ALONE = ParallelContext.single()
ANY_KERNEL = pytest.mark.usefixtures("kernel")
SHAPES = [(64, 32), (96, 64), (192, 576), (33, 172), (100, 4), (1024, 1000)]
EITHER = pytest.mark.parametrize("methods", [int8_methods, w8a8_methods], ids=["int8", "w8a8"])


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def column(outputs: int, inputs: int) -> tuple[Param]:
    source = Source(("x.weight",))
    return (Param(name="x.weight", shape=(outputs, inputs), role="x", source=source, merge="x"),)


def made(make: MakeMethod, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearMethod:
    method = make(column(*weight.shape), ALONE)
    method.take(weight, bias)
    return method


@pytest.fixture
def kernel() -> None:
    if not multiplies_int8(BF16):
        pytest.skip("needs a CPU with AVX2, and a C compiler")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_cpu_flags_decide() -> None:
    """The kernel is there on every CPU with VNNI or AVX2: no silent fall back to the twin."""
    if "avx512_vnni" in cpu_flags() and which("gcc"):
        assert int8_kernel(BF16) is not None and int8_kernel(torch.float32) is not None
    if {"avx2", "fma"} <= cpu_flags() and which("gcc"):
        assert multiplies_int8(BF16) and multiplies_int8(torch.float32)
    assert not multiplies_int8(torch.float16)


@ANY_KERNEL
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_it_equals_its_twin(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, bias = draw(outputs, inputs, dtype=dtype), draw(outputs, seed=1, dtype=dtype)
    for make, twin in ((int8_methods(dtype), Int8Method), (w8a8_methods(dtype), W8A8Method)):
        for given in (None, bias):
            method, reference = made(make, weight, given), made(twin, weight, given)
            assert isinstance(method, CpuInt8Method | Int8CodesMethod) and isinstance(reference, Int8Method)
            assert torch.equal(method.weight_OI, reference.weight_OI) and method.nbytes == reference.nbytes
            assert torch.equal(method.scale_O, reference.scale_O)
            for rows in (0, 1, 2, 5, 7, 13, 31, 65, 130):
                x = draw(rows, inputs, seed=2, dtype=dtype)
                found, expected = method.apply(x).float(), reference.apply(x).float()
                ulp = 2**-7 if dtype is BF16 else 1e-5
                noise = (2**-13 if dtype is BF16 else 1e-5) * inputs**0.5 if twin is Int8Method else 1e-5
                torch.testing.assert_close(found, expected, rtol=ulp, atol=noise)


@ANY_KERNEL
@EITHER
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(methods: object, threads: None) -> None:
    weight, x = draw(320, 256), draw(150, 256, seed=1)
    method = made(methods(BF16), weight)  # type: ignore[operator]
    whole = method.apply(x)
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        assert torch.equal(method.apply(x), whole)
        for row in (0, 7, 149):
            assert torch.equal(method.apply(x[row : row + 1]), whole[row : row + 1])
            assert torch.equal(method.apply(x[row:]), whole[row:])


@ANY_KERNEL
@EITHER
def test_rows_may_lie_apart(methods: object) -> None:
    method, wide = made(methods(BF16), draw(128, 64)), draw(4, 200, seed=1)  # type: ignore[operator]
    for part in (wide[:, 8:72], wide[:, ::2][:, :64]):
        assert torch.equal(method.apply(part), method.apply(part.contiguous()))


@ANY_KERNEL
def test_inputs_keep_their_bits() -> None:
    """All 8 bits of bf16, of inputs down to 2**-6 of the largest, and numbers of any size."""
    method = made(int8_methods(BF16), torch.eye(64, dtype=BF16))
    exact = torch.cat([torch.arange(128, 256) * 2.0**-power for power in range(7)]).view(14, 64).to(BF16)
    exact[:, 0] = 255.0
    for size in (1.0, 2.0**100, 2.0**-80):
        torch.testing.assert_close(method.apply(exact * size).float(), (exact * size).float(), rtol=1e-6, atol=0)


@EITHER
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16])
def test_numbers_that_are_none_stay_none(methods: object, dtype: torch.dtype) -> None:
    weight, x = draw(64, 32, dtype=dtype), draw(3, 32, seed=1, dtype=dtype)
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    y = made(methods(dtype), weight).apply(x)  # type: ignore[operator]
    assert y[0].isnan().all() and not y[1].isfinite().any() and y[2].isfinite().all()


def test_other_inputs_stay_with_torch() -> None:
    for inputs in (2**16 + 4, 30) if int8_kernel(BF16) else (2**16 + 4,):
        method = int8_methods(BF16)(column(8, inputs), ALONE)
        assert type(method) is Int8Method
