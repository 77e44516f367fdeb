"""NgramProposer, and its search for an earlier occurrence of a sequence's last tokens.

Made by proposers.py; suffix.py searches with it too. L tokens of the sequence.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.configs.schema import SpeculativeSettings
from tandem.workers.speculation.proposer import ProposalRow


class NgramProposer:
    """Prompt lookup (Saxena 2023; vLLM's method "ngram"): the tokens that followed the last time that the row's last
    few tokens occurred in its prompt or output."""

    def __init__(self, settings: SpeculativeSettings) -> None:
        self._shortest, self._longest = settings.lookup_range

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        return [find_continuation(row.token_ids, self._shortest, self._longest, row.max_drafts) for row in rows]


def find_continuation(token_ids: npt.NDArray[np.int32], shortest: int, longest: int, max_tokens: int) -> list[int]:
    """Returns up to max_tokens tokens that followed an earlier occurrence of the last `longest` tokens of token_ids
    (int32 [L]), or of as many of them as occur, at least `shortest`; [] if there is none.

    Of several such places it takes the latest that has max_tokens behind it, else the earliest, which has most. O(L).
    """
    ends, length = longest_match(token_ids, longest)
    if not length or length < shortest:
        return []
    whole = ends[ends + max_tokens < len(token_ids)]
    end = int(whole[-1] if len(whole) else ends[0])
    return [int(token) for token in token_ids[end + 1 : end + 1 + max_tokens]]


def longest_match(token_ids: npt.NDArray[np.int32], longest: int) -> tuple[npt.NDArray[np.int64], int]:
    """Returns the places, in order, where earlier occurrences of the last tokens of token_ids (int32 [L]) end, of as
    many of them as occur, up to `longest`; and how many those are, 0 if there is no place. O(L)."""
    last = len(token_ids) - 1
    ends = np.flatnonzero(token_ids[:last] == token_ids[last]) if last > 0 else np.empty(0, np.int64)
    length = 1 if len(ends) else 0
    while length and length < longest:
        longer = ends[ends >= length]
        longer = longer[token_ids[longer - length] == token_ids[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return ends, length
