"""RowEdits: what the logits processors of one row do, as numbers that a captured step can hold. HasRowEdits is a
processor that can say so.

Collected by chain.py when a row is bound; put side by side for a step by step_edits(). S places, E entries.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from tandem.workers.kernels.logit_edits import ALWAYS, DTYPES, NO_EDITS, LogitEdits
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
    """All of a row. penalties: repetition, frequency and presence."""

    tokens: dict[int, TokenEdit] = field(default_factory=dict)
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)

    @property
    def penalizes(self) -> bool:
        return self.penalties != (1.0, 0.0, 0.0)


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
    penalties = RowEdits().penalties
    for each in several:
        if each is None:
            return None
        for token, (added, least) in each.tokens.items():
            before = tokens.get(token, TokenEdit())
            tokens[token] = TokenEdit(before.added + added, max(before.least_output, least))
        penalties = each.penalties if each.penalizes else penalties
    return RowEdits(tokens, penalties) if len(tokens) <= MOST_ENTRIES else None


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
