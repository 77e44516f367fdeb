"""Gumbel noise: Philox against Random123's known answers, torch and C against numpy bit by bit, its distribution."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.kernels import gumbel_noise
from tests.unit.sampling import numpy_twin
from tests.unit.sampling.numpy_twin import Floats
from tests.unit.sampling.sampling_kinds import KINDS, VOCABS, draw, kinds_here, noise_by

FULL = 0xFFFFFFFF
# kat_vectors of Random123: counter, key, result for philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
POWERS = [2**23 - 1, 2**23, 2**24 + 1, 2**30 - 1, 2**30, 2**30 + 64, 2**31, 3 * 2**30]
EDGES = np.array([0, 1, 2, *POWERS, *range(FULL - 400, FULL + 1)], np.uint32)


def test_known_answers() -> None:
    for counter, key, answer in KNOWN_ANSWERS:
        c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
        words = gumbel_noise.philox4x32((c0, c1, c2, c3), (torch.tensor([key[0]]), torch.tensor([key[1]])))
        assert tuple(int(word) for word in words) == answer
        in_numpy = numpy_twin.philox4x32([np.array([word], np.uint64) for word in counter], key)
        assert tuple(int(word[0]) for word in in_numpy) == answer


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 127), st.integers(0, 2**31 - 1), st.sampled_from(VOCABS))
def test_every_implementation_has_the_same_bits(seed: int, choice: int, position: int, vocab: int) -> None:
    wanted = numpy_twin.noise(seed, choice, position, vocab)
    for kind in kinds_here():
        assert noise_by(kind, seed, choice, position, vocab).tobytes() == wanted.tobytes(), kind


def test_a_large_vocabulary_has_the_same_bits() -> None:
    for position in range(7):
        wanted = numpy_twin.noise(2**63 + 5, 3, position, 151_936)
        for kind in kinds_here():
            assert noise_by(kind, 2**63 + 5, 3, position, 151_936).tobytes() == wanted.tobytes(), kind


def test_words_become_noise_without_losing_a_tail() -> None:
    words = np.concatenate([EDGES, np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)])
    got = gumbel_noise.noise_of(torch.from_numpy(words.astype(np.int64))).numpy()
    assert got.tobytes() == numpy_twin.noise_of(words).tobytes()
    v = np.minimum((words + 0.5) / 2**32, 1 - 2.0**-24)
    exact = -np.log(-np.log1p(-v))
    near_one = 1 - v < 1e-3  # where v itself is rounded to 2^-24
    assert np.abs(got - exact)[~near_one].max() < 1e-4 and np.abs(got - exact)[words < 2**30].max() < 4e-6
    assert np.abs(got - exact)[near_one].max() < 0.05
    assert got.max() == got[words == 0][0] == pytest.approx(33 * np.log(2), rel=1e-6)
    assert got.min() == got[words == FULL][0] == pytest.approx(-np.log(24 * np.log(2)), rel=1e-5)
    ordered = got[np.argsort(words, kind="stable")]
    assert (np.diff(ordered) < 1e-5).all(), "the lower the word, the more noise"


def test_noise_is_that_of_gumbels_distribution() -> None:
    """Frequencies of 64 shares of it by chi-square: 63 degrees of freedom, p = 0.0002."""
    found = np.concatenate([noise_by("torch", 7, 0, position, 5_000) for position in range(20)])
    counts = np.bincount((np.exp(-np.exp(-found.astype(np.float64))) * 64).astype(int), minlength=64)
    expected = len(found) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 110
    assert found.mean() == pytest.approx(0.5772, abs=0.02) and found.var() == pytest.approx(np.pi**2 / 6, abs=0.05)


OTHERS: dict[str, Callable[[int], tuple[Floats, Floats]]] = {
    "position": lambda n: (numpy_twin.noise(1, 2, 3, n), numpy_twin.noise(1, 2, 4, n)),
    "a far position": lambda n: (numpy_twin.noise(1, 2, 3, n), numpy_twin.noise(1, 2, 3 + 2**16, n)),
    "choice": lambda n: (numpy_twin.noise(1, 2, 3, n), numpy_twin.noise(1, 3, 3, n)),
    "choice for position": lambda n: (numpy_twin.noise(1, 2, 3, n), numpy_twin.noise(1, 3, 2, n)),
    "low half of the seed": lambda n: (numpy_twin.noise(1, 2, 3, n), numpy_twin.noise(2, 2, 3, n)),
    "high half of the seed": lambda n: (numpy_twin.noise(1, 2, 3, n), numpy_twin.noise(1 + 2**32, 2, 3, n)),
    **{
        f"id {distance} further": lambda n, distance=distance: (
            numpy_twin.noise(1, 2, 3, n + distance)[:n],
            numpy_twin.noise(1, 2, 3, n + distance)[distance:],
        )
        for distance in (1, 4, 15, 16, 17, 32, 48, 64, 128, 4096)
    },
}


@pytest.mark.parametrize("what", OTHERS)
def test_noise_of_another(what: str) -> None:
    """Independent: uncorrelated in value and in size, and equal nowhere but by chance."""
    one, other = OTHERS[what](50_000)
    bound = 4.5 / np.sqrt(len(one))
    assert abs(np.corrcoef(one, other)[0, 1]) < bound
    assert abs(np.corrcoef(np.abs(one - one.mean()), np.abs(other - other.mean()))[0, 1]) < bound
    assert (one == other).mean() < 0.001


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_neighbours_are_independent(kind: str) -> None:
    """Pairs of tokens drawn from 4 ids of several blocks, words and lanes, at consecutive positions and choices, fall
    on all 16 pairs alike: 15 degrees of freedom, p = 0.0002."""
    ids, count = [0, 1, 16, 64], 2_000
    logits = torch.full((1, 65), float("-inf"))
    logits[0, ids] = 2.5
    place = {token: index for index, token in enumerate(ids)}
    at_even, at_odd = (draw(kind, logits, range(parity, 2 * count, 2), seed=9) for parity in (0, 1))
    of_other = draw(kind, logits, range(0, 2 * count, 2), seed=9, choice=1)
    for mates in (at_odd, of_other):
        pairs = [4 * place[one] + place[other] for one, other in zip(at_even, mates, strict=True)]
        counts = np.bincount(pairs, minlength=16)
        assert ((counts - count / 16) ** 2 / (count / 16)).sum() < 41
