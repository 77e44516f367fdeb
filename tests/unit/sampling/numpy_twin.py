"""Draws in numpy, by whole sorts and one id at a time: what workers/kernels is compared with, to the last bit.

Written from the definitions in workers/kernels/gumbel_noise.py and sampling_ops.py; shares nothing with them.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Unsigned = npt.NDArray[np.uint64]
LOW = np.uint64(0xFFFFFFFF)
F = np.float32


def philox4x32(counter: list[Unsigned], key: tuple[int, int], rounds: int = 10) -> list[Unsigned]:
    """Four words for each counter; products of 32-bit numbers cannot leave 64 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0), (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & LOW, p0 & LOW
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def random_words(seed: int, choice: int, position: int, vocab: int) -> npt.NDArray[np.uint32]:
    ids = np.arange(vocab, dtype=np.uint64)
    counters = ids // np.uint64(64) * np.uint64(16) + ids % np.uint64(16)
    same = np.ones_like(ids)
    counter = [same * np.uint64(position), same * np.uint64(choice), counters, same * np.uint64(0)]
    words = np.stack(philox4x32(counter, (seed % 2**32, seed >> 32)))
    which = (ids // np.uint64(16) % np.uint64(4)).astype(np.int64)
    return words[which, np.arange(vocab)].astype(np.uint32)


def logarithm(power: npt.NDArray[np.int32], f: Floats) -> Floats:
    """ln(2^power * (1 + f))."""
    ratio = np.full_like(f, F(0.08561437))
    for factor in (-0.16933757, 0.20627064, -0.25044364, 0.33318055, -0.49999198, 1.0):
        ratio = ratio * f + F(factor)
    return power.astype(F) * F(np.log(2)) + ratio * f


def split(y: Floats) -> tuple[npt.NDArray[np.int32], Floats]:
    """y = 2^power * (1 + f), f in [-1/4, 1/2)."""
    mantissa, power = np.frexp(y)  # in [1/2, 1)
    small = mantissa < F(0.75)
    return np.where(small, power - 1, power), np.where(small, mantissa * F(2), mantissa) - F(1)


def noise_of(words: npt.NDArray[np.uint32]) -> Floats:
    v = np.minimum((words.astype(F) + F(0.5)) / F(2**32), np.nextafter(F(1), F(0)))
    power, f = split(F(1) - v)
    waited = -logarithm(power, np.where(power == 0, -v, f))
    return -logarithm(*split(waited))


def noise(seed: int, choice: int, position: int, vocab: int) -> Floats:
    return noise_of(random_words(seed, choice, position, vocab))


def weights(exponents_V: Floats) -> Floats:
    """Multiples of 2^-34."""
    power = np.maximum(exponents_V, F(-80)) * F(1.44269504)
    whole = np.rint(power)
    f = power - whole
    p = np.full_like(f, F(1.32647273e-3))
    for factor in (9.67151279e-3, 5.55073374e-2, 2.40222421e-1, 6.93146978e-1, 1.0):
        p = p * f + F(factor)
    w = np.ldexp(p, whole.astype(np.int32))
    return np.where(w >= F(2**-11), w, np.rint(w.astype(np.float64) * 2**34) / 2**34).astype(F)


def exponents(logits_V: Floats, temperature: float = 1.0) -> Floats:
    return (logits_V - logits_V.max()) * (F(1) / F(temperature))


def lowest(exponents_V: Floats, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> float:
    """The least exponent that a row keeps. Sums are exact in float64, from the greatest weight down."""
    least = F(np.log(min_p)) if min_p else F(-np.inf)
    ordered = np.sort(exponents_V)[::-1]
    if top_k:
        least = max(least, ordered[min(top_k, len(ordered)) - 1])
    if top_p < 1:
        left = exponents_V[exponents_V >= least]
        its = weights(left)
        descending = np.sort(its)[::-1]
        ends = np.cumsum(descending.astype(np.float64))
        edge = descending[min(np.searchsorted(ends, top_p * ends[-1]), len(descending) - 1)]
        least = left[its >= edge].min()
    return float(least)


def draw(
    logits_V: Floats,
    *,
    seed: int = 0,
    choice: int = 0,
    position: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    with np.errstate(invalid="ignore", over="ignore"):
        of_V = exponents(logits_V, temperature)
        scores = of_V + noise(seed, choice, position, len(logits_V))
    scores[of_V < lowest(of_V, top_k, top_p, min_p)] = -np.inf
    return int(np.argmax(scores))
