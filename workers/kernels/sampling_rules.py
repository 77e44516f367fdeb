"""SamplingRules: what only some rows of a step ask of the choice of their tokens, as numbers: a mask of allowed tokens,
bad words of several tokens, a budget of thinking, log probabilities; and ReportOps, for the last of these in a graph.

Behind the edits of logit_edits.py, and ahead of penalties, which leave what is forbidden as it is:

    logit = -inf             of a token whose bit of the mask is 0; of the last token of a bad word behind the others
    logit = logit + 1e9      of the next token of the end mark, where the thinking is over its budget
    log probability          of the model's own logits, before all of it

Made by sampling/step_rules.py; carried out in triton/sampling/triton_rules.py and triton_logprobs.py. S places, I
integers, V vocabulary.
"""

from typing import Final, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

T = TypeVar("T")
PREFERENCE: Final = 1e9
"""Addition to the logit of a token that is preferred to anything else."""
HEADER: Final = 7
"""The numbers of a place: where its mask, its words, its thinking and the ids that it names begin, -1 for none; how
many best tokens it reports, -1 without log probabilities; the memory of its logits, -1 for none; the token by which its
text may end if nothing else is left, -1 for none."""
MASK, WORDS, THINKING, NAMED, TOP, KEPT, END = range(HEADER)
WORD_TOKENS: Final = 16
"""Tokens of a bad word but its last, at most. A row has their number, and of each word its last token, the number of
the others, and these from behind, in so many places."""
WORD_SIZE: Final = 2 + WORD_TOKENS
MOST_WORDS: Final = 64
MARK_TOKENS: Final = 16
"""Tokens of a mark of thinking, at most. A row has the numbers below, then both marks, each in so many places."""
SPAN: Final = 7
"""Numbers: whether the host's last token is inside, tokens of the thinking, tokens since the last mark, the budget, the
tokens that the host has read, and the lengths of both marks."""
MOST_TOP: Final = 20
"""Tokens whose log probabilities a place reports, best or named ones, beside the chosen one's."""
REPORT: Final = 2 + 2 * MOST_TOP
"""Numbers of a place's log probabilities: the rank of the chosen token and the bits of its own, ids of the best tokens,
and the bits of theirs; of named tokens theirs alone."""


class SamplingRules(NamedTuple, Generic[T]):
    """The numbers, int32, on the host or on the device. begin_S: where a place's begin among numbers_I, -1 without
    any."""

    begin_S: T
    numbers_I: T


@runtime_checkable
class ReportOps(Protocol):
    """FixedSampling's log probabilities, by calls that a graph may hold: the first ahead of edits, the other one behind
    the draw."""

    def keep_logits(
        self, logits_SV: torch.Tensor, rules: SamplingRules[torch.Tensor], kept_MV: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns what report() needs of the model's logits. kept_MV: float32, gets those of places that keep them."""
        ...

    def report(
        self,
        logits_SV: torch.Tensor,
        ids_S: torch.Tensor,
        rules: SamplingRules[torch.Tensor],
        kept_MV: torch.Tensor,
        noted: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Returns the log probabilities of places that ask for some, int32 [S, REPORT]. logits_SV: the model's but of
        places that keep theirs. noted: of keep_logits()."""
        ...


def free_ends(
    logits_SV: torch.Tensor, best_S: torch.Tensor, ids_S: torch.Tensor, rules: SamplingRules[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allows a text's end where it may end and nothing is left to choose, whatever else forbids it; returns the best
    logits and their ids."""
    begin_S = rules.begin_S.long()
    end_S = torch.where(begin_S < 0, -1, rules.numbers_I[begin_S.clamp(min=0) + END])
    is_stuck_S = (best_S == float("-inf")) & (end_S >= 0)
    at_S1 = end_S.clamp(min=0).long()[:, None]
    best_S = best_S.masked_fill(is_stuck_S, 0.0)
    logits_SV.scatter_(1, at_S1, torch.where(is_stuck_S[:, None], 0.0, logits_SV.gather(1, at_S1)))
    return best_S, torch.where(is_stuck_S, at_S1[:, 0], ids_S)
