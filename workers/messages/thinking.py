"""ThinkingBudget: how long a model may think; ThinkingSpan: how far it has. Torch-free."""

from collections.abc import Iterable

import msgspec


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A limit for the tokens of each choice between two marks.

    tokens: after so many, the end mark comes. start, end: token ids of the marks. inside: the prompt ends behind a
    start mark.
    """

    tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    inside: bool = False


class ThinkingSpan:
    """The tokens of one output as they come, and which of them lie between the marks; the marks themselves do not.

    tokens: so many do by now. is_inside: the last one is behind a start mark. seen: tokens that have come.
    """

    __slots__ = ("_end", "_last", "_start", "is_inside", "seen", "tokens")

    def __init__(self, start: tuple[int, ...], end: tuple[int, ...], *, inside: bool) -> None:
        self._start, self._end = start, end
        self._last: tuple[int, ...] = ()
        self.is_inside = inside
        self.tokens = 0
        self.seen = 0

    def add(self, token_ids: Iterable[int]) -> None:
        """Reads on."""
        for token_id in token_ids:
            mark = self._end if self.is_inside else self._start
            self._last = (*self._last, token_id)[-len(mark) :]
            self.tokens += self.is_inside
            self.seen += 1
            if self._last == mark:
                self.tokens -= len(mark) if self.is_inside else 0
                self.is_inside, self._last = not self.is_inside, ()

    def copy(self) -> "ThinkingSpan":
        """Makes one that reads on by itself."""
        other = ThinkingSpan(self._start, self._end, inside=self.is_inside)
        other._last, other.tokens, other.seen = self._last, self.tokens, self.seen
        return other

    @property
    def num_open(self) -> int:
        """The number of last tokens that may be a mark's, as none of an earlier mark's are: at most the mark's
        length."""
        return len(self._last)

    def next_of_end(self) -> tuple[int, int]:
        """Returns how many of the last tokens are the beginning of the end mark, and the token that would continue
        it."""
        end = self._end
        for size in range(min(len(self._last), len(end) - 1), 0, -1):
            if self._last[-size:] == end[:size]:
                return size, end[size]
        return 0, end[0]
