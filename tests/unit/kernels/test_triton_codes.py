"""Triton's products with codes against their torch twins: in its interpreter, and on a CUDA device where one is.

As in test_triton_lora.py, the tests run in a process of their own, with new memory full of NaN.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import ExpertParams
from tandem.parallel.linear_methods import LinearMethod, as_given
from tandem.parallel.params import Param, Scheme, Source
from tandem.parallel.quantization.code_tables import table_of
from tandem.parallel.quantization.coded import CodedMethod
from tandem.parallel.quantization.coded_weight import CodedWeight
from tandem.parallel.quantization.int8 import Int8Method, W8A8Method, quantize_inputs
from tandem.parallel.quantization.schemes import Coded, Codes, Inputs, Int8Rows
from tandem.workers.kernels.expert_ops import TorchExperts
from tests.support.decode_work import small_work
from tests.support.interpreted import DEVICE, computes, run_in_interpreter, starts
from tests.support.interpreted_bf16 import computes_bf16

pytest.importorskip("triton")

ONE = ParallelContext.single()
NEAR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The most by which results may differ, beside the largest number: sums in another order, and the dtype's rounding."""
FORMS: dict[str, Scheme] = {
    "int4": Coded(),
    "int4-32-zeros": Coded(group=32, zeros=True),
    "int4-64-zeros": Coded(group=64, zeros=True),
    "int4-row": Coded(group=None),
    "int4-row-zeros": Coded(group=None, zeros=True),
    "int3-40-zeros": Coded(bits=3, group=40, zeros=True),
    "int2-16": Coded(bits=2, group=16),
    "nf4": Coded(Codes.NF4, group=64),
    "fp4-odd": Coded(Codes.FP4, group=24),
    "e2m1-16": Coded(Codes.E2M1, group=16),
    "e2m1-16-narrow": Coded(Codes.E2M1, group=16, narrow=True),
    "e2m1-32": Coded(Codes.E2M1, group=32),
    "int8-128-zeros": Coded(bits=8, zeros=True),
    "int5-48": Coded(bits=5, group=48),
    "e4m3-row": Coded(Codes.E4M3, 8, None),
    "e4m3-128": Coded(Codes.E4M3, 8, 128),
    "w4a8": Coded(inputs=Inputs.INT8),
    "int8": Int8Rows(),
    "w8a8": Int8Rows(Inputs.INT8),
}
TWINS: dict[type[Any], Any] = {Coded: CodedMethod, Int8Rows: Int8Method}


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    computes_bf16(monkeypatch)
    with small_work(monkeypatch):
        yield


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def param(*shape: int, scheme: Scheme | None = None) -> Param:
    return Param(name="x.weight", shape=shape, role="x", source=Source(("x.weight",)), merge="x", scheme=scheme)


def kernels(dtype: torch.dtype, scheme: Scheme | None) -> Any:
    """What makes the kernel's methods, of a device with few multiprocessors."""
    from tandem.workers.kernels.triton.codes.scheme_methods import SchemeMethods
    from tandem.workers.kernels.triton.triton_attention import H100, Multiprocessors

    assert scheme is not None
    return SchemeMethods(DEVICE, Multiprocessors(2, H100.shared_bytes), has_triton=True).methods(dtype, scheme)


def twins(scheme: Scheme | None) -> Any:
    if scheme == Int8Rows(Inputs.INT8):
        return W8A8Method
    return TWINS[type(scheme)]


def check_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype is dtype and not found.isnan().any()
    apart = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
    assert apart <= NEAR[dtype], apart


def check_product(name: str, dtype: torch.dtype, outputs: int, inputs: int, rows: tuple[int, ...]) -> None:
    scheme = FORMS[name]
    weight, bias_O = param(outputs, inputs, scheme=scheme), noise(outputs, dtype=dtype)
    made: list[LinearMethod] = [make((weight,), ONE) for make in (twins(scheme), kernels(dtype, scheme))]
    for method in made:
        method.take(noise(outputs, inputs), bias_O)
    assert (
        made[0].nbytes == made[1].nbytes == sum(part.num_elements * _bits(part) for part in scheme.parts(weight)) // 8
    )
    for count in rows:
        x_TI = noise(count, inputs + 24, dtype=dtype)[:, 8:-16]
        expected, found = (method.apply(x_TI) for method in made)
        check_near(found, expected, dtype)


def _bits(part: Param) -> int:
    return {"int4": 4, "int8": 8, "uint8": 8, "int32": 32, "float32": 32}[str(part.dtype)]


@computes
@pytest.mark.parametrize("name", FORMS)
def test_products_are_those_of_the_twin(name: str) -> None:
    """Few rows, whose inputs are split, and more than a tile has; outputs and inputs that tiles and steps do not
    divide."""
    check_product(name, torch.float32, 38, 280, (1, 35))


@computes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    check_product(name, dtype, 72, 336, (3, 20, 40))


@computes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_of_one_form(dtype: torch.dtype) -> None:
    check_product("int4-64-zeros", dtype, 72, 320, (2, 20))


@computes
def test_a_row_has_the_same_bits_alone_and_with_others() -> None:
    method = kernels(torch.float16, Coded())((param(48, 1024, scheme=Coded()),), ONE)
    method.take(noise(48, 1024), None)
    x_TI = noise(16, 1024, dtype=torch.float16)
    together = method.apply(x_TI)
    assert all(torch.equal(method.apply(x_TI[:rows]), together[:rows]) for rows in (1, 9))
    assert method.apply(x_TI[:0]).shape == (0, 48)


@computes
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_groups_that_end_anywhere_and_inputs_in_an_order(bits: int, dtype: torch.dtype) -> None:
    """As a rank has them of GPTQ with act-order: some groups are empty, some have one input. Then ones of whole
    groups, which need no list."""
    outputs, inputs, scheme = 40, 200, Coded(bits=bits, group=32, zeros=True, ordered=True)
    generator = torch.Generator().manual_seed(bits)
    order_I = torch.randperm(inputs, generator=generator)
    codes_OI = torch.randint(2**bits, (outputs, inputs), generator=generator).to(torch.uint8)
    for ends in ([0, 1, 50, 50, 63, 190, 200], [32, 64, 96, 128, 160, 192, 200]):
        scale_OG = torch.rand(outputs, 7, generator=generator) + 0.1
        zero_OG = torch.randint(2**bits, (outputs, 7), generator=generator).float()
        parts: Any = (codes_OI, scale_OG, bits, 32, zero_OG, None, torch.tensor(ends, dtype=torch.int32), order_I)
        weight = CodedWeight(*(part.to(DEVICE) if isinstance(part, torch.Tensor) else part for part in parts))
        made = (
            CodedMethod((param(outputs, inputs, scheme=scheme),), ONE),
            kernels(dtype, scheme)((param(outputs, inputs, scheme=scheme),), ONE),
        )
        for method in made:
            method.take_coded(weight, None)
        x_TI = noise(5, inputs, dtype=dtype)
        check_near(made[1].apply(x_TI), made[0].apply(x_TI), dtype)


def experts_of(
    dtype: torch.dtype, schemes: tuple[Scheme, ...], *, biased: bool, tokens: int
) -> list[list[torch.Tensor]]:
    """Products of three of six experts, by the kernel and by the twin: a row per token and a row per pair."""
    from tandem.workers.kernels.triton.codes.triton_coded import code_experts
    from tandem.workers.kernels.triton.triton_experts import TritonExperts

    inputs, here, top_k = 160, range(2, 5), 2

    def make(of: Any) -> Any:
        from tandem.parallel.quantization.side_by_side import by_scheme

        return by_scheme(of)

    ours = make(partial(kernels, dtype))
    expert_TK = torch.rand(tokens, 6, generator=torch.Generator().manual_seed(tokens)).topk(top_k).indices.to(DEVICE)
    weights = tuple(param(24, inputs, scheme=scheme) for scheme in schemes)
    one, found = ExpertParams(weights, tuple(param(24) for _ in schemes) if biased else ()), []
    for ops in (
        TritonExperts(ours, as_given, DEVICE, None, partial(code_experts, dtype, ours)),
        TorchExperts(make(twins), as_given, DEVICE),
    ):
        method, groups = (
            ops.method([one] * len(here), ONE),
            ops.group(expert_TK, here, torch.zeros(6, dtype=torch.int64, device=DEVICE)),
        )
        for slot in method.slots():
            parts = [noise(*p.shape, dtype=torch.float32 if len(p.shape) == 2 else dtype) for p in slot.params]
            slot.accept(torch.cat(parts))
        rows = int(groups.ends_E[-1])
        found.append(
            [
                method.apply(noise(tokens, inputs, dtype=dtype), groups, gathers=True)[:rows],
                method.apply(noise(tokens * top_k, inputs, dtype=dtype), groups, gathers=False)[:rows],
            ]
        )
    assert len(found[0][0]) and len(expert_TK)
    return found


@computes
@pytest.mark.parametrize(
    ("dtype", "schemes", "biased", "tokens"),
    [
        (torch.float32, (Coded(Codes.E2M1, group=32),), True, 3),
        (torch.float32, (Coded(group=32, zeros=True), Coded(group=32, zeros=True)), False, 40),
        (torch.float32, (Coded(group=40, ordered=True), Coded(group=40, ordered=True)), False, 3),
        (torch.float32, (Coded(Codes.E2M1, group=16, narrow=True),) * 2, False, 3),
        (torch.float16, (Int8Rows(),), False, 3),
        (torch.float32, (Int8Rows(Inputs.INT8), Coded(group=40, inputs=Inputs.INT8)), True, 3),
        (torch.float16, (Coded(Codes.E4M3, 8, 32),), False, 60),
    ],
    ids=["e2m1", "merged", "ordered", "narrow", "int8", "mixed", "e4m3"],
)
def test_experts_are_those_of_the_twin(
    dtype: torch.dtype, schemes: tuple[Scheme, ...], biased: bool, tokens: int
) -> None:
    found, expected = experts_of(dtype, schemes, biased=biased, tokens=tokens)
    for ours, twin in zip(found, expected, strict=True):
        check_near(ours, twin, dtype)


@computes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_are_rounded_as_by_the_twin(dtype: torch.dtype) -> None:
    """To int8 as quantize_inputs() does, to E4M3 as torch does; rows of zeros, and of a NaN."""
    from tandem.workers.kernels.triton.codes.triton_code_inputs import rounded_to_e4m3, rounded_to_int8

    x_TI = noise(5, 1100, dtype=dtype)
    x_TI[1], x_TI[2, 3] = 0, float("nan")
    (codes, of_row), (expected, scale) = rounded_to_int8(x_TI), quantize_inputs(x_TI)
    torch.testing.assert_close(codes.float(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(of_row[:, None], scale, equal_nan=True)
    floats, of_row = rounded_to_e4m3(x_TI)
    wanted = (x_TI.float() * (448 / x_TI.float().abs().amax(1, keepdim=True))).to(torch.float8_e4m3fn).float()
    wanted[1:3] = 0
    wanted[2, 3] = float("nan")
    torch.testing.assert_close(floats.float(), wanted, rtol=0, atol=0, equal_nan=True)
    assert bool(of_row[2].isnan()) and float(of_row[0]) == pytest.approx(float(x_TI[0].float().abs().max()) / 448)


@computes
def test_many_rows_of_fp8_are_rounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch._scaled_mm, which a small product has tried; few rows, odd outputs and blocks stay with the kernel."""
    from tandem.workers.kernels.triton.codes import triton_coded
    from tandem.workers.kernels.triton.codes.scheme_methods import fp8_obstacle

    assert fp8_obstacle(DEVICE) is None
    scheme, dtype, calls = Coded(Codes.E4M3, 8, None, inputs=Inputs.FP8), torch.bfloat16, []
    product = triton_coded.multiply_fp8
    monkeypatch.setattr(triton_coded, "multiply_fp8", lambda x, *rest: calls.append(len(x)) or product(x, *rest))
    for outputs, of, many in ((48, scheme, True), (40, scheme, False), (48, replace(scheme, group=32), False)):
        method = kernels(dtype, of)((param(outputs, 256, scheme=of),), ONE)
        twin = CodedMethod((param(outputs, 256, scheme=of),), ONE)
        for one in (method, twin):
            one.take(noise(outputs, 256), noise(outputs, dtype=dtype))
        calls.clear()  # of the product that tries it
        for rows in (16, 17):
            x_TI = noise(rows, 256, dtype=dtype)
            found = method.apply(x_TI)
            if is_rounded := many and rows > 16:
                scale_T1 = x_TI.float().abs().amax(1, keepdim=True) / 448
                x_TI = (x_TI.float() / scale_T1).to(torch.float8_e4m3fn).float() * scale_T1
            check_near(found, twin.apply(x_TI).to(dtype), dtype)
            assert calls == [17] * is_rounded
            calls.clear()
    monkeypatch.setattr(triton_coded, "rounded_to_e4m3", lambda x: (x.to(torch.float8_e4m3fn), torch.zeros(len(x))))
    assert "is off by" in str(fp8_obstacle(DEVICE))
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: 1 / 0)
    assert fp8_obstacle(DEVICE) == "ZeroDivisionError: division by zero"


@computes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_each_code_has_its_value(dtype: torch.dtype) -> None:
    """All codes of bytes and of nibbles, next to each other, by products with the unit matrix."""
    inputs = 256
    for scheme in (Coded(Codes.E4M3, 8, None), Coded(bits=8, group=None), Coded(bits=8, group=None, zeros=True),
                   Coded(group=None), Coded(Codes.E2M1, group=None), Coded(Codes.NF4, group=None)):  # fmt: skip
        codes_OI = (torch.arange(inputs).repeat(2, 1) % 2**scheme.bits).to(torch.uint8)
        if scheme.codes is Codes.E4M3:
            codes_OI[codes_OI % 128 == 127] = 0  # which are no numbers
        table, scale = table_of(scheme), torch.ones(2, 1)
        zero = torch.full((2, 1), 3.0) if scheme.zeros else None
        weight = CodedWeight(codes_OI, scale, scheme.bits, inputs, zero, table)
        method = kernels(dtype, scheme)((param(2, inputs, scheme=scheme),), ONE)
        on_device = CodedWeight(
            codes_OI.to(DEVICE), scale.to(DEVICE), scheme.bits, inputs, None if zero is None else zero.to(DEVICE),
            None if table is None else table.to(DEVICE),
        )  # fmt: skip
        method.take_coded(on_device, None)
        unit_TI = torch.eye(inputs, dtype=dtype, device=DEVICE)
        assert torch.equal(method.apply(unit_TI).T.cpu(), weight.values_OI().to(dtype)), scheme
