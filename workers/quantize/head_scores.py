"""Scores of a quantized model beside the dense one, of hidden states behind the last layer, with a part of the head in
memory at a time: the head is read once, and no row of logits is ever whole.

N tokens that are scored, P tokens of a part of the vocabulary, W tokens of a sequence, H hidden size.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

import torch

from tandem.workers.evaluation.judgement import Judgement, TokenScores
from tandem.workers.quantize.head_quantizer import QuantizedHead
from tandem.workers.quantize.layer_walk import LayerWalk, LogitsOf

HIDDEN_BYTES: Final = 2**26
"""Size of the hidden states of both models that go through the head together; one sequence's at least."""
Pair = tuple[torch.Tensor, torch.Tensor]


def scores_by_parts(
    walk: LayerWalk, judged: Sequence[Sequence[int]], streams: Iterable[Pair], head: QuantizedHead | None = None
) -> TokenScores:
    """Returns the scores of all tokens but the first of each sequence. judged: ids; streams: of each sequence the
    hidden states [W, H] of the dense and of the quantized model; head: of the quantized model, None for the same."""
    judgement = Judgement()
    count = max(1, HIDDEN_BYTES // (8 * walk.num_tokens * walk.spec.hidden_size))
    numbered = enumerate(streams)
    while some := list(islice(numbered, count)):
        states = [[walk.normed(one)[:-1] for one in pair] for _, pair in some]
        if head is not None:
            states = [[dense_NH, head.inputs(quantized_NH)] for dense_NH, quantized_NH in states]
        rows = [RunningScores(torch.tensor(judged[number][1:])) for number, _ in some]
        for first, dense_logits, logits in _heads(walk, head):
            for own, (dense_NH, quantized_NH) in zip(rows, states, strict=True):
                own.add(first, logits(quantized_NH), dense_logits(dense_NH))
        for (number, _), own in zip(some, rows, strict=True):
            judgement.take(number, 1, judged[number][1:], own.columns())
    return judgement.scores()


def _heads(walk: LayerWalk, head: QuantizedHead | None) -> Iterator[tuple[int, LogitsOf, LogitsOf]]:
    """Yields parts of both models' heads: the first token, and what makes logits of the dense and of the other."""
    if head is None:
        yield from ((first, logits, logits) for first, logits in walk.head_parts())
        return
    for (first, dense_logits), (_, logits) in zip(walk.head_parts(), walk.head_parts(head.rows), strict=True):
        yield first, dense_logits, logits


class RunningScores:
    """Scores that judgement.scores_of_rows() finds in whole rows, of logits that come part by part of the vocabulary.
    next_N: the tokens that came."""

    def __init__(self, next_N: torch.Tensor) -> None:
        self._next_N = next_N
        self._own, self._ref = _Softmax(len(next_N)), _Softmax(len(next_N))
        self._came_N, self._ref_came_N, self._change_N = (_zeros(len(next_N)) for _ in range(3))

    def add(self, first: int, own_NP: torch.Tensor, ref_NP: torch.Tensor) -> None:
        """Takes the logits of the tokens from `first` on, of the judged model and of the reference."""
        place_N = self._next_N - first
        is_here_N = (place_N >= 0) & (place_N < own_NP.shape[1])
        for logits_NP, came_N in ((own_NP, self._came_N), (ref_NP, self._ref_came_N)):
            came_N[is_here_N] = logits_NP[is_here_N, place_N[is_here_N]].double()
        self._own.add(first, own_NP)
        fell_N, weight_NP = self._ref.add(first, ref_NP)
        terms_NP = torch.where(weight_NP > 0, (ref_NP - own_NP).mul_(weight_NP), 0)  # 0 * log 0 is 0
        self._change_N.mul_(fell_N).add_(terms_NP.sum(1, dtype=torch.float64))

    def columns(self) -> list[torch.Tensor]:
        """Returns [logprob, best, kl, ref_logprob, ref_best]: KL is the mean, by the reference, of what its logits are
        above the judged model's, less the same of the logarithms of both sums."""
        own_N, ref_N = self._own.log_sum(), self._ref.log_sum()
        kl_N = self._change_N / self._ref.sum_N - (ref_N - own_N)
        return [self._came_N - own_N, self._own.best_N, kl_N, self._ref_came_N - ref_N, self._ref.best_N]


class _Softmax:
    """The sum of exp(logit - the largest) of each row, and where the largest is."""

    def __init__(self, count: int) -> None:
        self.sum_N = _zeros(count)
        self.best_N = torch.zeros(count, dtype=torch.int64)
        self._largest_N = torch.full((count,), -torch.inf)

    def add(self, first: int, logits_NP: torch.Tensor) -> Pair:
        """Returns by what sums before have fallen, [N], and exp(logit - the largest of now)."""
        largest_N, place_N = logits_NP.max(1)
        self.best_N = torch.where(largest_N > self._largest_N, place_N + first, self.best_N)
        largest_N = torch.maximum(largest_N, self._largest_N)
        fell_N = (self._largest_N - largest_N).double().exp()
        weight_NP = (logits_NP - largest_N[:, None]).exp_()
        self.sum_N.mul_(fell_N).add_(weight_NP.sum(1, dtype=torch.float64))
        self._largest_N = largest_N
        return fell_N, weight_NP

    def log_sum(self) -> torch.Tensor:
        """Returns log(sum(exp(logit))), float64."""
        return self.sum_N.log() + self._largest_N.double()


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)
