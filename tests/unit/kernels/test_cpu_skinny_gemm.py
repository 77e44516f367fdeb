"""Skinny GEMM against float32: any number of rows, outputs that end in mid-block, threads, layouts."""

from collections.abc import Iterator
from itertools import product
from shutil import which

import pytest
import torch

from tandem.parallel.linear_methods import PackedMethod
from tandem.workers.kernels.cpu import cpu_skinny_gemm
from tandem.workers.kernels.cpu.cpu_skinny_gemm import (
    MAX_ROWS,
    CpuSkinnyGemm,
    describe,
    descriptor,
    skinny_gemm,
)
from tests.support.cpu_flags import cpu_flags

CPU = torch.device("cpu")
ANY_KERNEL = pytest.mark.usefixtures("kernel")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedMethod:
    method = PackedMethod(skinny_gemm=skinny_gemm(torch.bfloat16))
    method.take(weight, bias)
    return method


@pytest.fixture
def kernel() -> CpuSkinnyGemm:
    found = skinny_gemm(torch.bfloat16)
    if found is None:
        pytest.skip("needs a CPU that multiplies pairs of bf16, and a C compiler")
    return found


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_cpu_flags_decide() -> None:
    """The kernel is available on every CPU that multiplies pairs of bf16: no silent fall back to the twin."""
    if "avx512_bf16" in cpu_flags() and which("gcc") and torch.__version__.startswith("2.13"):
        assert skinny_gemm(torch.bfloat16) is not None
    assert skinny_gemm(torch.float32) is None


@ANY_KERNEL
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (96, 64), (192, 576), (33, 160), (100, 96), (1024, 3072)])
def test_it_equals_the_product_in_float32(outputs: int, inputs: int) -> None:
    weight, bias = draw(outputs, inputs), draw(outputs, seed=1)
    for rows, given in product((1, 2, 5, 6, 7, 12, 13, 16, 31, MAX_ROWS), (None, bias)):
        x = draw(rows, inputs, seed=2)
        expected = x.float() @ weight.float().T + (0 if given is None else given.float())
        method = packed(weight, given)
        assert method._skinny is not None
        scale = inputs**0.5
        torch.testing.assert_close(method.apply(x).float(), expected, rtol=2**-8, atol=1e-5 * scale)


@ANY_KERNEL
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(threads: None) -> None:
    weight, x = draw(320, 256), draw(MAX_ROWS, 256, seed=1)
    matrix = packed(weight).apply
    whole = matrix(x)
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        assert torch.equal(matrix(x), whole)
        for row in (0, 7, MAX_ROWS - 1):
            assert torch.equal(matrix(x[row : row + 1]), whole[row : row + 1])
            assert torch.equal(matrix(x[row:]), whole[row:])


@ANY_KERNEL
def test_rows_may_lie_apart() -> None:
    weight, wide = draw(128, 64), draw(4, 200, seed=1)
    matrix = packed(weight).apply
    assert torch.equal(matrix(wide[:, 8:72]), matrix(wide[:, 8:72].contiguous()))
    assert torch.equal(matrix(wide[:, ::2][:, :64]), matrix(wide[:, ::2][:, :64].contiguous()))


def test_what_it_does_not_read_stays_with_onednn(kernel: CpuSkinnyGemm) -> None:
    odd, x = packed(draw(64, 40)), draw(3, 40, seed=1)
    assert odd._skinny is None
    torch.testing.assert_close(odd.apply(x).float(), x.float() @ draw(64, 40).float().T, rtol=0.02, atol=0.02)
    long = packed(draw(64, 32))
    for rows in (0, MAX_ROWS + 1):
        assert long.apply(draw(rows, 32)).shape == (rows, 64)
    reordered = torch.ops.mkldnn._reorder_linear_weight(draw(64, 32).float())
    assert kernel.bind(reordered, None, 64) is None
    reordered = torch.ops.mkldnn._reorder_linear_weight(draw(64, 32))
    assert kernel.bind(reordered, None, 64) is not None and kernel.bind(reordered, None, 65) is None


@ANY_KERNEL
def test_another_layout_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose oneDNN packs otherwise: by its descriptor, or by the bytes behind the same one."""
    assert cpu_skinny_gemm._layout_is_known()
    reordered = torch.ops.mkldnn._reorder_linear_weight(draw(64, 64))
    assert describe(reordered) == descriptor(64, 64) != descriptor(64, 32)
    monkeypatch.setattr(cpu_skinny_gemm, "BLOCK", 32)
    assert not cpu_skinny_gemm._layout_is_known()
    monkeypatch.setattr(cpu_skinny_gemm, "describe", lambda packed: b"")
    monkeypatch.setattr(cpu_skinny_gemm, "descriptor", lambda outputs, inputs: b"")
    assert not cpu_skinny_gemm._layout_is_known()


def test_numbers_that_are_none_stay_none(kernel: CpuSkinnyGemm) -> None:
    weight, x = draw(64, 32), draw(2, 32, seed=1)
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    y = packed(weight).apply(x)
    assert y[0].isnan().all() and (y[1].isinf() | y[1].isnan()).all()
    assert isinstance(kernel, CpuSkinnyGemm)
