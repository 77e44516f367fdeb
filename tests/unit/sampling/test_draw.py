"""draw() and thresholds() over vocabularies of many chunks, against one cumulative sum in numpy."""

import numpy as np
import pytest
import torch

from tandem.workers.platforms import cuda
from tandem.workers.platforms.cpu import cpu_platform
from tandem.workers.sampling.draw import CHUNK, draw, thresholds

PLATFORM = cpu_platform()

VOCABS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 10 * CHUNK + 17]


def random_weights(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Multiples of 1/64, so that every sum is exact and a draw at a border has one right answer."""
    numbers = torch.randint(0, 64, (rows, vocab), generator=torch.Generator().manual_seed(seed))
    numbers[:, vocab // 2] = 64
    return numbers / 64


@pytest.mark.parametrize("vocab", VOCABS)
def test_every_token_of_a_large_vocabulary_is_drawn_by_its_share(vocab: int) -> None:
    """Just below the end of each token's share, exactly on it and in the middle of it."""
    weights = random_weights(1, vocab)
    ends = np.cumsum(weights[0].double().numpy())
    total, owners = ends[-1], np.flatnonzero(weights[0].numpy())
    starts = ends[owners] - weights[0].double().numpy()[owners]
    for at in (starts, (starts + ends[owners]) / 2, np.nextafter(ends[owners], 0)):
        u = torch.from_numpy(at / total)
        got = draw(weights.expand(len(at), -1).contiguous(), u)
        wanted = np.searchsorted(ends, np.minimum(u.numpy() * total, total * (1 - 2.0**-52)), side="right")
        assert got.tolist() == wanted.tolist()
    middles = torch.from_numpy((starts + ends[owners]) / 2 / total)
    assert draw(weights.expand(len(owners), -1).contiguous(), middles).tolist() == owners.tolist()


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_nucleus_of_a_large_vocabulary_ends_where_its_share_is_reached(vocab: int) -> None:
    weights = random_weights(1, vocab, seed=1)
    ordered = np.sort(weights[0].double().numpy())[::-1]
    ends = np.cumsum(ordered)
    for top_p in np.linspace(0.01, 0.99, 25):
        got = thresholds(weights, np.zeros(1, np.int64), np.array([top_p]), np.zeros(1), PLATFORM)
        assert got.item() == ordered[np.searchsorted(ends, top_p * ends[-1])]


def thresholds_of(weights: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    rows = len(weights)
    return thresholds(weights, np.full(rows, top_k), np.full(rows, top_p), np.full(rows, min_p), PLATFORM).tolist()


@pytest.mark.parametrize("vocab", [CHUNK + 17, 5 * CHUNK])
def test_rounding_leads_to_no_token_without_weight(vocab: int) -> None:
    """Numbers just below 1, over rows whose chunk sums in float32 are larger or smaller than their parts, and whose
    last weights are zero, as after a truncation: the last token that has weight is drawn."""
    for zeros in (0, 3, 17, 40):
        weights = torch.rand(200, vocab, generator=torch.Generator().manual_seed(zeros)) + 0.001
        weights[:, vocab - zeros :] = 0
        for u in (1 - 2.0**-53, 1.0):
            got = draw(weights, torch.full((200,), u, dtype=torch.float64))
            assert set(got.tolist()) == {vocab - zeros - 1}, (zeros, u)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("weight", [0.0, float("nan")])
def test_a_row_without_weights_gives_some_id(vocab: int, weight: float) -> None:
    got = draw(torch.full((2, vocab), weight), torch.tensor([0.0, 0.7], dtype=torch.float64))
    assert all(0 <= i < vocab for i in got.tolist())


def test_limits_that_are_off_keep_everything_also_beside_rows_that_have_them() -> None:
    weights = torch.tensor([[1.0, 0.5, 1e-30]] * 3)
    assert thresholds_of(weights) == [0.0] * 3
    got = thresholds(weights, np.array([0, 2, 0]), np.array([1.0, 1.0, 0.5]), np.array([0.0, 0.0, 0.0]), PLATFORM)
    assert got.tolist() == [0.0, 0.5, 1.0]
    assert thresholds_of(weights, top_k=100) == pytest.approx([1e-30] * 3)


def test_what_top_k_and_min_p_keep_counts_for_top_p() -> None:
    """8 and 4 are left: two thirds are the first one's, so 0.9 takes both and 0.6 one."""
    weights = torch.tensor([[1.0, 8.0, 2.0, 4.0]]) / 8
    assert thresholds_of(weights, top_k=2, top_p=0.9) == [0.5]
    assert thresholds_of(weights, top_k=2, top_p=0.6) == [1.0]
    assert thresholds_of(weights, min_p=0.5, top_p=0.9) == [0.5]
    assert thresholds_of(weights, top_k=3, min_p=0.5) == [0.5] and thresholds_of(weights, top_k=1, min_p=0.5) == [1.0]


def test_a_device_sorts_as_the_cpu_does() -> None:
    weights = random_weights(3, 300)
    for most in (1, 7, 299, 300):
        got, wanted = cuda._descending(weights, most), PLATFORM.descending(weights, most)
        assert got.shape == (3, most) and torch.equal(got, wanted[:, :most])
