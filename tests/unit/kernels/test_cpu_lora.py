"""Grouped LoRA on CPUs, compiled and twin, against dense products in float64; other values stay unchanged."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tandem.workers.kernels.cpu.cpu_build import cpu_lora_library
from tandem.workers.kernels.cpu.cpu_lora import CpuLora, split_work
from tandem.workers.kernels.lora_ops import LoraOps, TorchLora
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.lora_layers import LoraLayer, check_close, make_layer, noise, rows_of
from tests.support.pairwise import all_pairs

CPU = torch.device("cpu")
DTYPES, KINDS = (torch.float32, torch.bfloat16, torch.float16), ("twin", "compiled")
RANKS = [4, 8, 16, 64, 3, 1, 0, 21]
RUN = 32
"""Tokens from which the compiled one goes through matmuls here, as the twin does."""
PROMPT = RUN + 9
MIXED = [0, -1, 1, 2, 3, 3, 3, -1, *[4] * 6, 5, 6, 0, 7, *[3] * PROMPT, -1, *[1] * PROMPT, 0, *[6] * PROMPT]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


PARALLEL_ELEMENTS = 2**20
"""As in cpu_lora.c."""


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=KINDS)
def ops(request: pytest.FixtureRequest, dtype: torch.dtype) -> LoraOps:
    if request.param == "twin":
        return TorchLora()
    return compiled(dtype)


def compiled(dtype: torch.dtype) -> CpuLora:
    library = cpu_lora_library(dtype)
    if library is None:
        pytest.skip("no C compiler, or not compiled for this type")
    return CpuLora(library, RUN)


def merged(dtype: torch.dtype, inputs: int = 112, outputs: tuple[int, ...] = (272, 64, 48), gap: int = 16) -> LoraLayer:
    """q, k and v; each projection in other slots with other ranks."""
    ranks = [RANKS[shift:] + RANKS[:shift] for shift in range(len(outputs))]
    return make_layer(inputs, outputs, ranks, dtype, gap=gap)


def elements(layer: LoraLayer, slots: list[int]) -> int:
    """Returns the elements of A and B that a step reads, tile by tile."""
    tiles = split_work(rows_of(slots).segments, RUN).tiles.tolist()
    return sum(int(s.ranks[slot]) * (s.inputs + s.outputs) for s in layer.projections for _, _, slot in tiles)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bytes: -0.0 is not 0.0, and a NaN is itself."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_mixed_ranks_and_runs_add_their_products(ops: LoraOps, dtype: torch.dtype) -> None:
    """Single tokens, short runs, prompts, tokens of one adapter apart, and none, in one step."""
    layer = merged(dtype)
    x = noise(len(MIXED), 112, dtype=dtype)
    y = noise(len(MIXED), layer.width, dtype=dtype, seed=2)
    expected = layer.expected(y, x, MIXED)
    ops.add(y, x, layer.slab, layer.projections, rows_of(MIXED))
    check_close(y, expected)


@pytest.mark.parametrize(
    ("dtype", "ops", "tokens"),
    all_pairs(DTYPES, KINDS, (1, 2, 3, 4, 5, 8, RUN - 1, RUN, 3 * RUN)),
    ids=str,
    indirect=("dtype", "ops"),
)
def test_any_number_of_tokens_of_one_adapter(ops: LoraOps, dtype: torch.dtype, tokens: int) -> None:
    layer = merged(dtype)
    x, y = noise(tokens, 112, dtype=dtype), torch.zeros(tokens, layer.width, dtype=dtype)
    expected = layer.expected(y, x, [3] * tokens)
    ops.add(y, x, layer.slab, layer.projections, rows_of([3] * tokens))
    check_close(y, expected)


def test_whatever_has_no_adapter_keeps_its_bits(ops: LoraOps, dtype: torch.dtype) -> None:
    """Tokens without an adapter, columns between projections, unchanged projections; -0.0 and NaN among them."""
    layer = merged(dtype)
    x, y = noise(len(MIXED), 112, dtype=dtype), noise(len(MIXED), layer.width, dtype=dtype, seed=2)
    y[:, ::3] = -0.0
    untouched = torch.ones(y.shape, dtype=torch.bool)
    for projection, adapters in zip(layer.projections, layer.adapters, strict=True):
        own = [slot >= 0 and adapters[slot] is not None for slot in MIXED]
        untouched[torch.tensor(own), projection.start : projection.start + projection.outputs] = False
    y[untouched.nonzero()[::7].unbind(1)] = float("nan")
    before = y.clone()
    ops.add(y, x, layer.slab, layer.projections, rows_of(MIXED))
    assert same_bits(y[untouched], before[untouched])
    assert not (y[~untouched] == before[~untouched]).all()


@pytest.mark.parametrize("slots", [[], [-1], [-1] * PROMPT], ids=len)
def test_a_step_without_adapters_changes_nothing(ops: LoraOps, dtype: torch.dtype, slots: list[int]) -> None:
    layer = merged(dtype)
    x, y = noise(len(slots), 112, dtype=dtype), noise(len(slots), layer.width, dtype=dtype)
    before = y.clone()
    ops.add(y, x, layer.slab, layer.projections, rows_of(slots))
    assert same_bits(y, before)


def test_rows_of_x_and_y_may_lie_apart(ops: LoraOps, dtype: torch.dtype) -> None:
    layer = merged(dtype)
    wide_x, wide_y = (noise(len(MIXED), width + 7, dtype=dtype) for width in (112, layer.width))
    x, y = wide_x[:, 3:-4], wide_y[:, 5:-2]
    before, expected = wide_y.clone(), layer.expected(y, x, MIXED)
    ops.add(y, x, layer.slab, layer.projections, rows_of(MIXED))
    check_close(y, expected)
    assert same_bits(wide_y[:, :5], before[:, :5]) and same_bits(wide_y[:, -2:], before[:, -2:])


@pytest.mark.parametrize(("inputs", "outputs"), [(24, (40, 16)), (32, (20,)), (40, (32,))])
def test_widths_that_are_no_whole_vectors(
    ops: LoraOps, dtype: torch.dtype, inputs: int, outputs: tuple[int, ...]
) -> None:
    layer = merged(dtype, inputs, outputs, gap=1)
    x, y = noise(len(MIXED), inputs, dtype=dtype), noise(len(MIXED), layer.width, dtype=dtype)
    expected = layer.expected(y, x, MIXED)
    ops.add(y, x, layer.slab, layer.projections, rows_of(MIXED))
    check_close(y, expected)


def test_a_slot_that_changed_is_seen_at_the_next_call(ops: LoraOps, dtype: torch.dtype) -> None:
    """Tables and slab are written in place when another adapter takes the slot."""
    layer = merged(dtype)
    rows, x = rows_of([0, 1]), noise(2, 112, dtype=dtype)
    ops.add(torch.zeros(2, layer.width, dtype=dtype), x, layer.slab, layer.projections, rows)
    for projection, adapters in zip(layer.projections, layer.adapters, strict=True):
        for table in (projection.a_rows, projection.b_rows, projection.ranks, projection.scales):
            table[0] = table[2].clone()
        adapters[0] = adapters[2]
    y = torch.zeros(2, layer.width, dtype=dtype)
    expected = layer.expected(y, x, [0, 1])
    ops.add(y, x, layer.slab, layer.projections, rows)
    check_close(y, expected)


def test_any_choice_of_projections_adds_only_its_own(ops: LoraOps, dtype: torch.dtype) -> None:
    """Callers leave out what no adapter of the step changes, in a new list each time."""
    layer = merged(dtype)
    x = noise(len(MIXED), 112, dtype=dtype)
    for chosen in ([0, 1, 2], [2], [0, 2], [1], [2]):
        part = replace(
            layer, projections=[layer.projections[i] for i in chosen], adapters=[layer.adapters[i] for i in chosen]
        )
        y = noise(len(MIXED), layer.width, dtype=dtype, seed=2)
        expected = part.expected(y, x, MIXED)
        ops.add(y, x, part.slab, part.projections, rows_of(MIXED))
        check_close(y, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_gets_the_same_bits_with_any_mates(dtype: torch.dtype) -> None:
    """Tiles, threads and mates change neither order nor number of a token's additions."""
    layer, ops = merged(dtype, 2048, (2048, 512, 256)), compiled(dtype)
    slots = [3, 0, 3, 3, 1, 3, 2, -1, 3, 7, 3, 3, *[1] * (RUN - 1)]
    assert elements(layer, slots) >= PARALLEL_ELEMENTS, "else one thread does it all"
    x, y = noise(len(slots), 2048, dtype=dtype), noise(len(slots), layer.width, dtype=dtype)
    together = {}
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        together[threads] = y.clone()
        ops.add(together[threads], x, layer.slab, layer.projections, rows_of(slots))
    alone = y.clone()
    for token, slot in enumerate(slots):
        ops.add(alone[token : token + 1], x[token : token + 1], layer.slab, layer.projections, rows_of([slot]))
    assert same_bits(together[1], alone) and same_bits(together[2], alone) and same_bits(together[3], alone)


def test_tokens_of_one_adapter_share_tiles() -> None:
    work = split_work([(0, 1, 5), (2, 3, 7), (3, 9, 5), (9, 9 + RUN, 6), (60, 61, 7)], RUN)
    assert work.tokens.tolist() == [0, 3, 4, 5, 6, 7, 8, 2, 60]
    assert work.tiles.tolist() == [[0, 4, 5], [4, 2, 5], [6, 1, 5], [7, 2, 7]]
    assert work.runs == [(9, 9 + RUN, 6)]


def test_a_cpu_gets_what_can_be_compiled_for_it() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(CpuPlatform().lora_ops(dtype), TorchLora if cpu_lora_library(dtype) is None else CpuLora)
    assert isinstance(CpuPlatform().lora_ops(torch.float16), TorchLora)
