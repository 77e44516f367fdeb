"""Gumbel noise of sampling: a number for each token, as a pure function of (seed, choice, position, id).

    word   = Philox4x32-10, key seed, counter (position, choice, 16 * (id / 64) + id % 16, 0), word (id / 16) % 4 of it
    v      = (word + 1/2) / 2^32, below 1
    noise  = -ln(-ln(1 - v))                             -2.82 to 22.88

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Keeps no state, so a token's noise
never depends on batch mates, steps or the group that runs them. Everything is float32, each operation rounded once and
none fused: torch here, C in cpu/src/cpu_gumbel.h and Triton in triton/sampling give the same bits. Logarithms
split off the power of two by bits, leave f in [-1/4, 1/2), and take a polynomial whose relative error is 1.3e-6; 64 ids
share 16 counters, so that vectors of 16 ids need no shuffles.
"""

from typing import Final

import torch

MASK: Final = 0xFFFFFFFF
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL: Final = (0x9E3779B9, 0xBB67AE85)
ROUNDS: Final = 10
BLOCK: Final = 64
"""Ids that share LANES counters, whose four words are of LANES ids each."""
LANES: Final = 16
BELOW_ONE: Final = 1 - 2.0**-24
LEAST_BITS: Final = 0x3F400000
"""The bits of 3/4, where the numbers begin whose logarithm is taken without a power of two."""
LN2: Final = 0.6931471824645996
LOG: Final = (0.08561437, -0.16933757, 0.20627064, -0.25044364, 0.33318055, -0.49999198, 1.0)
"""ln(1 + f) / f, the highest power first."""

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Returns four 32-bit words from a 128-bit counter and a 64-bit key, in int64. Products wrap at 64 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) & MASK ^ c1 ^ k0, p1 & MASK, (p0 >> 32) & MASK ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def gumbel_noise(seeds_R: torch.Tensor, choices_R: torch.Tensor, positions_R: torch.Tensor, vocab: int) -> torch.Tensor:
    """Returns the noise of ids below `vocab` for each row, float32 [R, V]. seeds_R: a seed's bits as two's complement;
    inputs int64 on one device."""
    blocks = -(-vocab // BLOCK)
    counters_1C = torch.arange(LANES * blocks, device=seeds_R.device)[None]
    position_R1, choice_R1, seed_R1 = positions_R[:, None], choices_R[:, None], seeds_R[:, None]
    counter = (position_R1 & MASK, choice_R1 & MASK, counters_1C, torch.zeros_like(counters_1C))
    words = philox4x32(counter, (seed_R1 & MASK, (seed_R1 >> 32) & MASK))
    by_block = [word.unflatten(1, (blocks, LANES)) for word in words]
    return noise_of(torch.stack(by_block, 2).flatten(1)[:, :vocab])


def noise_of(words: torch.Tensor) -> torch.Tensor:
    """Returns the noise that 32-bit words mean, float32. words: int64."""
    v = words.float().add_(0.5).mul_(2.0**-32).clamp_(max=BELOW_ONE)
    power, f = _split(1 - v)
    waited = _log(power, torch.where(power == 0, -v, f)).neg_()
    return _log(*_split(waited)).neg_()


def _split(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float32 powers of two and f with y = 2^power * (1 + f), f in [-1/4, 1/2). y: positive."""
    bits = y.contiguous().view(torch.int32)
    power = (bits - LEAST_BITS) >> 23
    return power.float(), (bits - (power << 23)).view(torch.float32) - 1


def _log(power: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """Returns ln(2^power * (1 + f))."""
    ratio = torch.full_like(f, LOG[0])
    for factor in LOG[1:]:
        ratio.mul_(f).add_(factor)
    return power * LN2 + ratio.mul_(f)
