"""SuffixProposer: suffix decoding (Oliaro et al., "SuffixDecoding", 2024; vLLM's method "suffix").

Made by proposers.py. What an agent asks again is often answered as before: it looks for the longest end of a row in the
row itself and in recent answers of the group, and guesses what followed most often. The paper's trees of suffixes with
counts are a list of places here, whose tokens are counted when they are asked for. P places, K tokens behind each.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.configs.schema import SpeculativeSettings
from tandem.workers.speculation.ngram import longest_match
from tandem.workers.speculation.proposer import EndedRow, ProposalRow
from tandem.workers.speculation.recent_outputs import MOST_PLACES, NO_TOKEN, RecentOutputs

Guess = tuple[list[int], float]
"""Token ids, and how many of them are expected to be right."""


class SuffixProposer:
    """Learns from rows that end. All ranks of a group see the same rows end with the same tokens, so they guess
    alike."""

    def __init__(self, settings: SpeculativeSettings) -> None:
        limits = settings.suffix_limits
        self._longest = limits.max_tree_depth - 1
        self._min_prob = limits.min_token_prob
        self._recent = RecentOutputs(limits.max_cached_requests)
        counts = [
            min(int(limits.max_spec_factor * n + 1e-6), limits.max_tree_depth - n) for n in range(self._longest + 1)
        ]
        self._counts = np.maximum.accumulate(counts).tolist()

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        return [self._guess(row) for row in rows]

    def learn(self, rows: Sequence[EndedRow]) -> None:
        """Keeps the rows' outputs, with as much of their prompts as is looked for: the first token of an answer has a
        past too."""
        for row in rows:
            if len(row.token_ids) > row.prompt_len:
                self._recent.add(row.token_ids[max(0, row.prompt_len - self._longest) :])

    def _guess(self, row: ProposalRow) -> list[int]:
        """Returns the better guess of the row's own text and the recent answers."""
        own, recent = self._of_row(row), self._of_recent(row)
        return own[0] if own[1] >= recent[1] else recent[0]

    def _of_row(self, row: ProposalRow) -> Guess:
        ends, length = longest_match(row.token_ids, self._longest)
        if not (count := min(row.max_drafts, self._counts[length])):
            return [], 0.0
        at_PK = ends[: -MOST_PLACES - 1 : -1, None] + np.arange(1, 1 + count)
        last = len(row.token_ids) - 1
        return most_frequent(np.where(at_PK <= last, row.token_ids[np.minimum(at_PK, last)], NO_TOKEN), self._min_prob)

    def _of_recent(self, row: ProposalRow) -> Guess:
        places_P, length = self._recent.find(row.token_ids[-self._longest :])
        if not (count := min(row.max_drafts, self._counts[length])):
            return [], 0.0
        return most_frequent(self._recent.behind(places_P, count), self._min_prob)


def most_frequent(next_PK: npt.NDArray[np.int32], min_prob: float) -> Guess:
    """Returns the token that comes first most often, then the one that most often follows it there, and so on, while at
    least min_prob of the P continuations say all of that. Of equals the one in the first line of [P, K]; NO_TOKEN ends
    a line."""
    is_open_K = np.append(((next_PK != next_PK[0]) | (next_PK == NO_TOKEN)).any(0), True)
    agreed = int(is_open_K.argmax())  # so many, all continuations say: mostly all of them, and quickly seen
    ids: list[int] = next_PK[0, :agreed].tolist()
    lines, expected = next_PK.tolist() if agreed < next_PK.shape[1] else [], float(agreed)
    for place in range(agreed, next_PK.shape[1]):
        counts = Counter([line[place] for line in lines])
        del counts[NO_TOKEN]
        if not counts:
            break
        token, count = max(counts.items(), key=lambda item: item[1])
        share = count / len(next_PK)
        if share < min_prob:
            break
        ids.append(token)
        expected += share
        lines = [line for line in lines if line[place] == token]
    return ids, expected
