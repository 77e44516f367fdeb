"""BadWords: the last token of a bad word cannot be chosen where the output ends with the tokens before it.

As in vLLM, only the output counts: a word that began in the prompt may end. See logits_processor.py.
"""

from dataclasses import dataclass

import numpy as np

from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.logits_processor import Ids, Reads, SampledRows, Tokens, known_ids


@dataclass(frozen=True, slots=True)
class _Words:
    """One row's words. always: words of one token. endings: by its next to last token each longer word, as (its tokens
    but the last, the last)."""

    always: Ids
    endings: dict[int, list[tuple[tuple[int, ...], int]]]

    def forbidden(self, output: Tokens) -> Ids:
        """Returns the ids that would complete a word after these output tokens."""
        if not self.endings or not len(output):
            return self.always
        found = [
            last
            for start, last in self.endings.get(int(output[-1]), ())
            if len(start) <= len(output) and tuple(output[-len(start) :].tolist()) == start
        ]
        return np.append(self.always, found).astype(np.int64) if found else self.always


class BadWords:
    """Per row its words, as token ids."""

    reads = Reads.TOKENS

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, _Words] = {}

    def bind(self, row: int, sampling: RowSampling) -> bool:
        words = [word for word in sampling.bad_words_token_ids if word]
        if not words:
            return False
        endings: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *start, last in words:
            if start and 0 <= last < self._vocab_size:
                endings.setdefault(start[-1], []).append((tuple(start), last))
        always = known_ids([word[0] for word in words if len(word) == 1], self._vocab_size)
        self._rows[row] = _Words(always, endings)
        return True

    def prepare(self, rows: SampledRows) -> Change | None:
        columns = []
        for row, position in rows:
            tokens, prompt_len = rows.history(row, position)
            columns.append(self._rows[row].forbidden(tokens[prompt_len:]))
        return rows.forbid(columns)

    def free(self, row: int) -> None:
        del self._rows[row]
