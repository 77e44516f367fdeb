"""Finds stop strings in text that arrives in pieces, across token boundaries. One StopMatcher per choice.

Only a tail that may begin a stop string is withheld. The first stop string to be complete wins, and the longest of
those that complete on the same character, so the result does not depend on how text is split into tokens. The token
whose text completes the stop string is the last one that is kept and billed.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopStep(NamedTuple):
    """The result of one token: text to emit now, and the stop string that it completed, if any."""

    text: str
    stop: str | None


class StopMatcher:
    """Searches the text of one choice: `push` takes each token's text in order (empty text too), until a stop is found.

    Text of the first `min_tokens` tokens passes unsearched.
    """

    __slots__ = ("_held", "_include", "_min_tokens", "_stops", "tokens_kept")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0) -> None:
        assert all(stops), "empty stop strings are refused before"
        self._stops = tuple(stops)
        self._include = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self.tokens_kept = 0

    def push(self, text: str) -> StopStep:
        """Adds one token's text. Returns the text to show and the stop string that ended it, if any."""
        self.tokens_kept += 1
        if not text or self.tokens_kept <= self._min_tokens:
            return StopStep(text, None)
        return self._search(text)

    def flush(self, text: str = "") -> StopStep:
        """Ends the choice: searches a last piece of text that belongs to no new token; returns all withheld text."""
        step = self._search(text) if text and self._stops else StopStep(text, None)
        if step.stop is not None:
            return step
        held, self._held = self._held, ""
        return StopStep(step.text + held, None)

    def _search(self, text: str) -> StopStep:
        if not self._stops:
            return StopStep(text, None)
        buffer = self._held + text
        found = first_complete(buffer, self._stops)
        if found is not None:
            start, stop = found
            self._held = ""
            return StopStep(buffer[: start + len(stop) if self._include else start], stop)
        keep = len(buffer) - possible_beginning(buffer, self._stops)
        self._held = buffer[keep:]
        return StopStep(buffer[:keep], None)


def first_complete(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Returns (start, stop string) of the match that ends first in `text`, the longest of those that end together."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop)
        if start >= 0:
            candidate = (start + len(stop), start, stop)
            best = candidate if best is None or candidate < best else best
    return None if best is None else best[1:]


def possible_beginning(text: str, stops: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that is a proper beginning of a stop string."""
    longest = 0
    for stop in stops:
        start = max(0, len(text) - len(stop) + 1)
        while len(text) - start > longest:
            start = text.find(stop[0], start)
            if start < 0 or len(text) - start <= longest:
                break
            if stop.startswith(text[start:]):
                longest = len(text) - start
            start += 1
    return longest
