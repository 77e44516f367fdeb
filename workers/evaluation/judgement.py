"""Judgement: what rows of log probabilities say of a model, token by token, beside those of a reference.

N tokens that are scored, V vocabulary. All logarithms are natural; KL is from the reference to the judged model,
sum(p * (log p - log q)), in nats.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
ROW_BYTES = 64 * 2**20
"""Size of rows that are compared at once."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores by token, in the order of the windows. text, position: where it stands. logprob: its own. best: the
    judged model's first choice. Beside a reference: kl, the reference's log probability and its first choice."""

    text_N: Ints
    position_N: Ints
    token_N: Ints
    logprob_N: Floats
    best_N: Ints
    kl_N: Floats | None
    ref_logprob_N: Floats | None
    ref_best_N: Ints | None


@dataclass(frozen=True, slots=True)
class Against:
    """Figures that a reference adds. agreement: the share of tokens at which both have the same first choice."""

    perplexity: float
    mean_kl: float
    median_kl: float
    p99_kl: float
    max_kl: float
    agreement: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Figures of a model on a text. bits_per_byte: None where no byte was scored."""

    tokens: int
    perplexity: float
    bits_per_byte: float | None
    against: Against | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def scores_of_rows(
    logprobs_NV: torch.Tensor, next_N: torch.Tensor, ref_NV: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Returns [logprob, best], and with a reference [kl, ref_logprob, ref_best], each [N], float64 or int64.

    logprobs_NV, ref_NV: float32 log-softmax of both models' logits. next_N: int64, the tokens that came.
    """
    found = [logprobs_NV.gather(1, next_N[:, None])[:, 0].double(), logprobs_NV.argmax(dim=1)]
    if ref_NV is None:
        return found
    terms_NV = (ref_NV - logprobs_NV).mul_(ref_NV.exp())
    terms_NV.masked_fill_(ref_NV == -math.inf, 0.0)  # 0 * log 0 is 0
    kl_N = terms_NV.sum(dim=1, dtype=torch.float64)
    return [*found, kl_N, ref_NV.gather(1, next_N[:, None])[:, 0].double(), ref_NV.argmax(dim=1)]


class Judgement:
    """Takes rows window by window; keeps a few numbers of each token."""

    def __init__(self) -> None:
        self._where: list[tuple[int, int, int]] = []
        self._columns: list[list[torch.Tensor]] = []

    def add(
        self,
        text: int,
        position: int,
        next_ids: Sequence[int],
        logprobs_NV: torch.Tensor,
        ref_NV: torch.Tensor | None = None,
    ) -> None:
        """Takes the rows that predict next_ids, which stand at `position` of a text and behind it. The rows may be
        mapped files: they are read in pieces of ROW_BYTES. ValueError for rows of another number or vocabulary."""
        rows = (len(next_ids), logprobs_NV.shape[1])
        if logprobs_NV.shape != rows or (ref_NV is not None and ref_NV.shape != rows):
            raise ValueError(
                f"{len(next_ids)} tokens, rows of {logprobs_NV.shape} and {getattr(ref_NV, 'shape', None)}"
            )
        next_N = torch.tensor(next_ids, dtype=torch.int64)
        size = max(1, ROW_BYTES // (4 * rows[1]))
        for first in range(0, len(next_ids), size):
            own = slice(first, first + size)
            ref = None if ref_NV is None else ref_NV[own]
            self._columns.append(scores_of_rows(logprobs_NV[own], next_N[own], ref))
        self._where += [(text, position + index, token) for index, token in enumerate(next_ids)]

    def take(self, text: int, position: int, next_ids: Sequence[int], scores: list[torch.Tensor]) -> None:
        """Takes what scores_of_rows() would return of rows as add() takes them."""
        self._columns.append(scores)
        self._where += [(text, position + index, token) for index, token in enumerate(next_ids)]

    def scores(self) -> TokenScores:
        """Returns what was taken. ValueError for nothing."""
        if not self._where:
            raise ValueError("no token was scored")
        where = np.array(self._where, np.int64).T
        columns = [torch.cat(column).numpy() for column in zip(*self._columns, strict=True)]
        beside: list[Any] = columns[2:] or [None, None, None]
        return TokenScores(*where, *columns[:2], *beside)


def verdict_of(scores: TokenScores, num_bytes: int) -> Verdict:
    """Returns the figures. num_bytes: that the scored tokens stand for."""
    nll = -float(scores.logprob_N.sum())
    against = None
    if scores.kl_N is not None and scores.ref_logprob_N is not None:
        kl_N = scores.kl_N
        against = Against(
            perplexity=_exp(-float(scores.ref_logprob_N.mean())),
            mean_kl=float(kl_N.mean()),
            median_kl=float(np.median(kl_N)),
            p99_kl=float(np.quantile(kl_N, 0.99)),
            max_kl=float(kl_N.max()),
            agreement=float((scores.best_N == scores.ref_best_N).mean()),
        )
    count = len(scores.token_N)
    return Verdict(count, _exp(nll / count), nll / math.log(2) / num_bytes if num_bytes else None, against)


def worst_of(scores: TokenScores, count: int) -> list[int]:
    """Returns the places of the worst tokens: of the largest KL, without a reference of the smallest probability."""
    badness_N = -scores.logprob_N if scores.kl_N is None else scores.kl_N
    worst: list[int] = np.argsort(-badness_N, kind="stable")[:count].tolist()
    return worst


def _exp(value: float) -> float:
    """exp(), infinite where it does not fit."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
