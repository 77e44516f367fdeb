"""Tokens from logits: the best one, or a draw from what min-p, top-k and top-p leave; a Protocol and its torch twin.

    weight = exp((logit - best logit) / temperature)        float32: the best token's is 1, so nothing is normalized

Every truncation keeps {id: weight >= threshold}: ties at the border stay together, so the outcome depends on no sort
order, and nothing is sorted. Order as in vLLM's V1 sampler: min-p, top-k, top-p. min_p: at least min_p times the best
weight. top_k: the k best, ties included. top_p: the fewest best ones whose share of what is left reaches top_p, and one
at least. Then an inverse CDF over ids in ascending order: the first id whose cumulative weight exceeds u times the
total.

Called by workers/sampling/sampler.py; compiled for CPUs in cpu_sampling.py. S rows of a step, R of them random, V
vocabulary, C chunk, N chunks, B buckets.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.kernels.step_arrays import Send, Sent

CHUNK: Final = 128
DIGIT_BITS: Final = 10
SHIFTS: Final = (20, 10, 0)
"""Shifts of the three digits of a weight's bits; a weight is at most 1, whose bits are below 2^30."""
MASS_ONE: Final = 2.0**44
"""The mass of weight 1 as an integer: sums of up to 2^18 of them are exact, so they depend on no order."""
CUT_ROWS: Final = 32
"""Rows whose thresholds are searched at once, which bounds the twin's memory to 28 bytes times these times V."""

Change = Callable[[torch.Tensor], None]
"""Changes logits [S, V], float32, in place."""
DrawTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Overwrites ids_S where a token is drawn, given logits_SV, best_S, ids_S and uniforms_R (float64 in [0, 1), on the
logits' device); may overwrite those rows of the logits. A row whose best logit is not finite gets some id."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of a step, on the host: numpy arrays [R], contiguous."""

    places: npt.NDArray[np.int64]  # distinct rows of the logits
    temperature: npt.NDArray[np.float32]  # above 0
    top_k: npt.NDArray[np.int64]  # 0: off
    top_p: npt.NDArray[np.float64]  # 1: off
    min_p: npt.NDArray[np.float32]  # 0: off


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


class TorchSampling:
    """The twin, for any device."""

    def best(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = logits_SV.max(dim=-1)
        return best.values, best.indices

    def prepare_draw(self, draws: Draws, send: Send) -> DrawTokens:
        at, temperature = send(draws.places), send(draws.temperature)
        truncation = None
        if draws.min_p.any() or draws.top_k.any() or (draws.top_p < 1).any():
            truncation = Truncation(draws.top_k, draws.top_p, draws.min_p, send)

        def draw(logits_SV: torch.Tensor, best_S: torch.Tensor, ids_S: torch.Tensor, uniforms_R: torch.Tensor) -> None:
            at_R = at()
            weights_RV = (logits_SV[at_R] - best_S[at_R][:, None]).div_(temperature()[:, None]).exp_()
            if truncation is not None:
                floor_R = truncation.thresholds(weights_RV)
                weights_RV.masked_fill_(weights_RV < floor_R[:, None], 0.0)
            ids_S[at_R] = drawn(weights_RV, uniforms_R)

        return draw

    def prepare_keep(self, places_P: npt.NDArray[np.int64], bits_PW: npt.NDArray[np.uint32], send: Send) -> Change:
        at, words = send(places_P), send(bits_PW.view(np.int32))

        def keep(logits_SV: torch.Tensor) -> None:
            shifts = torch.arange(32, dtype=torch.int32, device=logits_SV.device)
            kept_PV = ((words()[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : logits_SV.shape[1]]
            logits_SV[at()] = logits_SV[at()].masked_fill_(kept_PV.logical_not_(), float("-inf"))

        return keep


class Truncation:
    """Bounds that truncate some rows, on their way to the device."""

    def __init__(
        self,
        top_k_R: npt.NDArray[np.int64],
        top_p_R: npt.NDArray[np.float64],
        min_p_R: npt.NDArray[np.float32],
        send: Send,
    ) -> None:
        limited, nucleus = np.flatnonzero(top_k_R), np.flatnonzero(top_p_R < 1)
        self._floor = send(min_p_R.astype(np.float32))
        self._limited = (send(limited), send(top_k_R[limited].astype(np.float64))) if len(limited) else None
        self._nucleus = (send(nucleus), send(top_p_R[nucleus])) if len(nucleus) else None

    def thresholds(self, weights_RV: torch.Tensor) -> torch.Tensor:
        """Returns the least weight that each row keeps, float32 [R]."""
        floor_R = self._floor().clone()
        for at, most in _in_parts(self._limited):
            some_RV = weights_RV[at]
            most = most.clamp(max=weights_RV.shape[1])
            kth_R = _cut(some_RV, torch.ones_like(some_RV, dtype=torch.int64), most[:, None])
            floor_R[at] = torch.maximum(floor_R[at], kth_R)
        for at, share in _in_parts(self._nucleus):
            some_RV = weights_RV[at]
            some_RV.masked_fill_(some_RV < floor_R[at][:, None], 0.0)
            mass_RV = (some_RV.double() * MASS_ONE).long()
            target_R1 = share[:, None] * mass_RV.sum(1, keepdim=True)
            floor_R[at] = torch.maximum(floor_R[at], _cut(some_RV, mass_RV, target_R1))
        return floor_R


def _in_parts(rows: tuple[Sent, Sent] | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields places and limits of at most CUT_ROWS rows at a time."""
    if rows is not None:
        yield from zip(rows[0]().split(CUT_ROWS), rows[1]().split(CUT_ROWS), strict=True)


def _cut(weights_RV: torch.Tensor, measure_RV: torch.Tensor, target_R1: torch.Tensor) -> torch.Tensor:
    """Returns the greatest weight whose equals and betters have a measure (int64) of at least the target, float32 [R];
    0 where all together do not.

    Radix selection: the measure of each value of a digit, then of the next one among weights that share the chosen.
    """
    bits_RV = weights_RV.contiguous().view(torch.int32)
    chosen_R1 = torch.zeros_like(target_R1, dtype=torch.int64)
    above_R1 = torch.zeros_like(chosen_R1)
    for shift in SHIFTS:
        inside_RV = (bits_RV >> (shift + DIGIT_BITS)) == chosen_R1
        digit_RV = ((bits_RV >> shift) & (2**DIGIT_BITS - 1)).long()
        per_RB = torch.zeros(len(bits_RV), 2**DIGIT_BITS, dtype=torch.int64, device=bits_RV.device)
        per_RB.scatter_add_(1, digit_RV, measure_RV * inside_RV)
        from_RB = per_RB.flip(1).cumsum(1).flip(1) + above_R1
        place_R1 = ((from_RB >= target_R1).sum(1, keepdim=True) - 1).clamp_(min=0)
        above_R1 = from_RB.gather(1, place_R1) - per_RB.gather(1, place_R1)
        chosen_R1 = (chosen_R1 << DIGIT_BITS) | place_R1
    return chosen_R1[:, 0].int().view(torch.float32)


def drawn(weights_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Returns a token per row by inverse CDF, int64 [R]; some id for a row with NaN. uniforms_R: float64.

    Two levels (sums of 128 weights, then the weights of one such chunk, both in float64): one pass over the row and no
    cumulative sum of it.
    """
    ends_RN = _chunk_sums(weights_RV).cumsum(1)
    total_R1 = ends_RN[:, -1:]
    target_R1 = torch.minimum(uniforms_R[:, None] * total_R1, total_R1 * (1 - 2.0**-52))
    vocab = weights_RV.shape[1]
    chunk_R1 = (ends_RN <= target_R1).sum(1, keepdim=True).clamp_(max=ends_RN.shape[1] - 1)
    before_R1 = torch.where(chunk_R1 > 0, ends_RN.gather(1, (chunk_R1 - 1).clamp(min=0)), 0.0)
    offsets_C = torch.arange(CHUNK, device=weights_RV.device)
    ids_RC = chunk_R1 * CHUNK + offsets_C
    part_RC = weights_RV.gather(1, ids_RC.clamp(max=vocab - 1)).double().masked_fill_(ids_RC >= vocab, 0.0)
    place_R = (part_RC.cumsum(1) + before_R1 <= target_R1).sum(1)
    last_R = torch.where(part_RC > 0, offsets_C, 0).amax(1)  # rounding between the levels must not leave the chunk
    return chunk_R1[:, 0] * CHUNK + torch.minimum(place_R, last_R)


def _chunk_sums(weights_RV: torch.Tensor) -> torch.Tensor:
    """Returns sums of CHUNK consecutive ids, the last one maybe shorter: float64 [R, N]."""
    vocab = weights_RV.shape[1]
    whole = vocab // CHUNK
    parts = [weights_RV[:, : whole * CHUNK].unflatten(1, (whole, CHUNK)).sum(-1)] if whole else []
    if vocab % CHUNK:
        parts.append(weights_RV[:, whole * CHUNK :].sum(-1, keepdim=True))
    return torch.cat(parts, 1).double()
