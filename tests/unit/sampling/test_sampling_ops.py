"""SamplingOps, compiled and in torch, against whole sorts and one cumulative sum in numpy."""

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.kernels.cpu import cpu_build
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER
from tandem.workers.kernels.cpu.cpu_sampling import SCRATCH_FLOATS, CpuSampling
from tandem.workers.kernels.sampling_ops import CHUNK, Draws, SamplingOps, TorchSampling, Truncation, drawn
from tandem.workers.kernels.step_arrays import sending_with
from tests.unit.sampling.sorted_twin import Floats, mass_from, sorted_floor


def portable_library() -> ctypes.CDLL:
    """The same source without the instructions of this CPU, as on one without AVX512."""
    source = Path(cpu_build.__file__).parent / "src" / "cpu_sampling.c"
    flags = [flag for flag in cpu_build.FLAGS if flag != "-march=native"]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(cpu_build._compiler()),
            *flags,
            "-DELEMENT=0",
            "-DSTORED=0",
            source,
            "-o",
            f"{folder}/x.so",
            "-lm",
        ]
        subprocess.run(command, check=True)
        return ctypes.CDLL(f"{folder}/x.so")


AT_ONCE = sending_with(lambda host: host)
HAS_COMPILER = cpu_build.obstacle(torch.float32) is None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler")
KINDS = ["torch", *(pytest.param(kind, marks=needs_compiler) for kind in ("compiled", "portable"))]
VOCABS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 10 * CHUNK + 17]


@cache
def library(kind: str) -> ctypes.CDLL:
    found = cpu_build.cpu_sampling_library() if kind == "compiled" else portable_library()
    assert found is not None
    return found


def ops_of(kind: str) -> SamplingOps:
    if kind == "torch":
        return TorchSampling()
    return CpuSampling(library(kind))


def floor_of(kind: str, weights: Floats, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> float:
    """The least weight that a row keeps."""
    if kind == "torch":
        row = torch.from_numpy(weights)[None]
        columns = np.array([top_k]), np.array([top_p]), np.array([min_p], np.float32)
        return float(Truncation(*columns, AT_ONCE).thresholds(row)[0])
    function = library(kind)["floor_of"]
    function.restype = ctypes.c_float
    function.argtypes = [POINTER, NUMBER, COUNT, NUMBER, ctypes.c_double, ctypes.c_double, *[POINTER] * 3]
    vocab, least = len(weights), float(np.float32(min_p))
    kept = np.where(weights >= np.float32(min_p), weights, np.float32(0))  # as draw_tokens gives it
    total = float(kept.astype(np.float64).sum())
    room = [np.full(vocab + SCRATCH_FLOATS, np.nan, np.float32) for _ in range(3)]
    row, *buffers = (array.ctypes.data for array in (kept, *room))
    dense, sparse = (max(function(row, vocab, way, top_k, top_p, total, *buffers), least) for way in (0, 1))
    assert same_kept(weights, dense, sparse)
    return dense


def draw_now(
    ops: SamplingOps,
    logits: torch.Tensor,
    best: torch.Tensor,
    ids: torch.Tensor,
    draws: Draws,
    uniforms: Sequence[float],
) -> None:
    ops.prepare_draw(draws, AT_ONCE)(logits, best, ids, torch.tensor(uniforms, dtype=torch.float64))


def draw(kind: str, logits: torch.Tensor, uniforms: list[float], **columns: float) -> list[int]:
    """One draw per row, or of one row for each number."""
    rows = len(uniforms)
    logits = logits.expand(rows, -1).clone()
    draws = Draws(
        places=np.arange(rows),
        temperature=np.full(rows, columns.get("temperature", 1.0), np.float32),
        top_k=np.full(rows, int(columns.get("top_k", 0))),
        top_p=np.full(rows, columns.get("top_p", 1.0)),
        min_p=np.full(rows, columns.get("min_p", 0.0), np.float32),
    )
    ops = ops_of(kind)
    best, ids = ops.best(logits)
    draw_now(ops, logits, best, ids, draws, uniforms)
    return [int(i) for i in ids]


def random_weights(vocab: int, seed: int = 0) -> Floats:
    """Multiples of 1/64, so that every sum is exact and a border has one right side."""
    numbers = np.random.default_rng(seed).integers(0, 64, vocab)
    numbers[vocab // 2] = 64
    return (numbers / 64).astype(np.float32)


def same_kept(weights: Floats, one: float, other: float) -> bool:
    """Whether two thresholds keep the same tokens: one of 0 and the least weight do. Weights of 0 are never drawn."""
    some = weights[weights > 0]
    return bool(((some >= one) == (some >= other)).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [*VOCABS, 151_936])
def test_the_kept_set_ends_where_a_sort_says(kind: str, vocab: int) -> None:
    weights = random_weights(vocab, seed=1)
    for top_p in (0.4, 1.0) if vocab > 10**5 else (*np.linspace(0.01, 0.99, 9), 1e-300, 1 - 1e-16, 1.0):
        for top_k in (0, 1, vocab // 3, vocab):
            for min_p in (0.0, 0.25):
                limits = {"top_k": top_k, "top_p": float(top_p), "min_p": min_p}
                assert same_kept(weights, floor_of(kind, weights, **limits), sorted_floor(weights, **limits)), limits


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    vocab=st.sampled_from([3, 63, 64, 65, 129, 5_000, 40_000]),
    spread=st.sampled_from([0.0, 1e-6, 0.01, 1.0, 4.0, 20.0]),
    distinct=st.sampled_from([1, 2, 7, 10**9]),
    zeros=st.sampled_from([0.0, 0.5, 0.999]),
    heavy=st.sampled_from([0, 1, 60]),
    share=st.floats(1e-6, 1.0),
    top_p=st.sampled_from([0.001, 0.3, 0.9, 0.999, 0.9999999]),
)
def test_flat_steep_tied_and_sparse_rows(
    kind: str, seed: int, vocab: int, spread: float, distinct: int, zeros: float, heavy: int, share: float, top_p: float
) -> None:
    """The k-th weight is that of a sort; the nucleus reaches its share, and not without its last weight."""
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal(min(vocab, distinct))[generator.integers(0, min(vocab, distinct), vocab)]
    weights = np.exp(spread * (logits - logits.max())).astype(np.float32)
    weights[generator.random(vocab) < zeros] = 0
    weights *= np.float32(1e-3 if heavy else 1)
    weights[generator.integers(0, vocab, heavy)] = np.float32(0.7)
    weights[generator.integers(0, vocab)] = 1
    top_k = max(1, round(share * vocab))
    assert same_kept(weights, floor_of(kind, weights, top_k=top_k), sorted_floor(weights, top_k=top_k))
    floor = floor_of(kind, weights, top_p=top_p)
    total = mass_from(weights, 0)
    assert (floor == 0 or floor in weights) and mass_from(weights, floor) >= top_p * total * (1 - 1e-6)
    assert mass_from(weights, float(np.nextafter(np.float32(floor), 2))) < top_p * total * (1 + 1e-6)
    both = floor_of(kind, weights, top_k=top_k, top_p=top_p)
    assert both >= floor_of(kind, weights, top_k=top_k)
    left = np.where(weights >= sorted_floor(weights, top_k=top_k), weights, np.float32(0))
    assert mass_from(left, both) >= top_p * mass_from(left, 0) * (1 - 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_top_k_and_min_p_keep_counts_for_top_p(kind: str) -> None:
    """8 and 4 are left: two thirds are the first one's, so 0.9 takes both and 0.6 one."""
    weights = np.array([1.0, 8.0, 2.0, 4.0], np.float32) / 8
    assert floor_of(kind, weights, top_k=2, top_p=0.9) == 0.5
    assert floor_of(kind, weights, top_k=2, top_p=0.6) == 1.0
    assert floor_of(kind, weights, min_p=0.5, top_p=0.9) == 0.5
    assert floor_of(kind, weights, top_k=3, min_p=0.5) == 0.5 and floor_of(kind, weights, top_k=1, min_p=0.5) == 1.0


def test_rows_with_limits_and_without_are_cut_each_by_its_own_in_torch() -> None:
    """Also where there are more of them than are searched at once."""
    weights = torch.from_numpy(np.stack([random_weights(300, seed) for seed in range(70)]))
    top_k = np.arange(70) % 3 * 20
    top_p = np.where(np.arange(70) % 2, 0.5, 1.0)
    min_p = np.where(np.arange(70) % 5, 0.0, 0.1).astype(np.float32)
    got = Truncation(top_k, top_p, min_p, AT_ONCE).thresholds(weights)
    limits = zip(weights.numpy(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    assert got.tolist() == [sorted_floor(*row) for row in limits]


@pytest.mark.parametrize("vocab", VOCABS)
def test_every_token_of_a_large_vocabulary_is_drawn_by_its_share(vocab: int) -> None:
    """Just below the end of each token's share, exactly on it and in the middle of it."""
    weights = torch.from_numpy(random_weights(vocab))[None]
    ends = np.cumsum(weights[0].double().numpy())
    total, owners = ends[-1], np.flatnonzero(weights[0].numpy())
    starts = ends[owners] - weights[0].double().numpy()[owners]
    for at in (starts, (starts + ends[owners]) / 2, np.nextafter(ends[owners], 0)):
        u = torch.from_numpy(at / total)
        got = drawn(weights.expand(len(at), -1).contiguous(), u)
        wanted = np.searchsorted(ends, np.minimum(u.numpy() * total, total * (1 - 2.0**-52)), side="right")
        assert got.tolist() == wanted.tolist()
    middles = torch.from_numpy((starts + ends[owners]) / 2 / total)
    assert drawn(weights.expand(len(owners), -1).contiguous(), middles).tolist() == owners.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_equal_weights_are_drawn_in_ascending_order(kind: str, vocab: int) -> None:
    """The best logit and forbidden ones have weights 1 and 0: every border is exact."""
    logits = torch.full((1, vocab), float("-inf"))
    chosen = np.unique(np.random.default_rng(vocab).integers(0, vocab, 64))
    logits[0, chosen] = 3.5
    count = len(chosen)
    starts = [i / count for i in range(count)]
    for limits in ({}, {"top_k": count}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 1.0}, {"temperature": 1e-5}):
        exact = [u for u in starts if (u * count).is_integer()]
        assert draw(kind, logits, exact, **limits) == [chosen[round(u * count)] for u in exact]
        assert draw(kind, logits, [u + 0.5 / count for u in starts], **limits) == chosen.tolist()
        assert draw(kind, logits, [1 - 2.0**-53, 1.0], **limits) == [chosen[-1]] * 2, "rounding draws no forbidden one"


@pytest.mark.parametrize("vocab", [CHUNK + 17, 5 * CHUNK])
def test_rounding_leads_to_no_token_without_weight(vocab: int) -> None:
    """Numbers just below 1, over rows whose chunk sums in float32 are larger or smaller than their parts, and whose
    last weights are zero, as after a truncation: the last token that has weight is drawn."""
    for zeros in (0, 3, 17, 40):
        weights = torch.rand(200, vocab, generator=torch.Generator().manual_seed(zeros)) + 0.001
        weights[:, vocab - zeros :] = 0
        for u in (1 - 2.0**-53, 1.0):
            got = drawn(weights, torch.full((200,), u, dtype=torch.float64))
            assert set(got.tolist()) == {vocab - zeros - 1}, (zeros, u)
            ids = [i for kind in ops_here() for i in draw(kind, weights.log(), [u] * 200)]
            assert set(ids) == {vocab - zeros - 1}, (zeros, u)


def ops_here() -> list[str]:
    return ["torch", "compiled", "portable"] if HAS_COMPILER else ["torch"]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("weight", [0.0, float("nan")])
def test_a_row_without_weights_gives_some_id(vocab: int, weight: float) -> None:
    got = drawn(torch.full((2, vocab), weight), torch.tensor([0.0, 0.7], dtype=torch.float64))
    assert all(0 <= i < vocab for i in got.tolist())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_rows_that_are_not_finite_give_some_id_and_leave_the_others_alone(kind: str, vocab: int) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        logits = torch.zeros(3, vocab)
        logits[1, vocab // 2] = bad
        logits[1] += 0 if bad > 0 or bad != bad else bad
        best, _ = ops_of(kind).best(logits)
        assert torch.isfinite(best).tolist() == [True, False, True]
        got = draw(kind, logits, [1 - 1e-9, 0.5, 0.0], top_k=5, top_p=0.5, min_p=0.1)
        assert got[::2] == [vocab - 1, 0] and 0 <= got[1] < vocab


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [*VOCABS, 40])
def test_the_best_token_is_the_first_of_the_greatest(kind: str, vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    padded = torch.from_numpy(generator.integers(-3, 3, (50, vocab + 7)).astype(np.float32))
    logits = padded[:, :vocab]
    best, ids = ops_of(kind).best(logits)
    assert best.tolist() == logits.max(1).values.tolist()
    assert ids.tolist() == [int(np.argmax(row)) for row in logits.numpy()]


@needs_compiler
@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
@pytest.mark.parametrize(
    "limits",
    [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 100, "top_p": 0.8, "min_p": 0.001}],
    ids=str,
)
def test_the_compiled_draw_is_the_twins(scale: float, limits: dict[str, float]) -> None:
    """On Qwen's vocabulary, some rows in the middle of others that draw nothing, with a stride."""
    rows, vocab = 7, 151_936
    padded = torch.randn(rows, vocab + 3, generator=torch.Generator().manual_seed(4)) * scale
    places = np.array([1, 2, 5])
    draws = Draws(
        places=places,
        temperature=np.array([0.5, 1.0, 1.7], np.float32),
        top_k=np.full(3, int(limits.get("top_k", 0))),
        top_p=np.full(3, limits.get("top_p", 1.0)),
        min_p=np.full(3, limits.get("min_p", 0.0), np.float32),
    )
    found = []
    for kind in ("torch", "compiled", "portable"):
        ops, logits = ops_of(kind), padded.clone()[:, :vocab]
        best, ids = ops.best(logits)
        greedy = ids.clone()
        for _ in range(3):
            draw_now(ops, logits.clone(), best, ids, draws, [0.11, 0.5, 0.93])
        rest = np.setdiff1d(np.arange(rows), places)
        assert torch.equal(ids[rest], greedy[rest]) and torch.equal(greedy, logits.argmax(1))
        found.append(ids[places].tolist())
    assert found[0] == found[1] == found[2]


@needs_compiler
def test_models_of_one_process_may_draw_at_once() -> None:
    """Several threads, one object, rows that need its scratch memory."""
    ops, rows = ops_of("compiled"), 4
    logits = torch.randn(rows, 60_000, generator=torch.Generator().manual_seed(1))
    best, greedy = ops.best(logits)

    def drawn_with(top_p: float) -> list[int]:
        draws = Draws(
            places=np.arange(rows),
            temperature=np.ones(rows, np.float32),
            top_k=np.zeros(rows, np.int64),
            top_p=np.full(rows, top_p),
            min_p=np.zeros(rows, np.float32),
        )
        ids = greedy.clone()
        draw_now(ops, logits.clone(), best, ids, draws, [0.7] * rows)
        return [int(i) for i in ids]

    shares = [0.2 + 0.01 * i for i in range(40)]
    alone = list(map(drawn_with, shares))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(drawn_with, shares)) == alone


@needs_compiler
def test_threads_change_nothing() -> None:
    logits = torch.randn(9, 30_000, generator=torch.Generator().manual_seed(1)) * 3
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(draw("compiled", logits, [i / 9 for i in range(9)], top_k=500, top_p=0.9))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("limits", "kept"),
    [({}, 60), ({"top_k": 7}, 7), ({"top_p": 0.7}, None), ({"min_p": 0.05}, None), ({"top_k": 30, "top_p": 0.8}, None)],
    ids=str,
)
def test_frequencies_by_chi_square(kind: str, limits: dict[str, float], kept: int | None) -> None:
    """8,000 even numbers over one row fall as its truncated probabilities say."""
    count, vocab = 8_000, 60
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)) * 1.5
    weights = torch.exp(logits[0] - logits[0].max()).numpy()
    ask: dict[str, float] = {**limits}
    floor = sorted_floor(weights, int(ask.get("top_k", 0)), ask.get("top_p", 1.0), ask.get("min_p", 0.0))
    expected = np.where(weights >= floor, weights, 0).astype(np.float64)
    assert kept is None or np.count_nonzero(expected) == kept
    expected *= count / expected.sum()
    uniforms = np.random.default_rng(3).random(count)
    counts = np.bincount(draw(kind, logits, uniforms.tolist(), **limits), minlength=vocab)
    assert not counts[expected == 0].any()
    inside = expected > 0
    chi_square = ((counts - expected)[inside] ** 2 / expected[inside]).sum()
    freedom = inside.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_a_draw_may_share_a_step_with_other_limits() -> None:
    """Rows of one call have their own temperature and limits."""
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(2)) * 2
    draws = Draws(
        places=np.arange(4),
        temperature=np.array([1.0, 0.3, 1.0, 2.0], np.float32),
        top_k=np.array([0, 0, 3, 0]),
        top_p=np.array([1.0, 0.5, 1.0, 0.9]),
        min_p=np.array([0.0, 0.0, 0.0, 0.3], np.float32),
    )
    uniforms = [0.9, 0.8, 0.7, 0.6]
    for kind in ops_here():
        ops = ops_of(kind)
        together = logits.repeat(4, 1)
        best, ids = ops.best(together)
        draw_now(ops, together, best, ids, draws, uniforms)
        for row in range(4):
            names = ("temperature", "top_k", "top_p", "min_p")
            alone = replace(draws, places=np.zeros(1, np.int64), **{n: getattr(draws, n)[row : row + 1] for n in names})
            one = logits.clone()
            best, single = ops.best(one)
            draw_now(ops, one, best, single, alone, uniforms[row : row + 1])
            assert int(single[0]) == int(ids[row])
