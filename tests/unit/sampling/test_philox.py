"""Philox4x32-10 against Random123's known answers, and the numpy and torch twins against the reference."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.sampling.philox import philox4x32, uniform, uniforms, uniforms_on_device

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


def test_known_answers() -> None:
    for counter, key, answer in KNOWN_ANSWERS:
        assert philox4x32(counter, key) == answer


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 127), st.integers(0, 2**31)), min_size=1, max_size=9),
    st.integers(0, 3),
)
def test_twins_are_equal(rows: list[tuple[int, int, int]], lane: int) -> None:
    seeds = np.array([r[0] for r in rows], np.uint64)
    choices, positions = (np.array([r[i] for r in rows], np.int64) for i in (1, 2))
    reference = [uniform(*row, lane) for row in rows]
    assert uniforms(seeds, choices, positions, lane).tolist() == reference
    on_device = uniforms_on_device(
        torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(choices), torch.from_numpy(positions), lane
    )
    assert on_device.tolist() == reference
    assert all(0 <= u < 1 for u in reference)


def test_numbers_are_even_and_differ_by_every_input() -> None:
    n = 40_000
    u = uniforms(np.full(n, 7, np.uint64), np.zeros(n, np.int64), np.arange(n))
    counts = np.bincount((u * 64).astype(int), minlength=64)
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 110  # chi-square, 63 degrees of freedom, p = 0.0002
    base = uniform(1, 2, 3, 0)
    assert len({base, uniform(2, 2, 3, 0), uniform(1, 3, 3, 0), uniform(1, 2, 4, 0), uniform(1, 2, 3, 1)}) == 5
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
