"""ThinkingMarks: the token ids between which a model thinks; ThinkingCount, which counts tokens between them."""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.workers.text.output.formats import ReasoningFormat
from tandem.workers.text.tokenizer import ModelTokenizer


class ThinkingMarks(NamedTuple):
    """start, end: token ids of the marks. inside: the prompt ends in an open thinking part."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    inside: bool


def thinking_marks(tokenizer: ModelTokenizer, form: ReasoningFormat, prompt: str) -> ThinkingMarks:
    """The marks of a format, as this tokenizer spells them."""
    start, end = (tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in (form.start, form.end))
    return ThinkingMarks(start, end, form.starts_inside(prompt))


class ThinkingCount:
    """Counts the tokens of one choice that lie between the marks; the marks themselves are no thinking."""

    def __init__(self, marks: ThinkingMarks) -> None:
        self._marks = marks
        self._inside = marks.inside
        self._last: list[int] = []
        self.tokens = 0

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            mark = self._marks.end if self._inside else self._marks.start
            self._last = [*self._last, token_id][-len(mark) :]
            self.tokens += self._inside
            if tuple(self._last) == mark:
                self.tokens -= len(mark) if self._inside else 0
                self._inside, self._last = not self._inside, []
