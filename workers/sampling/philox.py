"""Philox4x32-10: the random numbers of sampling, as a pure function of (seed, choice, position, lane).

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Called by workers/sampling; keeps
no state, so what is drawn for a token never depends on batch mates, steps or the group that runs them. Three twins
with equal output: Python ints (the reference), numpy (the host path), torch (any device, int64 only).
"""

import numpy as np
import numpy.typing as npt
import torch

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """The reference in Python ints: four 32-bit words from a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int, lane: int = 0) -> float:
    """One number in [0, 1) with 53 random bits. Counter = (position, choice, lane, 0), key = seed modulo 2**64."""
    words = philox4x32((position & MASK, choice & MASK, lane & MASK, 0), (seed & MASK, (seed >> 32) & MASK))
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) * 2.0**-53


def uniforms(
    seeds_R: npt.NDArray[np.uint64],
    choices_R: npt.NDArray[np.int64],
    positions_R: npt.NDArray[np.int64],
    lane: int = 0,
) -> npt.NDArray[np.float64]:
    """`uniform` over rows [R] in numpy; products stay in uint64, where 32 x 32 bits cannot overflow."""
    rows = len(seeds_R)
    low = np.uint64(MASK)
    shift = np.uint64(32)
    products = np.empty((2, rows), np.uint64)
    even = np.zeros((2, rows), np.uint64)  # words 0 and 2
    odd = np.zeros((2, rows), np.uint64)  # words 1 and 3
    even[0] = positions_R
    even[1] = lane
    odd[0] = choices_R
    keys = np.stack([seeds_R & low, seeds_R >> shift])
    factors = np.array([[MULTIPLIERS[0]], [MULTIPLIERS[1]]], np.uint64)
    weyl = np.array([[WEYL[0]], [WEYL[1]]], np.uint64)
    for _ in range(ROUNDS):
        np.multiply(even, factors, out=products)
        even = (products >> shift)[::-1] ^ odd ^ keys
        odd = (products & low)[::-1]
        keys = (keys + weyl) & low
    bits = ((even[0] >> np.uint64(5)) << np.uint64(26)) + (odd[0] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


def _multiply(word_R: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of word * factor, in int64 without overflow: the factor is cut into 16-bit halves."""
    low_R = word_R * (factor & 0xFFFF)
    high_R = word_R * (factor >> 16)
    return (high_R + (low_R >> 16)) >> 16, (low_R + ((high_R & 0xFFFF) << 16)) & MASK


def uniforms_on_device(
    seeds_R: torch.Tensor, choices_R: torch.Tensor, positions_R: torch.Tensor, lane: int = 0
) -> torch.Tensor:
    """`uniform` over rows [R] in torch, float64; inputs int64 (a seed's bits as two's complement) on one device."""
    c0, c1 = positions_R & MASK, choices_R & MASK
    c2, c3 = torch.full_like(c0, lane), torch.zeros_like(c0)
    k0, k1 = seeds_R & MASK, (seeds_R >> 32) & MASK
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return ((c0 >> 5) * 2**26 + (c1 >> 6)).to(torch.float64) * 2.0**-53
