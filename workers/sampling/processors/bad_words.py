"""BadWords: the last token of a bad word cannot be chosen where the output ends with the tokens before it.

As in vLLM, only the output counts: a word that began in the prompt may end. See logits_processor.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.workers.kernels.logit_edits import ALWAYS
from tandem.workers.kernels.sampling_ops import Change
from tandem.workers.kernels.sampling_rules import WORD_SIZE, WORD_TOKENS
from tandem.workers.messages.step import RowSampling
from tandem.workers.sampling.processors.device_tokens import DeviceTokens, PlaceTokens
from tandem.workers.sampling.processors.logits_processor import FORBIDDEN, Ids, Reads, SampledRows, Tokens, known_ids
from tandem.workers.sampling.processors.row_edits import RowEdits, TokenEdit


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


@dataclass(frozen=True, slots=True)
class _Starts:
    """The same as arrays, for N words with U distinct last tokens. lasts_U: these. last_N: each word's place among
    them. starts_NK: its tokens but the last, from behind, 0 where there are no more. lens_N: how many there are."""

    lasts_U: Ids
    last_N: Ids
    starts_NK: Ids
    lens_N: Ids

    @classmethod
    def of(cls, words: _Words) -> "_Starts":
        pairs = [((), last) for last in words.always.tolist()] + [
            pair for own in words.endings.values() for pair in own
        ]
        lens_N = np.array([len(start) for start, _ in pairs], np.int64)
        starts_NK = np.zeros((len(pairs), int(lens_N.max(initial=0))), np.int64)
        for word, (start, _) in enumerate(pairs):
            starts_NK[word, : len(start)] = start[::-1]
        lasts_U, last_N = np.unique(np.array([last for _, last in pairs], np.int64), return_inverse=True)
        return cls(lasts_U, last_N, starts_NK, lens_N)


class BadWords:
    """Per row its words, as token ids."""

    reads = Reads.TOKENS

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, _Words] = {}
        self._starts: dict[int, _Starts] = {}

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

    def prepare_on_device(self, rows: SampledRows, tokens: DeviceTokens) -> Change | None:
        words = [self._starts_of(row) for row in rows.rows_P.tolist()]
        if not any(len(each.lasts_U) for each in words):
            return None
        own, at = PlaceTokens(rows, tokens), rows.at([each.lasts_U for each in words])
        place_N = np.repeat(np.arange(len(words)), [len(each.lens_N) for each in words])
        firsts = np.cumsum([0, *(len(each.lasts_U) for each in words)])
        last_N = np.concatenate([first + each.last_N for first, each in zip(firsts.tolist(), words, strict=False)])
        of_words = rows.send(np.stack((place_N, last_N, np.concatenate([each.lens_N for each in words]))))
        starts = rows.send(_side_by_side([each.starts_NK for each in words]))

        def change(logits_SV: torch.Tensor) -> None:
            (place_N, last_N, lens_N), starts_NK = of_words(), starts()
            back_K = torch.arange(starts_NK.shape[1], device=starts_NK.device)
            columns_NK = own.positions_P[place_N][:, None] - 1 - back_K
            same_NK = (own.at(place_N, columns_NK) == starts_NK) & (columns_NK >= own.prompts_P[place_N][:, None])
            found_N = (same_NK | (back_K >= lens_N[:, None])).all(1)
            places_U, ids_U = at()
            found_U = torch.zeros_like(ids_U).index_add_(0, last_N, found_N.long()) > 0
            logits_SV[places_U, ids_U] = logits_SV[places_U, ids_U].masked_fill_(found_U, FORBIDDEN)

        return change

    def edits(self, row: int) -> RowEdits | None:
        """Words of several tokens depend on those before, which are not too many."""
        words, several = self._rows[row], [pair for own in self._rows[row].endings.values() for pair in own]
        if any(len(start) > WORD_TOKENS for start, _ in several):
            return None
        table = np.zeros((len(several), WORD_SIZE), np.int32)
        for number, (start, last) in enumerate(several):
            table[number, : 2 + len(start)] = last, len(start), *start[::-1]
        always = {token: TokenEdit(least_output=ALWAYS) for token in words.always.tolist()}
        return RowEdits(always, words=table if several else None)

    def free(self, row: int) -> None:
        del self._rows[row]
        self._starts.pop(row, None)

    def _starts_of(self, row: int) -> _Starts:
        if row not in self._starts:
            self._starts[row] = _Starts.of(self._rows[row])
        return self._starts[row]


def _side_by_side(starts: Sequence[Ids]) -> Ids:
    """Returns these one below the other, as wide as the widest."""
    width = max(each.shape[1] for each in starts)
    return np.concatenate([np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in starts])
