"""Tokens from logits: the best one, or a draw from what min-p, top-k and top-p leave; a Protocol and its torch twin.

    exponent = (logit - best logit) * factor             float32, factor = 1 / temperature: the best token's is 0
    weight   = exp(exponent)                             so the best token's is 1, and nothing is normalized
    token    = argmax of exponent + noise                noise: gumbel_noise.py; of equal sums the lower id

Every truncation keeps {id: exponent >= lowest}: ties at the border stay together, so the outcome depends on no sort
order, and nothing is sorted. Order as in vLLM's V1 sampler: min-p, top-k, top-p. min_p: at least the logarithm of it.
top_k: the k best, ties included. top_p: the fewest best ones whose share of what is left reaches top_p, and one at
least. Weights are multiples of 2^-34 of float32 operations that are rounded once each, so their sums in float64 are
exact: every implementation, in whatever order it adds, draws the same token from the same logits.

Called by workers/sampling/sampler.py; compiled for CPUs in cpu_sampling.py, for GPUs in triton/sampling. S
rows of a step, R of them random, V vocabulary, B buckets.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.kernels.gumbel_noise import gumbel_noise
from tandem.workers.kernels.logit_edits import LogitEdits, RowTokens
from tandem.workers.kernels.sampling_rules import SamplingRules
from tandem.workers.kernels.step_arrays import Send, Sent

DIGITS: Final = ((20, 11), (10, 10), (0, 10))
"""Shift and width of the three digits of a float's bits, sign apart."""
INFINITY_BITS: Final = 0x7F800000
EXP2: Final = (1.32647273e-3, 9.67151279e-3, 5.55073374e-2, 2.40222421e-1, 6.93146978e-1, 1.0)
"""2^f for f in [-1/2, 1/2], the highest power first."""
GRID: Final = 2.0**-11
"""The least weight that is a multiple of 2^-34 by itself; smaller ones are rounded to such."""
TOGETHER: Final = 2**21
"""Logits, or buckets, that are searched or drawn at once, which bounds the twin's memory to 48 bytes for each."""

Change = Callable[[torch.Tensor], None]
"""Changes logits [S, V], float32, in place."""
DrawTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Overwrites ids_S where a token is drawn, given logits_SV, best_S and ids_S as best() gives them, and positions_S,
int64 on the logits' device. A row whose best logit is not finite gets some id."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of a step, on the host: numpy arrays [R], contiguous."""

    places: npt.NDArray[np.int64]  # distinct rows of the logits
    factor: npt.NDArray[np.float32]  # 1 / temperature; 0 for choose_all(), where the best token is taken
    lowest: npt.NDArray[np.float32]  # the logarithm of min_p; -inf: off
    top_k: npt.NDArray[np.int64]  # 0: off
    top_p: npt.NDArray[np.float64]  # 1: off
    seed: npt.NDArray[np.uint64]
    choice: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls,
        places: npt.NDArray[np.int64],
        temperature: npt.NDArray[np.float64],
        top_k: npt.NDArray[np.int64],
        top_p: npt.NDArray[np.float64],
        min_p: npt.NDArray[np.float64],
        seed: npt.NDArray[np.uint64],
        choice: npt.NDArray[np.int64],
    ) -> "Draws":
        """Returns the draws of rows with these parameters; temperature is above 0, min_p 0 where it is off."""
        with np.errstate(divide="ignore"):
            lowest = np.log(min_p).astype(np.float32)
        factor = np.float32(1) / temperature.astype(np.float32)
        return cls(places, factor, lowest, top_k, top_p, seed, choice)


class SamplingOps(Protocol):
    """An implementation for the logits' device. What it gives for a row depends on that row alone."""

    def best(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the greatest logit of each row, float32 [S], and its first id, int64 [S]. NaN and some id for a row
        with NaN. Rows may have a stride."""
        ...

    def prepare_draw(self, draws: Draws, send: Send) -> DrawTokens:
        """Returns what draws these tokens once the arrays that it sends have arrived."""
        ...

    def prepare_keep(self, places_P: npt.NDArray[np.int64], bits_PW: npt.NDArray[np.uint32], send: Send) -> Change:
        """Returns what makes minus infinity of the logits whose bits are 0, in the rows places_P; bit i % 32 of word
        i / 32 is of token i. send: as above."""
        ...


@runtime_checkable
class FixedSampling(SamplingOps, Protocol):
    """SamplingOps that edit logits and draw for any mix of rows by one sequence of calls, which a graph may hold."""

    def edit_all(
        self,
        logits_SV: torch.Tensor,
        tokens: RowTokens,
        edits: LogitEdits[torch.Tensor],
        counts_SV: torch.Tensor,
        rules: SamplingRules[torch.Tensor] | None = None,
    ) -> None:
        """Changes the logits of all places. counts_SV: int32 zeros, for its use; they are zeros again behind it.
        rules: carried out behind entries."""
        ...

    def choose_all(
        self,
        logits_SV: torch.Tensor,
        best_S: torch.Tensor,
        ids_S: torch.Tensor,
        positions_S: torch.Tensor,
        rows: "RandomRows",
    ) -> None:
        """Overwrites ids_S of rows whose factor is not 0. rows: all of them, in order."""
        ...

    def greatest(
        self,
        part_SV: torch.Tensor,
        first_id: int,
        best_S: torch.Tensor,
        positions_S: torch.Tensor,
        rows: "RandomRows",
    ) -> torch.Tensor:
        """Returns the bits of the greatest sum of exponent and noise, and its first token, int32 [S, 2], of a part of
        the vocabulary that begins with first_id; of rows whose factor is 0 anything. best_S: of the whole vocabulary.
        rows: as above; they have no top-k or top-p."""
        ...


class TorchSampling:
    """The twin, for any device."""

    def best(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = logits_SV.max(dim=-1)
        return best.values, best.indices

    def prepare_draw(self, draws: Draws, send: Send) -> DrawTokens:
        rows = RandomRows.sent(draws, send)
        truncation = Truncation(draws, rows, send)

        def draw(logits_SV: torch.Tensor, best_S: torch.Tensor, ids_S: torch.Tensor, positions_S: torch.Tensor) -> None:
            lowest_R = truncation.lowest(logits_SV, best_S)
            self.choose(logits_SV, best_S, ids_S, positions_S, rows, lowest_R)

        return draw

    def choose(
        self,
        logits_SV: torch.Tensor,
        best_S: torch.Tensor,
        ids_S: torch.Tensor,
        positions_S: torch.Tensor,
        rows: "RandomRows",
        lowest_R: torch.Tensor,
    ) -> None:
        """Overwrites ids_S of the rows whose factor is not 0, given the least exponent that each keeps."""
        columns = (rows.at(), rows.factor(), lowest_R, rows.seed(), rows.choice())
        for at, factor, lowest, seed, choice in _in_parts(columns, logits_SV.shape[1]):
            scores = exponents(logits_SV, best_S, at, factor)
            scores.masked_fill_(scores < lowest[:, None], float("-inf"))
            scores += gumbel_noise(seed, choice, positions_S[at], logits_SV.shape[1])
            ids_S[at] = torch.where(factor == 0, ids_S[at], scores.argmax(1))

    def greatest(
        self,
        part_SV: torch.Tensor,
        first_id: int,
        best_S: torch.Tensor,
        positions_S: torch.Tensor,
        rows: "RandomRows",
    ) -> torch.Tensor:
        columns, end = (
            (rows.at(), rows.factor(), rows.lowest(), rows.seed(), rows.choice()),
            first_id + part_SV.shape[1],
        )
        found = []
        for at, factor, lowest, seed, choice in _in_parts(columns, end):
            scores = exponents(part_SV, best_S, at, factor)
            scores.masked_fill_(scores < lowest[:, None], float("-inf"))
            scores += gumbel_noise(seed, choice, positions_S[at], end)[:, first_id:]
            ids = scores.argmax(1, keepdim=True)
            found.append(torch.cat((scores.gather(1, ids).view(torch.int32), (ids + first_id).int()), 1))
        return torch.cat(found)

    def prepare_keep(self, places_P: npt.NDArray[np.int64], bits_PW: npt.NDArray[np.uint32], send: Send) -> Change:
        at, words = send(places_P), send(bits_PW.view(np.int32))

        def keep(logits_SV: torch.Tensor) -> None:
            shifts = torch.arange(32, dtype=torch.int32, device=logits_SV.device)
            kept_PV = ((words()[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : logits_SV.shape[1]]
            logits_SV[at()] = logits_SV[at()].masked_fill_(kept_PV.logical_not_(), float("-inf"))

        return keep


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Columns of the draws on their way to the device. seed: its bits as int64."""

    at: Sent
    factor: Sent
    lowest: Sent
    top_k: Sent
    top_p: Sent
    seed: Sent
    choice: Sent

    @classmethod
    def sent(cls, draws: Draws, send: Send) -> "RandomRows":
        """Sends the columns."""
        seed = draws.seed.view(np.int64)
        columns = (draws.places, draws.factor, draws.lowest, draws.top_k, draws.top_p, seed, draws.choice)
        return cls(*(send(column) for column in columns))


class Truncation:
    """Bounds that truncate some rows, on their way to the device."""

    def __init__(self, draws: Draws, rows: RandomRows, send: Send) -> None:
        limited, nucleus = np.flatnonzero(draws.top_k), np.flatnonzero(draws.top_p < 1)
        self._lowest = rows.lowest
        self._limited = self._sent(draws, limited, draws.top_k.astype(np.float64), send)
        self._nucleus = self._sent(draws, nucleus, draws.top_p, send)

    def lowest(self, logits_SV: torch.Tensor, best_S: torch.Tensor) -> torch.Tensor:
        """Returns the least exponent that each row keeps, float32 [R]."""
        lowest_R, vocab = self._lowest().clone(), logits_SV.shape[1]
        for which, most, at, factor in _in_parts([column() for column in self._limited], vocab):
            kth_R = kth_greatest(exponents(logits_SV, best_S, at, factor), most)
            lowest_R[which] = torch.maximum(lowest_R[which], kth_R)
        for which, share, at, factor in _in_parts([column() for column in self._nucleus], vocab):
            lowest_R[which] = nucleus_edge(exponents(logits_SV, best_S, at, factor), lowest_R[which], share)
        return lowest_R

    @staticmethod
    def _sent(
        draws: Draws, which: npt.NDArray[np.int64], limits: npt.NDArray[np.float64], send: Send
    ) -> tuple[Sent, ...]:
        if not len(which):
            return ()
        return send(which), send(limits[which]), send(draws.places[which]), send(draws.factor[which])


def _in_parts(columns: Sequence[torch.Tensor], vocab: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields columns of rows, of as many rows at a time as are worked on together."""
    rows = max(1, TOGETHER // max(vocab, 2 ** DIGITS[0][1]))
    return zip(*(column.split(rows) for column in columns), strict=True)


def exponents(
    logits_SV: torch.Tensor, best_S: torch.Tensor, at_R: torch.Tensor, factor_R: torch.Tensor
) -> torch.Tensor:
    """Returns the exponents of some rows, a new tensor."""
    return (logits_SV[at_R] - best_S[at_R][:, None]).mul_(factor_R[:, None])


def weights(exponents_RV: torch.Tensor) -> torch.Tensor:
    """Returns the weights of exponents, as multiples of 2^-34: 2^power by a power of two and a polynomial, relative
    error 2e-6. The operations are those of weight_of() in cpu/src/cpu_sampling.c, each rounded once."""
    power = exponents_RV.clamp(min=-80.0).mul_(1.44269504)
    whole = (power + 12582912.0).sub_(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer
    f = power.sub_(whole)
    p = torch.full_like(f, EXP2[0])
    for factor in EXP2[1:]:
        p.mul_(f).add_(factor)
    p.mul_(((whole.int() + 127) << 23).view(torch.float32))
    return torch.where(p >= GRID, p, (p + GRID) - GRID)


def kth_greatest(exponents_RV: torch.Tensor, count_R: torch.Tensor) -> torch.Tensor:
    """Returns the count-th greatest exponent of each row. count_R: float64."""
    keys_RV = INFINITY_BITS - exponents_RV.abs().view(torch.int32)
    most_R1 = count_R.clamp(max=exponents_RV.shape[1])[:, None]
    kth_R = _cut(keys_RV, torch.ones_like(exponents_RV, dtype=torch.float64), most_R1)
    return -(INFINITY_BITS - kth_R).view(torch.float32)


def nucleus_edge(exponents_RV: torch.Tensor, lowest_R: torch.Tensor, share_R: torch.Tensor) -> torch.Tensor:
    """Returns the least of the fewest best exponents whose weights reach a share of those from `lowest` on, float64.
    Overwrites the exponents."""
    weights_RV = weights(exponents_RV).masked_fill_(exponents_RV < lowest_R[:, None], 0.0)
    mass_RV = weights_RV.double()
    least_R = _cut(weights_RV.view(torch.int32), mass_RV, share_R[:, None] * mass_RV.sum(1, keepdim=True))
    return exponents_RV.masked_fill_(weights_RV < least_R.view(torch.float32)[:, None], float("inf")).amin(1)


def _cut(bits_RV: torch.Tensor, measure_RV: torch.Tensor, target_R1: torch.Tensor) -> torch.Tensor:
    """Returns the greatest value whose equals and betters have a measure (float64) of at least the target, int32 [R];
    0 where all together do not. bits_RV: values, int32, not negative.

    Radix selection: the measure of each value of a digit, then of the next one among values that share the chosen.
    """
    chosen_R1 = torch.zeros_like(target_R1, dtype=torch.int32)
    above_R1 = torch.zeros_like(target_R1)
    for shift, width in DIGITS:
        inside_RV = (bits_RV >> (shift + width)) == chosen_R1
        digit_RV = ((bits_RV >> shift) & (2**width - 1)).long()
        per_RB = torch.zeros(len(bits_RV), 2**width, dtype=torch.float64, device=bits_RV.device)
        per_RB.scatter_add_(1, digit_RV, measure_RV * inside_RV)
        from_RB = per_RB.flip(1).cumsum(1).flip(1) + above_R1
        place_R1 = ((from_RB >= target_R1).sum(1, keepdim=True) - 1).clamp_(min=0)
        above_R1 = from_RB.gather(1, place_R1) - per_RB.gather(1, place_R1)
        chosen_R1 = (chosen_R1 << width) | place_R1.int()
    return chosen_R1[:, 0]
