"""Acceptance: how many of a student's guesses the target keeps, place by place, on answers that it did not learn from.

The answers' own draws are repeated: the target chose token t as argmax(logits / temperature + noise(seed, t)), and a
student guesses by the same noise with its own logits (workers/kernels/gumbel_noise.py), greedily at temperature 0. A
guess is kept where it equals the answer's token and all before it in the chain did: this is what serving counts, to the
token. Steps go on behind what was kept, so they begin more often where guessing is hard than a token does: tokens a
step are counted by walking the answers as serving does. Bound: of rejection sampling, the mean of sum(min(p, q)), which
no way to accept exceeds (Leviathan et al. 2023).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from tandem.workers.distill.own_answers import JUDGED_TEMPERATURES, Answer, Say
from tandem.workers.distill.student import Student, shifted
from tandem.workers.distill.target_model import AnswerStates, TargetModel
from tandem.workers.distill.training import BATCH_TOKENS, SAY_S, by_tokens
from tandem.workers.kernels.gumbel_noise import gumbel_noise

NOISE_ROWS: Final = 64
"""Rows whose noise is made at a time, which bounds its memory."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of guesses that are kept at one temperature. places: by place, the share of chains whose guesses up to it
    all are. tokens: that a step of the target gives, on average, with 1, 2.. guesses. bound: of the first place; None
    for greedy answers. chains: how many were begun."""

    temperature: float
    places: tuple[float, ...]
    tokens: tuple[float, ...]
    bound: float | None
    chains: int

    def as_json(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "acceptance_by_place": list(self.places),
            "tokens_per_step": self.tokens[-1],
            "tokens_by_guesses": list(self.tokens),
            "rejection_bound": self.bound,
            "chains": self.chains,
        }


class _ChainCounts:
    """Sums over the answers of one temperature."""

    def __init__(self, places: int) -> None:
        self.kept = [0] * places
        self.begun = [0] * places
        self.bound = 0.0
        self.steps = [0] * places
        self.tokens = [0] * places

    def walk(self, kept_W: Sequence[int], first: int, last: int) -> None:
        """Adds the steps of one answer, by the most guesses of a step. kept_W: guesses behind each token that are kept;
        first, last: tokens behind which a step may begin."""
        for place in range(len(self.steps)):
            at = first
            while at <= last:
                given = min(1 + min(kept_W[at], place + 1), last + 1 - at)
                self.steps[place] += 1
                self.tokens[place] += given
                at += given


@torch.no_grad()
def measure(
    student: Student, target: TargetModel, answers: Sequence[Answer], places: int, say: Say
) -> list[Acceptance]:
    """Returns the acceptance at each temperature that there are answers of. say: takes lines about progress."""
    found, judged, said_s = [], 0, time.monotonic()
    for temperature in JUDGED_TEMPERATURES:
        own = [one for one in answers if one.temperature == temperature]
        counts = _ChainCounts(places)
        for part in by_tokens(sorted(own, key=lambda one: len(one.ids)), BATCH_TOKENS):
            _count(counts, student, target, part, target.states(part, student.taps))
            judged += len(part)
            if time.monotonic() - said_s >= SAY_S:
                said_s = time.monotonic()
                say(f"guessing answers that were kept out: {judged:,} of {len(answers):,}")
        if counts.begun[0]:
            shares = tuple(kept / max(1, begun) for kept, begun in zip(counts.kept, counts.begun, strict=True))
            tokens = tuple(given / steps for given, steps in zip(counts.tokens, counts.steps, strict=True))
            bound = counts.bound / counts.begun[0] if temperature else None
            found.append(Acceptance(temperature, shares, tokens, bound, counts.begun[0]))
    return found


def _count(
    counts: _ChainCounts, student: Student, target: TargetModel, answers: Sequence[Answer], states: AnswerStates
) -> None:
    """Adds the chains of some answers, all of one temperature."""
    temperature = answers[0].temperature
    kept_BW = inside_BW = states.chains_BW
    length_BW = torch.zeros_like(states.ids_BW)
    for place, hidden_BWH in enumerate(student.hidden(states, len(counts.kept))):
        inside_BW = inside_BW & shifted(states.chains_BW, place)
        if not inside_BW.any():
            break
        row_N, start_N = inside_BW.nonzero(as_tuple=True)
        logits_NV = student.logits(hidden_BWH[inside_BW], place).float()
        seeds_N = torch.tensor([one.seed for one in answers], device=row_N.device)[row_N]
        guesses_N = _guesses(logits_NV, student.ids, temperature, seeds_N, start_N + place + 1, target.spec.vocab_size)
        right_BW = torch.zeros_like(kept_BW)
        right_BW[inside_BW] = guesses_N == shifted(states.ids_BW, place + 1)[inside_BW]
        kept_BW = kept_BW & right_BW
        length_BW += kept_BW
        counts.kept[place] += int(kept_BW.sum())
        counts.begun[place] += int(inside_BW.sum())
        if place == 0 and temperature:
            theirs_NV = target.logits(states.final_BWH[inside_BW])
            counts.bound += _bound(logits_NV, theirs_NV, student.ids, temperature)
    for kept_W, begins_W in zip(length_BW.tolist(), states.chains_BW, strict=True):
        if begins := begins_W.nonzero().flatten().tolist():
            counts.walk(kept_W, begins[0], begins[-1])


def _guesses(
    logits_NV: torch.Tensor,
    ids: torch.Tensor | None,
    temperature: float,
    seeds_N: torch.Tensor,
    positions_N: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Returns the target's ids of a student's guesses, drawn as the sampler draws. positions_N: of the tokens that are
    guessed, in their sequences."""
    if not temperature:
        places_N = logits_NV.argmax(-1)
    else:
        factor = torch.tensor(1.0) / torch.tensor(temperature, dtype=torch.float32)
        exponent_NV = (logits_NV - logits_NV.amax(-1, keepdim=True)) * factor
        places = []
        for rows in _rows(len(logits_NV)):
            noise_NV = gumbel_noise(seeds_N[rows], torch.zeros_like(seeds_N[rows]), positions_N[rows], vocab_size)
            noise_NV = noise_NV if ids is None else noise_NV[:, ids.to(noise_NV.device)]
            places.append((exponent_NV[rows] + noise_NV).argmax(-1))
        places_N = torch.cat(places)
    return places_N if ids is None else ids.to(places_N.device)[places_N]


def _rows(count: int) -> Iterator[slice]:
    return (slice(start, start + NOISE_ROWS) for start in range(0, count, NOISE_ROWS))


def _bound(own_NV: torch.Tensor, theirs_NV: torch.Tensor, ids: torch.Tensor | None, temperature: float) -> float:
    """Returns the sum over rows of what a student's and the target's distributions have in common."""
    theirs_NV = (theirs_NV / temperature).softmax(-1)
    theirs_NV = theirs_NV if ids is None else theirs_NV[:, ids.to(theirs_NV.device)]
    return float(torch.minimum((own_NV / temperature).softmax(-1), theirs_NV).sum())
