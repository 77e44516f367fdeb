"""Products with weights that are codes against plain ones in float64: every form of weights, odd shapes, any number of
rows, threads, memory full of NaN, NaN and infinity, other CPUs, experts."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import Groups
from tandem.parallel.params import Param, Source
from tandem.parallel.quantization.coded import CodedMethod
from tandem.parallel.quantization.coded_weight import CodedWeight
from tandem.parallel.quantization.int8 import quantize_inputs
from tandem.parallel.quantization.schemes import Coded, Codes, Inputs
from tandem.workers.kernels.cpu import cpu_build, cpu_code_gemm
from tandem.workers.kernels.cpu.cpu_code_gemm import (
    PLANES,
    CodeGemm,
    CodeLayout,
    CpuCodedMethod,
    code_gemm,
    code_methods,
    grouped_code_gemm,
    layout_of,
    values_of,
)
from tests.support.cpu_flags import cpu_flags

BF16, FP32 = torch.bfloat16, torch.float32
ANY_KERNEL = pytest.mark.usefixtures("kernel")
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "float32"])
SYMMETRIC = torch.arange(-8.0, 8.0)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.tensor(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
     0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
)  # fmt: skip
FORMS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "int4 by 32": (64, 128, {"group": 32, "table": SYMMETRIC}),
    "int4 by 128": (96, 384, {"group": 128, "table": SYMMETRIC}),
    "int4, one scale": (33, 1100, {"group": 1100, "table": SYMMETRIC}),
    "int4, last group short": (40, 172, {"group": 64, "table": SYMMETRIC}),
    "zeros": (100, 256, {"group": 64, "zeros": True}),
    "zeros, groups of 20": (31, 100, {"group": 20, "zeros": True}),
    "four inputs": (100, 4, {"group": 4}),
    "E2M1": (70, 96, {"group": 32, "table": E2M1}),
    "E2M1 by 16": (70, 96, {"group": 16, "table": E2M1, "zeros": True}),
    "E2M1 by 16, narrow scales": (70, 96, {"group": 16, "table": E2M1, "narrow": True}),
    "NF4": (96, 192, {"group": 64, "table": NF4}),
    "3 bits": (64, 100, {"group": 64, "bits": 3, "zeros": True}),
    "8 bits": (64, 96, {"group": 32, "bits": 8, "zeros": True}),
    "8 bits, symmetric": (65, 90, {"group": 32, "bits": 8, "table": torch.arange(-128.0, 128.0)}),
    "own order": (96, 256, {"group": 64, "zeros": True, "ordered": True}),
    "own order, ragged": (64, 50, {"table": SYMMETRIC, "ordered": True, "ends": [0, 13, 13, 40, 50]}),
}
SCHEMES = (
    Coded(group=32), Coded(inputs=Inputs.INT8), Coded(bits=3, group=None, zeros=True), Coded(bits=8, group=64),
    Coded(Codes.NF4, group=64), Coded(Codes.FP4, group=64), Coded(Codes.E2M1, group=32), Coded(group=64, ordered=True),
)  # fmt: skip
ALONE = ParallelContext.single()
EACH_FORM = pytest.mark.parametrize("form", FORMS)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def coded(
    outputs: int,
    inputs: int,
    *,
    group: int = 1,
    bits: int = 4,
    table: torch.Tensor | None = None,
    zeros: bool = False,
    narrow: bool = False,
    ordered: bool = False,
    ends: list[int] | None = None,
    seed: int = 0,
) -> CodedWeight:
    """A random weight. narrow: scales are all finite numbers of E4M3, also the negative ones, which no writer makes."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group) if ends is None else len(ends)
    scale_OG, outer_O = (torch.rand(outputs, groups, generator=generator) + 0.5).mul_(0.01), None
    if narrow:
        finite = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
        drawn = finite.repeat(-(-outputs * groups // len(finite)))[: outputs * groups].view(outputs, groups)
        scale_OG, outer_O = drawn.contiguous().view(torch.float8_e4m3fn), torch.rand(outputs, generator=generator)
    return CodedWeight(
        torch.randint(0, 2**bits, (outputs, inputs), generator=generator, dtype=torch.uint8),
        scale_OG,
        bits,
        group,
        torch.randint(0, 7, (outputs, groups), generator=generator).float() if zeros else None,
        table,
        None if ends is None else torch.tensor(ends, dtype=torch.int32),
        torch.randperm(inputs, generator=generator) if ordered else None,
        outer_O,
    )


def made(form: str, seed: int = 0) -> CodedWeight:
    outputs, inputs, words = FORMS[form]
    return coded(outputs, inputs, seed=seed, **words)


def layout(weight: CodedWeight, dtype: torch.dtype = BF16) -> CodeLayout:
    found = layout_of(weight, dtype)
    assert found is not None
    return found


def gemm(dtype: torch.dtype, planes: int) -> CodeGemm:
    found = code_gemm(dtype, planes)
    assert found is not None
    return found


def packed(weight: CodedWeight, given: CodeLayout) -> torch.Tensor:
    return gemm(BF16, 1).pack(weight, given)


def bound(weight: CodedWeight, x: torch.Tensor, planes: int) -> torch.Tensor:
    """The largest error of a product, [T, O]: of inputs that are rounded, of values of two bytes, of float32 sums (one
    rounding for each group and for each byte, less than four beside), and of the result."""
    x_TI, weight_OI = x.double(), weight.dense_OI().double()
    largest_T1 = x_TI.abs().amax(1, keepdim=True)
    step_T1 = largest_T1 / 127 if planes == 1 else largest_T1 / (2.0 ** (8 * planes - 2) * (1 - 2**-7))
    of_inputs = step_T1 / 2 * weight_OI.abs().sum(1)
    values = values_of(weight.table, weight.bits, PLANES[x.dtype])
    assert values is not None
    half_unit = values.unit / 2 if len(values.tables) > 1 else 0.0
    scale_OI = weight.wide_scale_OG.double()[:, weight.group_of_I].abs()
    of_values = half_unit * (x_TI.abs().sum(1, keepdim=True) * scale_OI.amax(1))
    if len(values.tables) == 2 and planes == 2:  # products of lower bytes are left out
        of_values += (2**7 * step_T1) * (2**7 * values.unit) * scale_OI.sum(1)
    parts_OI = weight_OI.abs()
    if weight.zero_OG is not None:
        parts_OI = parts_OI + 2 * (weight.zero_OG * weight.scale_OG).double()[:, weight.group_of_I].abs()
    if len(values.tables) > 1:
        parts_OI = parts_OI + 2 * scale_OI
    size_TO = (x_TI.abs() + step_T1) @ parts_OI.amax(1).unsqueeze(1).expand_as(parts_OI).T
    rounding = (weight.scale_OG.shape[1] * len(values.tables) + planes + 4) * 2.0**-24
    whole = x_TI @ weight_OI.T
    return of_inputs + of_values + rounding * size_TO + (2.0**-8 * whole.abs() if x.dtype is BF16 else 0)


@pytest.fixture
def kernel() -> None:
    if code_gemm(BF16, 1) is None:
        pytest.skip("needs a CPU with AVX2, and a C compiler")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """torch.empty returns NaN, and the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_the_cpu_flags_decide() -> None:
    """The kernel is there on every CPU with VNNI or AVX2: no silent fall back to the twin."""
    if ("avx512_vnni" in cpu_flags() or {"avx2", "fma"} <= cpu_flags()) and which("gcc"):
        for dtype, planes in PLANES.items():
            assert code_gemm(dtype, 1) and code_gemm(dtype, planes) and grouped_code_gemm(dtype, planes)
    assert code_gemm(torch.float16, 1) is None


@ANY_KERNEL
@DTYPES
@EACH_FORM
def test_it_equals_the_plain_product(form: str, dtype: torch.dtype, nan_in_new_memory: None) -> None:
    weight = made(form)
    bias, dense_OI = draw(len(weight.codes_OI), seed=1, dtype=dtype), weight.dense_OI().double()
    held = packed(weight, layout(weight, dtype))
    for planes in (1, PLANES[dtype]):
        for rows in (0, 1, 2, 5, 7, 13, 31, 65, 130):
            x = draw(rows, dense_OI.shape[1], seed=2, dtype=dtype)
            for given in (None, bias):
                found = gemm(dtype, planes)(layout(weight, dtype), held, x, given).double()
                added = 0 if given is None else given.double()
                expected = x.double() @ dense_OI.T + added
                most = bound(weight, x, planes) + (2.0**-8 if dtype is BF16 else 2.0**-22) * abs(added)
                assert ((found - expected).abs() <= most).all()


@ANY_KERNEL
@EACH_FORM
def test_one_byte_inputs_are_those_of_the_twin(form: str) -> None:
    """Against inputs that are rounded alike, only float32 sums and values of two bytes are left."""
    weight, x = made(form), draw(9, FORMS[form][1], seed=3, dtype=FP32)
    code_TI, scale_T1 = quantize_inputs(x)
    rounded = code_TI.double() * scale_T1.double()
    found = gemm(FP32, 1)(layout(weight, FP32), packed(weight, layout(weight, FP32)), x, None).double()
    error = (found - rounded @ weight.dense_OI().double().T).abs()
    assert (error <= bound(weight, rounded.float(), 3) + 2.0**-23 * found.abs()).all()


@ANY_KERNEL
def test_sums_of_integers_are_exact() -> None:
    """Inputs that are integers, the largest 127, times scales that are powers of two: nothing is rounded."""
    weight = coded(64, 512, group=128, table=SYMMETRIC)
    weight.scale_OG.fill_(2.0**-3)
    x = torch.randint(-127, 128, (5, 512), generator=torch.Generator().manual_seed(0)).float()
    x[:, 7] = 127
    expected = x.double() @ weight.dense_OI().double().T
    for planes in (1, 3):
        assert torch.equal(
            gemm(FP32, planes)(layout(weight), packed(weight, layout(weight)), x, None).double(), expected
        )


@ANY_KERNEL
@EACH_FORM
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(form: str, threads: None) -> None:
    weight, x = made(form), draw(150, FORMS[form][1], seed=1)
    held = packed(weight, layout(weight))
    for planes in (1, 2):
        whole = gemm(BF16, planes)(layout(weight), held, x, None)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(gemm(BF16, planes)(layout(weight), held, x, None), whole)
            for part in (slice(0, 1), slice(7, 12), slice(140, 150), slice(30, 150)):
                assert torch.equal(gemm(BF16, planes)(layout(weight), held, x[part], None), whole[part])


@ANY_KERNEL
def test_rows_may_lie_apart() -> None:
    weight, wide = made("own order"), draw(4, 700, seed=1)
    held = packed(weight, layout(weight))
    for part in (wide[:, 8:264], wide[:, ::2][:, :256]):
        found = gemm(BF16, 2)(layout(weight), held, part, None)
        assert torch.equal(found, gemm(BF16, 2)(layout(weight), held, part.contiguous(), None))


@ANY_KERNEL
@DTYPES
def test_numbers_that_are_none_stay_none(dtype: torch.dtype) -> None:
    for form in ("int4 by 32", "E2M1", "NF4", "own order"):
        weight, x = made(form), draw(3, FORMS[form][1], seed=1, dtype=dtype)
        x[0, 3], x[1, 5] = float("nan"), float("inf")
        for planes in (1, PLANES[dtype]):
            y = gemm(dtype, planes)(layout(weight, dtype), packed(weight, layout(weight, dtype)), x, None)
            assert y[0].isnan().all() and not y[1].isfinite().any() and y[2].isfinite().all()


@ANY_KERNEL
def test_a_cpu_without_byte_permutes_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cascade Lake: VNNI without VBMI, whose tables are looked up by another instruction."""
    source = Path(cpu_build.__file__).parent / "src" / "cpu_code_gemm.c"
    flags = [*cpu_build.FLAGS, "-mno-avx512vbmi", "-mno-avx512bf16", "-DELEMENT=1", "-DSTORED=0"]
    subprocess.run([str(cpu_build._compiler()), *flags, str(source), "-o", f"{tmp_path}/x.so", "-lm"], check=True)
    older = ctypes.CDLL(f"{tmp_path}/x.so")
    monkeypatch.setattr(cpu_code_gemm, "cpu_code_library", lambda dtype: older)
    for form in ("int4 by 128", "NF4", "8 bits", "own order, ragged"):
        weight, x = made(form), draw(20, FORMS[form][1])
        other = code_gemm.__wrapped__(BF16, 2)
        assert other is not None
        held = packed(weight, layout(weight))
        assert torch.equal(other(layout(weight), held, x, None), gemm(BF16, 2)(layout(weight), held, x, None))


@ANY_KERNEL
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.words} {scheme.group}")
@DTYPES
def test_methods_are_those_of_the_twin(scheme: Coded, dtype: torch.dtype) -> None:
    """Same bytes as the planner counts, same products."""
    weight = Param(name="x.weight", shape=(80, 200), role="x", source=Source(("x",)), merge="x", scheme=scheme)
    method, twin = (make((weight,), ALONE) for make in (code_methods(dtype, scheme), CodedMethod))
    assert isinstance(method, CpuCodedMethod)
    dense_OI, bias_O, x = draw(80, 200), draw(80, seed=1, dtype=dtype), draw(9, 200, seed=2, dtype=dtype)
    for each in (method, twin):
        each.take(dense_OI, bias_O)
    assert method.nbytes == twin.nbytes == weight.held_bytes(ALONE.mesh, dtype.itemsize)
    found, expected = method.apply(x).float(), twin.apply(x).float()
    ulp, noise = (2.0**-7, 2.0**-12) if dtype is BF16 else (1e-5, 2e-5)
    torch.testing.assert_close(found, expected, rtol=ulp, atol=noise * 200**0.5)


def test_other_weights_stay_with_torch() -> None:
    fp8, wide = Coded(Codes.E4M3, bits=8, group=None), Coded()
    for scheme, inputs in ((fp8, 64), (wide, 2**16 + 8)):
        weight = Param(name="x.weight", shape=(8, inputs), role="x", source=Source(("x",)), merge="x", scheme=scheme)
        assert type(code_methods(BF16, scheme)((weight,), ALONE)) is CodedMethod


def test_what_it_does_not_multiply_is_said() -> None:
    fp8 = torch.arange(256.0) ** 1.5
    assert layout_of(coded(8, 64, group=32, bits=8, table=fp8), BF16) is None
    assert layout_of(coded(8, 2**16 + 8, group=128), BF16) is None
    small = torch.tensor([0.1, 0.3, 0.7, 0.2] * 4)
    for most in (2, 3):
        values = values_of(small, 4, most)
        assert values is not None and len(values.tables) == most


@ANY_KERNEL
def test_weights_of_one_shape_have_room_of_one_size() -> None:
    """Wherever groups end, so that the layers of a model can take turns in one buffer."""
    rooms = {layout(coded(64, 100, ends=ends)).room for ends in ([10, 20, 100], [1, 2, 100], [0, 100, 100])}
    assert len(rooms) == 1
    weight = coded(64, 100, ends=[1, 2, 100], ordered=True)
    assert layout(weight).nbytes == 64 * (50 + 3 * 4) + 4 * (100 + 3) < len(packed(weight, layout(weight)))


@ANY_KERNEL
@DTYPES
@pytest.mark.parametrize("form", ["int4 by 32", "NF4", "zeros, groups of 20", "own order", "own order, ragged"])
def test_experts_have_the_bits_of_single_weights(form: str, dtype: torch.dtype, threads: None) -> None:
    experts, top_k, tokens = 5, 2, 40
    weights = [made(form, seed=seed) for seed in range(experts)]
    form_layout = layout(weights[0], dtype)
    held_E = torch.stack([packed(weight, form_layout) for weight in weights])
    bias_EO = draw(experts, form_layout.outputs, seed=7, dtype=dtype)
    expert_P = torch.tensor([0, 2, 3, 2, 4, 4, 4, 0] * (tokens * top_k // 8))  # none for 1
    order_P = expert_P.argsort(stable=True).int()
    ends_E = torch.bincount(expert_P, minlength=experts).cumsum(0).int()
    groups = Groups(order_P, order_P.argsort().int(), ends_E, top_k)
    for planes in (1, PLANES[dtype]):
        multiply = grouped_code_gemm(dtype, planes)
        assert multiply is not None
        for count in (1, 3):
            torch.set_num_threads(count)
            x_TI = draw(tokens, form_layout.inputs, seed=8, dtype=dtype)
            x_PI = x_TI[order_P.long() // top_k]
            found = multiply(form_layout, held_E, x_TI, bias_EO, groups, gathers=True)
            assert torch.equal(multiply(form_layout, held_E, x_PI, bias_EO, groups, gathers=False), found)
            for expert in expert_P.unique().tolist():
                own = slice(int(ends_E[expert - 1]) if expert else 0, int(ends_E[expert]))
                alone = gemm(dtype, planes)(form_layout, held_E[expert], x_PI[own], bias_EO[expert])
                assert torch.equal(found[own], alone)
