"""TextSource and SteppedParser: the core under all parsers. A parser is a generator that reads a TextSource
and yields events.

It yields None where it needs more text. What it does depends on the text alone, so the joined events do not depend on
how the text was cut. Only text that may be the beginning of a mark is held back, and each character is read once.
"""

import re
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from tandem.workers.text.output.events import CallArguments, CallBegin, Content, OutputEvent, Reasoning

T = TypeVar("T")
Steps = Generator[OutputEvent | None, None, T]
Emit = Callable[[str], Iterable[OutputEvent]]


class TextSource:
    """The text of a choice as it arrives. `text` from `at` on is unread; `ended` says that no more will come, `cut`
    that more would have."""

    __slots__ = ("_kept", "at", "cut", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = self.cut = False
        self._kept: list[str] | None = None

    def add(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, end: int) -> str:
        """Reads the text before index `end`."""
        piece = self.text[self.at : end]
        self.at = end
        if self._kept is not None and piece:
            self._kept.append(piece)
        return piece

    def keep(self) -> None:
        """Begins to keep what is read, as it may prove to be content."""
        self._kept = []

    def release(self) -> str:
        """Returns what was read since keep(), and keeps no more."""
        kept, self._kept = self._kept, None
        return "".join(kept or ())

    @property
    def exhausted(self) -> bool:
        """True if all text was read and no more will come."""
        return self.ended and self.at == len(self.text)


class SteppedParser:
    """An OutputParser made of a generator over a TextSource."""

    def __init__(self, steps: Callable[[TextSource], Steps[None]]) -> None:
        self._source = TextSource()
        self._steps = steps(self._source)

    def push(self, text: str) -> list[OutputEvent]:
        if not text:
            return []
        self._source.add(text)
        return self._advance()

    def finish(self, *, cut: bool = False) -> list[OutputEvent]:
        self._source.ended, self._source.cut = True, cut
        return self._advance()

    def _advance(self) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for event in self._steps:
            if event is None:
                break
            events.append(event)
        return joined(events)


def joined(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Returns the events with neighbours of one kind made one."""
    groups: list[list[OutputEvent]] = []
    for event in events:
        if groups and _continues(groups[-1][0], event):
            groups[-1].append(event)
        else:
            groups.append([event])
    return [group[0] if len(group) == 1 else _one(group) for group in groups]


def _continues(first: OutputEvent, event: OutputEvent) -> bool:
    if isinstance(first, CallArguments):
        return isinstance(event, CallArguments) and event.call == first.call
    return type(first) is type(event) and isinstance(event, Content | Reasoning)


def _one(group: list[OutputEvent]) -> OutputEvent:
    texts = [event for event in group if not isinstance(event, CallBegin)]
    return texts[0]._replace(text="".join(event.text for event in texts))


class Marks:
    """A set of marks to look for; none begins with another."""

    def __init__(self, *marks: str) -> None:
        assert all(marks) and not any(a != b and a.startswith(b) for a in marks for b in marks)
        self._marks = marks
        self._any = re.compile("|".join(map(re.escape, marks)))
        self._longest = max(map(len, marks))

    def first(self, text: str, at: int) -> re.Match[str] | None:
        return self._any.search(text, at)

    def hold(self, text: str, at: int) -> int:
        """Returns the index in `text`, not below `at`, from which its end may be the beginning of a mark."""
        for start in range(max(at, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            if any(mark.startswith(end) for mark in self._marks):
                return start
        return len(text)


def text_until(source: TextSource, marks: Marks, emit: Emit) -> Steps[str | None]:
    """Emits text up to the first mark. Returns the mark, which is unread, or None at the end of the text."""
    while True:
        found = marks.first(source.text, source.at)
        if found is not None:
            end = found.start()
        else:
            end = len(source.text) if source.ended else marks.hold(source.text, source.at)
        if end > source.at:
            yield from emit(source.take(end))
        if found is not None or source.ended:
            return found.group() if found is not None else None
        yield None


def one_of(source: TextSource, choices: Sequence[str]) -> Steps[str | None]:
    """Reads the one of `choices` with which the text goes on, and returns it; reads nothing if there is none. Reads
    the begin of one, and returns None, where the text ends in it."""
    found = yield from begins_with(source, choices)
    if found is not None:
        source.take(source.at + len(found))
    elif source.ended and any(_is_begun(one, source) for one in choices):
        source.take(len(source.text))
    return found


def begins_with(source: TextSource, choices: Sequence[str]) -> Steps[str | None]:
    """Returns the one of `choices` with which the text goes on, None if there is none; reads nothing."""
    while True:
        undecided = False
        for choice in choices:
            if source.text.startswith(choice, source.at):
                return choice
            undecided |= _is_begun(choice, source)
        if source.ended or not undecided:
            return None
        yield None


def _is_begun(mark: str, source: TextSource) -> bool:
    """Returns whether the text that is unread, all of it, is the beginning of a mark."""
    return len(source.text) - source.at < len(mark) and mark.startswith(source.text[source.at :])


def goes_on_with(source: TextSource, char: str) -> Steps[bool]:
    """Returns whether the next character, which stays unread, is `char`."""
    while source.at == len(source.text) and not source.ended:
        yield None
    return source.text.startswith(char, source.at)


def run_of(source: TextSource, pattern: re.Pattern[str], limit: int = sys.maxsize) -> Steps[str]:
    """Reads the longest run of at most `limit` characters that `pattern` (a class of characters with `*`) matches, and
    returns it."""
    pieces: list[str] = []
    while True:
        found = pattern.match(source.text, source.at, min(source.at + limit, len(source.text)))
        end = found.end() if found is not None else source.at
        limit -= end - source.at
        pieces.append(source.take(end))
        if end < len(source.text) or source.ended or not limit:
            return "".join(pieces)
        yield None


_SPACE = re.compile(r"\s*")


def spaces(source: TextSource) -> Steps[str]:
    """Reads white space, and returns it."""
    return run_of(source, _SPACE)
