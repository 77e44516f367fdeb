"""RowEdits: what the logits processors of one row do, as numbers that a captured step can hold. HasRowEdits is a
processor that can say so.

Collected by chain.py when a row is bound; put side by side for a step by step_edits(). S places, E entries.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tandem.workers.kernels.logit_edits import ALWAYS, DTYPES, NO_EDITS, LogitEdits
from tandem.workers.kernels.sampling_rules import MOST_WORDS
from tandem.workers.kernels.step_arrays import Array
from tandem.workers.sampling.processors.logits_processor import Ids

MOST_ENTRIES: Final = 64
"""Entries of a row. One with more is served behind the capture."""


class TokenEdit(NamedTuple):
    """The change of one logit. added: to it; least_output: the token is forbidden while fewer tokens are out."""

    added: float = 0.0
    least_output: int = 0


@dataclass(frozen=True, slots=True)
class RowEdits:
    """All of a row. penalties: repetition, frequency and presence. What only rules say (sampling_rules.py): words: bad
    ones of several tokens, int32 [words, WORD_SIZE]; allowed: a mask, int32; whether it thinks by a budget, and whether
    it has a grammar, whose masks are a step's."""

    tokens: dict[int, TokenEdit] = field(default_factory=dict)
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    words: npt.NDArray[np.int32] | None = None
    allowed: npt.NDArray[np.int32] | None = None
    thinks: bool = False
    has_grammar: bool = False

    @property
    def penalizes(self) -> bool:
        return self.penalties != (1.0, 0.0, 0.0)

    @property
    def has_rules(self) -> bool:
        return self.words is not None or self.allowed is not None or self.thinks or self.has_grammar

    @property
    def reads_tokens(self) -> bool:
        return self.penalizes or self.words is not None or self.thinks


@runtime_checkable
class HasRowEdits(Protocol):
    """A LogitsProcessor whose changes are numbers."""

    def edits(self, row: int) -> RowEdits | None:
        """Returns what it does for a row whose bind returned True; None if that is no RowEdits."""
        ...


def together(several: Iterable[RowEdits | None]) -> RowEdits | None:
    """Returns what several processors of a row do; None if one of them says None, or where they have too many tokens.
    What is forbidden stays so, whatever is added."""
    tokens: dict[int, TokenEdit] = {}
    found = RowEdits(tokens)
    for each in several:
        if each is None:
            return None
        for token, (added, least) in each.tokens.items():
            before = tokens.get(token, TokenEdit())
            tokens[token] = TokenEdit(before.added + added, max(before.least_output, least))
        found = RowEdits(
            tokens,
            each.penalties if each.penalizes else found.penalties,
            found.words if each.words is None else each.words,
            found.allowed if each.allowed is None else each.allowed,
            found.thinks or each.thinks,
            found.has_grammar or each.has_grammar,
        )
    num_words = 0 if found.words is None else len(found.words)
    return found if len(tokens) <= MOST_ENTRIES and num_words <= MOST_WORDS else None


def step_edits(edits_S: list[RowEdits | None], prompt_len_S: Ids) -> LogitEdits[Array]:
    """Returns the edits of a step's places; None: of a row without any."""
    places = [place for place, own in enumerate(edits_S) if own is not None]
    if not places:
        return NO_EDITS
    penalties_S3 = np.array([RowEdits().penalties if own is None else own.penalties for own in edits_S], np.float32)
    entries = [
        (place, token, min(ALWAYS, int(prompt_len_S[place]) + least) if least else 0, added)
        for place in places
        for token, (added, least) in _tokens_of(edits_S[place]).items()
    ]
    of_entries = zip(*entries, strict=True) if entries else [()] * 4
    columns = [*penalties_S3.T, prompt_len_S, *of_entries]
    return LogitEdits[Array](*(np.array(column, dtype) for column, dtype in zip(columns, DTYPES, strict=True)))


def _tokens_of(edits: RowEdits | None) -> dict[int, TokenEdit]:
    assert edits is not None
    return edits.tokens
