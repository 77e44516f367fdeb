"""OutputEvent: a piece of an answer, sorted into thinking, content and tool calls; OutputParser, which sorts.

A parser belongs to one choice. It is fed the choice's text as it grows and returns events as early as they are certain,
so that APIs can stream them. Concatenated texts of a kind do not depend on how the text was cut into pieces.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Reasoning(NamedTuple):
    """More of the model's thinking."""

    text: str


class Content(NamedTuple):
    """More of the answer's text."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins. call: its number in the choice, from 0; its arguments follow."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments, as JSON text."""

    call: int
    text: str


OutputEvent = Reasoning | Content | CallBegin | CallArguments


class OutputParser(Protocol):
    """Sorts the text of one choice."""

    def push(self, text: str) -> list[OutputEvent]:
        """Takes more text; returns what is certain by now, in order."""
        ...

    def finish(self, *, cut: bool = False) -> list[OutputEvent]:
        """Returns what was held back, and what makes the arguments of a call whole. cut: the choice did not end by
        itself, so that a call in which it ends stays open. Called once."""
        ...


MakeParser = Callable[[], OutputParser]


class PlainOutput:
    """Takes all text as content."""

    def push(self, text: str) -> list[OutputEvent]:
        return [Content(text)] if text else []

    def finish(self, *, cut: bool = False) -> list[OutputEvent]:
        return []
