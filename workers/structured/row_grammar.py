"""RowGrammar: one row's place in its grammar. Torch-free; used by workers/sampling/processors/grammar.py.

Nothing is delivered to it: it is given the row's output and follows it, so it is right after whatever has changed the
output, be it rejected drafts, a step that is rolled back, or another group's tokens.

All copies of a matcher share the states of its lexer, of which there are so many at most (LIMITS of grammar_store.py);
once there are more, every copy fails. So a failure counts only where a matcher of the row's own fails too: neither
other rows nor drafts that prove wrong end a row.
"""

from collections.abc import Callable
from enum import Enum

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from tandem.workers.text.grammars import NO_TOKEN, reason_of

Tokens = npt.NDArray[np.int32]
FIRST_ROOM = 64


class Position(Enum):
    """The kind of what may follow an output. OPEN: what the grammar allows. ENDED: its end. OFF: the output does not
    follow the grammar, or the grammar has failed."""

    OPEN = "open"
    ENDED = "ended"
    OFF = "off"


class RowGrammar:
    """Follows one row's output. start: a matcher at the beginning, of which copies are made. end_ids: the tokens that
    end a text. make: compiles the grammar again."""

    def __init__(self, start: LLMatcher, end_ids: frozenset[int], make: Callable[[], LLMatcher]) -> None:
        self.end_ids = end_ids
        self.matcher = start.deep_copy()
        self._start = start
        self._make = make
        self._taken: Tokens = np.empty(FIRST_ROOM, np.int32)
        self._num_taken = 0

    def move_to(self, output: Tokens) -> Position:
        """Takes the matcher to the end of `output`."""
        self._go_back(self._num_common(output))
        tokens: list[int] = []
        for token in output[self._num_taken :].tolist():
            if token in self.end_ids:  # it ends a text where the grammar may end; elsewhere the grammar may name it
                if not self._take(tokens):
                    return Position.OFF
                if self.matcher.is_accepting():
                    return Position.ENDED
                tokens = []
            tokens.append(token)
        return Position.OPEN if self._take(tokens) else Position.OFF

    def renew(self) -> None:
        """Goes back to the beginning of the text with a matcher that shares nothing, for the time of a compilation."""
        self._start = self._make()
        self.matcher, self._num_taken = self._start.deep_copy(), 0

    @property
    def is_at_limit(self) -> bool:
        """True if a limit is reached, maybe by others who share it."""
        return self.matcher.is_error() and not self.matcher.get_error().startswith(NO_TOKEN)

    def error(self) -> str | None:
        """The reason why the grammar has failed, as by its limits; None if it has not."""
        if not self.matcher.is_error():
            return None
        error = self.matcher.get_error()
        if error.startswith(NO_TOKEN):
            return "no token of the model's vocabulary can follow the text so far"
        return reason_of(error) or "no reason is known"

    def _num_common(self, output: Tokens) -> int:
        """The number of tokens taken that are the output's first ones."""
        most = min(self._num_taken, len(output))
        same = self._taken[:most] == output[:most]
        return most if same.all() else int(same.argmin())

    def _go_back(self, num_tokens: int) -> None:
        back = self._num_taken - num_tokens
        if self.matcher.is_error() or (back and not self.matcher.rollback(back)):
            self.matcher, num_tokens = self._start.deep_copy(), 0
        self._num_taken = num_tokens

    def _take(self, tokens: list[int]) -> bool:
        """Takes the tokens up to the first that the grammar forbids; returns whether these are all."""
        count = self.matcher.try_consume_tokens(tokens) if tokens else 0
        end = self._num_taken + count
        if end > len(self._taken):
            self._taken = np.resize(self._taken, 2 * end)
        self._taken[self._num_taken : end] = tokens[:count]
        self._num_taken = end
        return count == len(tokens) and not self.matcher.is_error()
