"""The compiled operations of a mixture of experts against their torch twins: routing, sorting, products, sums."""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import EachExpert, ExpertMethod, ExpertParams, Groups, StackedExperts
from tandem.parallel.linear_methods import Arrive, Place, as_given
from tandem.parallel.params import Param, Scheme, Source
from tandem.parallel.quantization.schemes import Coded, Codes, Inputs, Int8Rows
from tandem.workers.kernels.cpu.cpu_build import cpu_experts_library
from tandem.workers.kernels.cpu.cpu_experts import CpuExperts
from tandem.workers.kernels.expert_ops import ExpertOps, RouterWeights, TorchExperts
from tandem.workers.models.spec.arch import Activation, ExpertGroups, Moe, Scoring
from tandem.workers.platforms.cpu import CpuPlatform

BF16 = torch.bfloat16
ALONE = ParallelContext.single()
DTYPES = pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "float32"])
CODED = Coded(group=64), Coded(Codes.NF4, group=32, inputs=Inputs.INT8), Coded(group=128, zeros=True)
FORMS = pytest.mark.parametrize("form", [None, *map(Int8Rows, Inputs), *CODED], ids=lambda form: form and form.words)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    if not hasattr(cpu_experts_library(BF16), "grouped_gemm"):
        pytest.skip("needs a CPU that multiplies pairs of bf16, and a C compiler")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def experts_of(
    count: int, outputs: int, inputs: int, *, biased: bool = False, form: Scheme | None = None
) -> list[ExpertParams]:
    def param(name: str, *shape: int) -> Param:
        scheme = form if len(shape) == 2 else None
        return Param(name=name, shape=shape, role="x", source=Source((name,)), merge="x", scheme=scheme)

    biases = (param("x.bias", outputs),) if biased else ()
    return [ExpertParams((param("x.weight", outputs, inputs),), biases) for _ in range(count)]


def ops_of(dtype: torch.dtype, place: Place = as_given) -> tuple[ExpertOps, TorchExperts]:
    """The kernels, and their twin."""
    platform = CpuPlatform()
    ops = platform.experts(dtype, place)
    assert isinstance(ops, CpuExperts)
    return ops, TorchExperts(partial(platform.linear, dtype=dtype), as_given)


def loaded(
    ops: ExpertOps,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
    form: Scheme | None = None,
) -> ExpertMethod:
    method = ops.method(experts_of(len(weights), *weights[0].shape, biased=bool(biases), form=form), ALONE)
    given = [tensor for pair in zip(biases, weights, strict=True) for tensor in pair] if biases else weights
    for slot, tensor in zip(method.slots(), given, strict=True):
        slot.accept(tensor)
    return method


def chosen(tokens: int, experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).topk(top_k).indices


def grouped(ops: ExpertOps, expert_TK: torch.Tensor, here: range) -> Groups:
    return ops.group(expert_TK, here, torch.zeros(int(expert_TK.max()) + here.stop + 1, dtype=torch.int64))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@DTYPES
@pytest.mark.parametrize(
    "spec",
    [
        Moe(13, 3, 32, Activation.SILU),
        Moe(13, 3, 32, Activation.SILU, scoring=Scoring.TOP_SOFTMAX, scale=2.5),
        Moe(16, 4, 32, Activation.SILU, renormalize=False),
        Moe(16, 4, 32, Activation.SILU, scoring=Scoring.SIGMOID, groups=ExpertGroups(4, 2, 2), scale=2.5),
    ],
    ids=["softmax", "top", "plain", "groups"],
)
def test_routes_are_those_of_the_twin(spec: Moe, dtype: torch.dtype) -> None:
    ops, twin = ops_of(dtype)
    router = RouterWeights(
        draw(spec.num_experts, 96, dtype=torch.float32) / 10, draw(spec.num_experts, seed=1, dtype=torch.float32),
        draw(spec.num_experts, seed=2, dtype=torch.float32) / 10,
    )  # fmt: skip
    for weights in (router, RouterWeights(router.weight_EH)):
        for tokens in (1, 3, 4, 70):
            x = draw(tokens, 96, seed=tokens, dtype=dtype)
            found, expected = ops.route(x, weights, spec), twin.route(x, weights, spec)
            assert torch.equal(found[1], expected[1])
            torch.testing.assert_close(found[0], expected[0], rtol=2e-5, atol=1e-6)
            alone = ops.route(x[-1:], weights, spec)
            assert torch.equal(alone[0][0], found[0][-1]) and torch.equal(alone[1][0], found[1][-1])


def test_pairs_are_sorted_by_expert_and_counted() -> None:
    ops, twin = ops_of(BF16)
    expert_TK, loads = chosen(50, 12, 3), [torch.zeros(12, dtype=torch.int64) for _ in range(2)]
    for here in (range(12), range(4, 8), range(8, 12)):
        found, expected = ops.group(expert_TK, here, loads[0]), twin.group(expert_TK, here, loads[1])
        assert all(torch.equal(a, b) for a, b in zip(found[:3], expected[:3], strict=True)) and found.top_k == 3
    assert torch.equal(loads[0], loads[1]) and int(loads[0].sum()) == 3 * 50 * 3


@FORMS
@DTYPES
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (33, 172), (192, 576)])
def test_products_are_those_of_each_expert(outputs: int, inputs: int, dtype: torch.dtype, form: Scheme | None) -> None:
    """For experts without tokens, with few and with more than a group of rows, those of other ranks left out."""
    ops, twin = ops_of(dtype)
    weights = [draw(outputs, inputs, seed=seed, dtype=dtype) for seed in range(4)]
    biases = [draw(outputs, seed=seed, dtype=dtype) for seed in range(4)]
    for given in ((), biases):
        method, reference = loaded(ops, weights, given, form), loaded(twin, weights, given, form)
        assert isinstance(method, StackedExperts) and isinstance(reference, EachExpert)
        for tokens, here in ((1, range(4)), (7, range(2, 6)), (100, range(4)), (200, range(4, 8))):
            groups = grouped(ops, chosen(tokens, 6, 2), here)
            rows = int(groups.ends_E[-1])
            x_TI, x_PI = draw(tokens, inputs, seed=5, dtype=dtype), draw(2 * tokens, inputs, seed=6, dtype=dtype)
            for x, gathers in ((x_TI, True), (x_PI, False)):
                found = method.apply(x, groups, gathers=gathers)[:rows].float()
                expected = reference.apply(x, groups, gathers=gathers)[:rows].float()
                ulp, noise = (2**-7, 2**-11) if dtype is BF16 else (1e-5, 1e-5)
                torch.testing.assert_close(found, expected, rtol=ulp, atol=noise * inputs**0.5)


@DTYPES
def test_outputs_are_added_by_their_weights(dtype: torch.dtype) -> None:
    ops, twin = ops_of(dtype)
    for tokens, here in ((1, range(6)), (70, range(2, 4))):
        expert_TK = chosen(tokens, 6, 3)
        groups = grouped(ops, expert_TK, here)
        y, weight = draw(3 * tokens, 48, dtype=dtype), torch.rand(tokens, 3)
        y[groups.ends_E[-1] :] = float("nan")  # what no expert here has computed
        base, gate = draw(tokens, 48, seed=1, dtype=dtype), draw(tokens, 1, seed=2, dtype=dtype)
        for given in ((None, None), (base, None), (base, gate)):
            found, expected = ops.combine(y, weight, groups, *given), twin.combine(y, weight, groups, *given)
            torch.testing.assert_close(found, expected, rtol=2**-7 if dtype is BF16 else 1e-5, atol=1e-6)


@FORMS
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(form: Scheme | None, threads: None) -> None:
    method = loaded(ops_of(BF16)[0], [draw(320, 256, seed=seed) for seed in range(3)], form=form)
    ops, x, expert_TK = ops_of(BF16)[0], draw(150, 256, seed=9), chosen(150, 3, 1)
    groups = grouped(ops, expert_TK, range(3))
    whole = method.apply(x, groups, gathers=True)[groups.place_P]
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        for some in (slice(0, 150), slice(7, 8), slice(40, 130)):
            groups = grouped(ops, expert_TK[some], range(3))
            assert torch.equal(method.apply(x[some], groups, gathers=True)[groups.place_P], whole[some])


@FORMS
@DTYPES
def test_experts_without_tokens_are_not_read(form: Scheme | None, dtype: torch.dtype) -> None:
    """Their pages are made unreadable: a read would end the process."""
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    held: list[torch.Tensor] = []

    def place(stack: torch.Tensor) -> tuple[torch.Tensor, Arrive | None]:
        page, size = mmap.PAGESIZE, stack[0].nbytes
        assert size % page == 0, "whole pages, so that no expert shares one"
        room = torch.frombuffer(mmap.mmap(-1, stack.nbytes), dtype=torch.uint8)
        moved = room.view(stack.dtype).view(stack.shape).copy_(stack)
        held.append(moved)
        return moved, None

    inputs = 4092 if isinstance(form, Int8Rows) else 4096  # scales of 64 outputs are 256 bytes
    if isinstance(form, Coded):
        form = replace(form, group=4)  # the ends of 1024 groups are a page
    ops, _ = ops_of(dtype, place)
    method = loaded(ops, [draw(64, inputs, seed=seed, dtype=dtype) for seed in range(5)], form=form)
    groups = grouped(ops, torch.tensor([[1], [3], [1]]), range(5))
    x = draw(3, inputs, seed=7, dtype=dtype)
    expected = method.apply(x, groups, gathers=True)
    base, size = held[0].data_ptr(), held[0][0].nbytes
    for unread in (0, 2, 4):
        assert protect(ctypes.c_void_p(base + unread * size), ctypes.c_size_t(size), 0) == 0
    try:
        assert torch.equal(method.apply(x, groups, gathers=True), expected)
    finally:
        for unread in (0, 2, 4):
            protect(ctypes.c_void_p(base + unread * size), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE)


@DTYPES
def test_numbers_that_are_none_stay_none(dtype: torch.dtype) -> None:
    ops, _ = ops_of(dtype)
    x = draw(3, 64, dtype=dtype)
    x[1, 3] = float("nan")
    method = loaded(ops, [draw(64, 64, seed=seed, dtype=dtype) for seed in range(2)])
    weights, experts = ops.route(x, RouterWeights(draw(2, 64, dtype=torch.float32)), Moe(2, 2, 64, Activation.SILU))
    assert set(experts[1].tolist()) == {0, 1}
    groups = grouped(ops, experts, range(2))
    out = ops.combine(method.apply(x, groups, gathers=True), weights, groups)
    assert out[1].isnan().all() and out[0].isfinite().all() and out[2].isfinite().all()


def test_weights_in_an_order_of_their_own_stay_apart() -> None:
    """Merged ones have an order each, and no product of experts; a single one has."""
    ops, _ = ops_of(BF16)
    ordered = Coded(group=32, ordered=True)
    (gate, _), *_ = alone = experts_of(2, 8, 64, form=ordered)
    assert isinstance(ops.method(alone, ALONE), StackedExperts)
    assert isinstance(ops.method([ExpertParams((*gate, *gate), ())] * 2, ALONE), EachExpert)


def test_what_it_does_not_read_stays_with_the_twin() -> None:
    ops, _ = ops_of(BF16)
    library = cpu_experts_library(BF16)
    assert library is not None
    pairs = ctypes.c_int.in_dll(library, "grouped_together").value == 2  # else 33 inputs are no odd ones
    assert isinstance(ops.method(experts_of(2, 8, 33), ALONE), EachExpert) == pairs
    half = CpuPlatform().experts(torch.float16)
    assert isinstance(half, TorchExperts)
