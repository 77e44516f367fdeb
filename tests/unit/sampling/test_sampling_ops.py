"""SamplingOps, compiled for this CPU and older ones and in torch, against whole sorts in numpy: the same bits."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.kernels import sampling_ops
from tandem.workers.kernels.sampling_ops import DIGITS, weights
from tests.unit.sampling import numpy_twin
from tests.unit.sampling.numpy_twin import Floats
from tests.unit.sampling.sampling_kinds import (
    KINDS,
    VOCABS,
    draw,
    draw_now,
    draws_of,
    kinds_here,
    lowest_of,
    needs_compiler,
    ops_of,
    truncation_of,
)

LIMITS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.02},
    {"top_k": 100, "top_p": 0.8, "min_p": 0.001, "temperature": 1.7},
]


def random_logits(vocab: int, seed: int = 0, spread: float = 3.0) -> Floats:
    """Some of them equal, as 16-bit logits are."""
    numbers = np.random.default_rng(seed).standard_normal(vocab) * spread
    return (np.rint(numbers * 64) / 64).astype(np.float32)


@pytest.mark.parametrize("vocab", [*VOCABS, 151_936])
def test_the_kept_set_ends_where_a_sort_says(vocab: int) -> None:
    logits = random_logits(vocab, seed=1)
    for top_p in (0.4, 1.0) if vocab > 10**5 else (*np.linspace(0.01, 0.99, 9), 1e-300, 1 - 1e-16, 1.0):
        for top_k in (0, 1, vocab // 3, vocab):
            for min_p in (0.0, 0.25):
                limits = {"top_k": top_k, "top_p": float(top_p), "min_p": min_p}
                of_V = numpy_twin.exponents(logits)
                wanted = numpy_twin.lowest(of_V, **limits)
                for kind in kinds_here():
                    same_kept(of_V, lowest_of(kind, logits, **limits), wanted, kind, limits)


def same_kept(exponents_V: Floats, one: float, other: float, *of: object) -> None:
    """Bounds may differ where they keep the same: minus infinity and the least exponent do."""
    assert ((exponents_V >= one) == (exponents_V >= other)).all(), (one, other, of)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    vocab=st.sampled_from([3, 63, 64, 65, 129, 5_000, 40_000]),
    spread=st.sampled_from([0.0, 1e-6, 0.01, 1.0, 4.0, 20.0, 1e30]),
    distinct=st.sampled_from([1, 2, 7, 10**9]),
    forbidden=st.sampled_from([0.0, 0.5, 0.999]),
    heavy=st.sampled_from([0, 1, 60]),
    share=st.floats(1e-6, 1.0),
    top_p=st.sampled_from([0.001, 0.3, 0.9, 0.999, 0.9999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.3, 1.0]),
    temperature=st.sampled_from([1e-5, 0.7, 1.0, 2.0, 1e30]),
)
def test_flat_steep_tied_and_sparse_rows(
    seed: int, vocab: int, spread: float, distinct: int, forbidden: float, heavy: int, share: float,
    top_p: float, min_p: float, temperature: float,
) -> None:  # fmt: skip
    """The bound is that of a sort, alone and together with others, and the token is numpy's."""
    generator = np.random.default_rng(seed)
    numbers = generator.standard_normal(min(vocab, distinct))[generator.integers(0, min(vocab, distinct), vocab)]
    logits = (spread * numbers).astype(np.float32)
    logits[generator.random(vocab) < forbidden] = -np.inf
    top = logits.max() if np.isfinite(logits.max()) else np.float32(0)
    logits[generator.integers(0, vocab, heavy)] = top + np.float32(5)
    logits[generator.integers(0, vocab)] = top + np.float32(6)
    of_V = numpy_twin.exponents(logits, temperature)
    top_k = max(1, round(share * vocab))
    every: list[dict[str, Any]] = [
        {"top_k": top_k}, {"top_p": top_p}, {"top_k": top_k, "top_p": top_p}, {"top_p": top_p, "min_p": min_p},
        {"top_k": top_k, "top_p": top_p, "min_p": min_p}, {},
    ]  # fmt: skip
    for limits in every:
        lowest = numpy_twin.lowest(of_V, **limits)
        wanted = numpy_twin.draw(logits, seed=seed, position=7, temperature=temperature, **limits)
        given_row = torch.from_numpy(logits)[None]
        for kind in kinds_here():
            same_kept(of_V, lowest_of(kind, logits, temperature=temperature, **limits), lowest, kind, limits)
            drawn = draw(kind, given_row, [7], seed=seed, temperature=temperature, **limits)
            assert drawn == [wanted], (kind, limits)


def test_weights_are_exponentials_on_a_grid() -> None:
    x = -np.random.default_rng(0).random(100_000).astype(np.float32) * 90
    x = np.concatenate([x, np.array([0.0, -25.0, -87.0, -200.0, -np.inf], np.float32)])
    got = weights(torch.from_numpy(x)).numpy()
    assert got.tobytes() == numpy_twin.weights(x).tobytes()
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(got - exact) <= 3e-6 * exact + 2.0**-35).all() and (got * 2.0**34 % 1 == 0).all()
    assert not got[x <= -25].any(), "the compiled kernel takes them for 0"


@pytest.mark.parametrize("kind", KINDS)
def test_what_top_k_and_min_p_keep_counts_for_top_p(kind: str) -> None:
    """8 and 4 are left: two thirds are the first one's, so 0.9 takes both and 0.6 one."""
    logits = np.log(np.array([1.0, 8.0, 2.0, 4.0], np.float32))
    half, best = numpy_twin.exponents(logits)[3], 0.0
    assert lowest_of(kind, logits, top_k=2, top_p=0.9) == half
    assert lowest_of(kind, logits, top_k=2, top_p=0.6) == best
    assert lowest_of(kind, logits, min_p=0.49, top_p=0.9) == half
    assert lowest_of(kind, logits, top_k=3, min_p=0.49) == pytest.approx(np.log(0.49))
    assert lowest_of(kind, logits, top_k=1, min_p=0.49) == best


def test_rows_with_limits_and_without_are_cut_each_by_its_own_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are more of them than are searched and drawn at once."""
    monkeypatch.setattr(sampling_ops, "TOGETHER", 16 * 2 ** DIGITS[0][1])
    rows = 70
    logits = np.stack([random_logits(300, seed) for seed in range(rows)])
    top_k, top_p = np.arange(rows) % 3 * 20, np.where(np.arange(rows) % 2, 0.5, 1.0)
    min_p, temperature = np.where(np.arange(rows) % 5, 0.0, 0.1), 0.5 + np.arange(rows) % 4
    draws = draws_of(rows, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    given = torch.from_numpy(logits)
    got = truncation_of(draws).lowest(given, given.amax(1)).tolist()
    for row in range(rows):
        of_V = numpy_twin.exponents(logits[row], float(temperature[row]))
        same_kept(of_V, got[row], numpy_twin.lowest(of_V, int(top_k[row]), float(top_p[row]), float(min_p[row])))
    asked = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature, "seed": np.arange(rows)}
    alone = [
        numpy_twin.draw(logits[row], position=row, **{name: of[row].item() for name, of in asked.items()})
        for row in range(rows)
    ]
    assert draw("torch", given, range(rows), **asked) == alone


@pytest.mark.parametrize("vocab", [*VOCABS, 151_936])
@pytest.mark.parametrize("spread", [0.0, 0.1, 2.0, 30.0])
def test_the_token_is_numpys(vocab: int, spread: float) -> None:
    """Flat rows, where all ids are near to winning, and steep ones; alone and in a step with others, whose limits
    differ."""
    count = 2 if vocab > 10**5 else 30
    logits = torch.from_numpy(np.stack([random_logits(vocab, seed, spread) for seed in range(count)]))
    positions = (np.arange(count) * 977).tolist()
    rows = [{**LIMITS[row % len(LIMITS)], "seed": 2**63 + row, "choice": row % 3} for row in range(count)]
    wanted = [numpy_twin.draw(logits[row].numpy(), position=positions[row], **rows[row]) for row in range(count)]
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice")
    default = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = {name: np.array([row.get(name, default.get(name)) for row in rows]) for name in names}
    for kind in kinds_here():
        best, ids = ops_of(kind).best(logits)
        draw_now(ops_of(kind), logits.clone(), best, ids, draws_of(count, **columns), positions)
        assert ids.tolist() == wanted, kind
        alone = [draw(kind, logits[row : row + 1], positions[row : row + 1], **rows[row])[0] for row in range(count)]
        assert alone == wanted, kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_row_with_one_token_left_gives_that_one(kind: str, vocab: int) -> None:
    for left in {0, vocab // 2, vocab - 1}:
        logits = torch.full((1, vocab), float("-inf"))
        logits[0, left] = -3.5
        for limits in LIMITS:
            assert draw(kind, logits, range(5), **limits) == [left] * 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_what_is_forbidden_is_never_drawn(kind: str, vocab: int) -> None:
    """Whatever its noise: with few kept among many, most noise is greater than theirs."""
    logits = torch.full((1, vocab), float("-inf"))
    kept = np.unique(np.random.default_rng(vocab).integers(0, vocab, 4))
    logits[0, kept] = torch.arange(len(kept), dtype=torch.float32)
    assert {*draw(kind, logits, range(300))} == {*kept.tolist()}
    equal = torch.zeros(1, vocab)
    equal[0, kept] = 1.0
    for limits in ({"top_k": len(kept)}, {"min_p": 0.5}, {"top_p": 1e-9}, {"temperature": 1e-5}):
        assert {*draw(kind, equal, range(300), **limits)} <= {*kept.tolist()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("low", "high"), [(3, 4), (3, 19), (3, 66), (64, 290)])
def test_of_two_equal_scores_the_lower_id_wins(kind: str, low: int, high: int) -> None:
    """Also where its logit is not the best one: one of the two makes up for the other's greater noise."""
    ties = 0
    for position in range(60):
        noise = numpy_twin.noise(5, 0, position, 300)
        less, more = (low, high) if noise[low] > noise[high] else (high, low)
        logits = torch.full((1, 300), float("-inf"))
        logits[0, more], logits[0, less] = 0.0, float(noise[more] - noise[less])
        if logits[0, less].numpy() + noise[less] == noise[more]:
            ties += 1
            assert draw(kind, logits, [position], seed=5) == [low]
    assert ties > 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_rows_that_are_not_finite_give_some_id_and_leave_the_others_alone(kind: str, vocab: int) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        logits = torch.from_numpy(np.stack([random_logits(vocab, seed) for seed in range(3)]))
        wanted = [numpy_twin.draw(logits[row].numpy(), position=row, top_k=5, top_p=0.5, min_p=0.1) for row in (0, 2)]
        logits[1, vocab // 2] = bad
        if bad == -float("inf"):
            logits[1] = bad
        best, ids = ops_of(kind).best(logits)
        assert torch.isfinite(best).tolist() == [True, False, True]
        draw_now(ops_of(kind), logits, best, ids, draws_of(3, top_k=5, top_p=0.5, min_p=0.1), [0, 1, 2])
        assert ids[::2].tolist() == wanted and 0 <= ids[1] < vocab


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [*VOCABS, 40])
def test_the_best_token_is_the_first_of_the_greatest(kind: str, vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    padded = torch.from_numpy(generator.integers(-3, 3, (50, vocab + 7)).astype(np.float32))
    logits = padded[:, :vocab]
    best, ids = ops_of(kind).best(logits)
    assert best.tolist() == logits.max(1).values.tolist()
    assert ids.tolist() == [int(np.argmax(row)) for row in logits.numpy()]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_a_stride_among_others_that_draw_nothing(kind: str) -> None:
    rows, vocab, places = 7, 1_000, np.array([1, 2, 5])
    padded = torch.randn(rows, vocab + 3, generator=torch.Generator().manual_seed(4)) * 2
    logits, positions = padded[:, :vocab], list(range(100, 107))
    draws = draws_of(3, places=places, temperature=[0.5, 1.0, 1.7], seed=[1, 2, 3], top_k=[0, 40, 0], top_p=[1, 1, 0.8])
    best, ids = ops_of(kind).best(logits)
    greedy = ids.clone()
    draw_now(ops_of(kind), logits, best, ids, draws, positions)
    rest = np.setdiff1d(np.arange(rows), places)
    assert torch.equal(ids[rest], greedy[rest]) and torch.equal(greedy, logits.argmax(1))
    wanted = [
        numpy_twin.draw(logits[1].numpy(), seed=1, position=101, temperature=0.5),
        numpy_twin.draw(logits[2].numpy(), seed=2, position=102, top_k=40),
        numpy_twin.draw(logits[5].numpy(), seed=3, position=105, temperature=1.7, top_p=0.8),
    ]
    assert ids[places].tolist() == wanted


@needs_compiler
def test_models_of_one_process_may_draw_at_once() -> None:
    """Several threads, one object, rows that need its scratch memory."""
    rows = 4
    logits = torch.randn(rows, 60_000, generator=torch.Generator().manual_seed(1))

    def drawn_with(top_p: float) -> list[int]:
        return draw("compiled", logits, range(rows), top_p=top_p)

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
            found.append(draw("compiled", logits, range(9), top_k=500, top_p=0.9))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, 130),
        ({"temperature": 0.6}, 130),
        ({"top_k": 7}, 7),
        ({"top_p": 0.7}, None),
        ({"min_p": 0.05}, None),
        ({"top_k": 30, "top_p": 0.8}, None),
    ],
    ids=str,
)
def test_frequencies_by_chi_square(kind: str, limits: dict[str, float], kept: int | None) -> None:
    """Tokens of 8,000 positions over one row of three blocks fall as its truncated probabilities say. Torch's twin,
    whose searches take long, has fewer."""
    count, vocab = 2_000 if kind == "torch" and limits.keys() & {"top_k", "top_p"} else 8_000, 130
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)) * 1.5
    bounds = {name: value for name, value in limits.items() if name != "temperature"}
    of_V = numpy_twin.exponents(logits[0].numpy(), limits.get("temperature", 1.0))
    inside = of_V >= numpy_twin.lowest(of_V, **bounds)  # type: ignore[arg-type]
    assert kept is None or np.count_nonzero(inside) == kept
    expected = np.where(inside, np.exp(of_V.astype(np.float64)), 0)
    expected *= count / expected.sum()
    counts = np.bincount(draw(kind, logits, range(count), **limits), minlength=vocab)
    assert not counts[~inside].any()
    some = expected > 5  # of the others together, below
    observed = np.append(counts[some], counts[~some].sum())
    shares = np.append(expected[some], expected[~some].sum())
    observed, shares = observed[shares > 0], shares[shares > 0]
    freedom = len(shares) - 1
    assert ((observed - shares) ** 2 / shares).sum() < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_every_implementation_draws_one_text() -> None:
    """A step of many rows with every kind of limit, over Qwen's vocabulary."""
    rows = 12
    logits = torch.randn(rows, 151_936, generator=torch.Generator().manual_seed(9)) * 2.5
    columns = {
        "temperature": [0.7, 1.0, 1.5] * 4,
        "top_k": [0, 0, 50, 0, 1000, 0] * 2,
        "top_p": [1.0, 0.95, 0.9, 0.5] * 3,
        "min_p": [0.0, 0.0, 0.0, 0.01] * 3,
        "seed": range(rows),
    }
    found = {kind: draw(kind, logits, range(rows), **columns) for kind in kinds_here()}
    assert len({*map(tuple, found.values())}) == 1, found
