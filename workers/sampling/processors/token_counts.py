"""TokenCounts: how often each token occurs in one row's output, kept from step to step. Used by penalties.py.

Nothing is delivered to it: it reads the row's tokens, and counts only those that it has not counted yet.
"""

import numpy as np
import numpy.typing as npt

from tandem.configs.options import MAX_DRAFTS
from tandem.workers.sampling.processors.logits_processor import Ids, Tokens

Counts = npt.NDArray[np.float32]


class TokenCounts:
    """The distinct tokens of a row, in no order, and the count of each in the output.

    with_prompt: tokens that only the prompt has are among them, with count 0.
    """

    def __init__(self, with_prompt: bool) -> None:
        self._with_prompt = with_prompt
        self._num_counted = 0
        self._num_ids = 0
        self._tail: Tokens = np.empty(0, np.int32)  # the last of those counted
        self._ids: Ids = np.empty(0, np.int64)
        self._counts: Counts = np.empty(0, np.float32)
        self._index_of: dict[int, int] = {}

    def catch_up(self, token_ids: Tokens, prompt_len: int) -> tuple[Ids, Counts]:
        """Counts the row's known tokens and returns views of ids and counts, valid until the next call.

        Fewer tokens than were counted, or others in the place of the last ones, as of guesses, mean that these were
        taken back: all are counted again.
        """
        count = self._num_counted
        same = len(token_ids) >= count > 0 and np.array_equal(token_ids[:count][-MAX_DRAFTS:], self._tail)
        if not same:
            self._recount(token_ids, prompt_len)
        for token in token_ids[self._num_counted :].tolist():
            self._add(token)
        self._num_counted, self._tail = len(token_ids), token_ids[-MAX_DRAFTS:].copy()
        return self._ids[: self._num_ids], self._counts[: self._num_ids]

    def with_drafts(self, token_ids: Tokens) -> tuple[Ids, Counts]:
        """Returns ids and counts of more tokens than were counted last, which stay uncounted."""
        ids, counts = self._ids[: self._num_ids], self._counts[: self._num_ids].copy()
        drafts, added = np.unique(token_ids[self._num_counted :], return_counts=True)
        new = []
        for place, draft in enumerate(drafts.tolist()):
            index = self._index_of.get(draft)
            if index is None:
                new.append(place)
            else:
                counts[index] += added[place]
        return np.append(ids, drafts[new].astype(np.int64)), np.append(counts, added[new].astype(np.float32))

    def _recount(self, token_ids: Tokens, prompt_len: int) -> None:
        output, counts = np.unique(token_ids[prompt_len:], return_counts=True)
        prompt = np.setdiff1d(token_ids[:prompt_len], output) if self._with_prompt else output[:0]
        self._ids = np.concatenate([output, prompt]).astype(np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)
        self._counts[: len(output)] = counts
        self._index_of = {token: index for index, token in enumerate(self._ids.tolist())}
        self._num_ids, self._num_counted = len(self._ids), len(token_ids)

    def _add(self, token: int) -> None:
        index = self._index_of.get(token)
        if index is None:
            index = self._index_of[token] = self._num_ids
            self._num_ids += 1
            if index == len(self._ids):
                room = max(64, 2 * index)
                self._ids, self._counts = np.resize(self._ids, room), np.resize(self._counts, room)
            self._ids[index], self._counts[index] = token, 0.0
        self._counts[index] += 1
