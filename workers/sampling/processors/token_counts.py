"""TokenCounts: how often each token occurs in one row's output, kept from step to step. Used by penalties.py.

Nothing is delivered to it: it reads the row's tokens, and counts only those that it has not counted yet.
"""

import numpy as np
import numpy.typing as npt

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
        self._ids: Ids = np.empty(0, np.int64)
        self._counts: Counts = np.empty(0, np.float32)
        self._index_of: dict[int, int] = {}

    def catch_up(self, token_ids: Tokens, prompt_len: int) -> tuple[Ids, Counts]:
        """Counts the row's known tokens and returns views of ids and counts, valid until the next call.

        Fewer tokens than were counted mean that the last ones were taken back: all are counted again.
        """
        if self._num_counted == 0 or len(token_ids) < self._num_counted:
            self._recount(token_ids, prompt_len)
        for token in token_ids[self._num_counted :].tolist():
            self._add(token)
        self._num_counted = len(token_ids)
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
