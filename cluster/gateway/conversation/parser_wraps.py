"""Parsers around the parser of a format: one call only, no thinking or content, content as a call, no special tokens in
what is shown."""

import json
import re
from collections.abc import Iterable, Sequence

from tandem.workers.text.output.events import CallArguments, CallBegin, Content, OutputEvent, OutputParser, Reasoning
from tandem.workers.text.output.stepping import joined

INPUT = "input"
"""The argument of the function that stands for a tool that takes text."""
PARAGRAPH = 2
"""Line breaks that may stand between thinking and the rest (held_grammar.py)."""


class OneCall:
    """Takes the first call, and nothing behind it (parallel_tool_calls false). is_over: the call has ended."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._has_call = False
        self.is_over = False

    def push(self, text: str) -> list[OutputEvent]:
        return self._first(self._parser.push(text))

    def finish(self, *, cut: bool = False) -> list[OutputEvent]:
        return self._first(self._parser.finish(cut=cut))

    def _first(self, events: Iterable[OutputEvent]) -> list[OutputEvent]:
        taken: list[OutputEvent] = []
        for event in events:
            if self._has_call and not (isinstance(event, CallArguments) and event.call == 0):
                self.is_over = True
            if self.is_over:
                break
            self._has_call |= isinstance(event, CallBegin)
            taken.append(event)
        return taken


class Without:
    """Leaves events of one kind out: thinking (include_reasoning false), or content, which beside forced calls is only
    the beginning of one that was cut."""

    def __init__(self, parser: OutputParser, kind: type[Content] | type[Reasoning]) -> None:
        self._parser = parser
        self._kind = kind

    def push(self, text: str) -> list[OutputEvent]:
        return [event for event in self._parser.push(text) if not isinstance(event, self._kind)]

    def finish(self, *, cut: bool = False) -> list[OutputEvent]:
        return [event for event in self._parser.finish(cut=cut) if not isinstance(event, self._kind)]


class AsCall:
    """Makes all behind the thinking the text of one call of a tool that takes text; what looks like a mark in it is
    text, so the parser reads no further than its begin. behind_thinking: the answer begins inside of thinking; the new
    paragraph behind that is no part of the text."""

    def __init__(self, parser: OutputParser, name: str, *, behind_thinking: bool = False) -> None:
        self._parser = parser
        self._name = name
        self._breaks = PARAGRAPH if behind_thinking else 0
        self._has_begun = False

    def push(self, text: str) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for end, char in enumerate("" if self._has_begun else text, start=1):
            events += self._called(self._parser.push(char))
            if self._has_begun:
                events += self._called(self._parser.finish(cut=True))  # what may be the begin of a mark
                return joined([*events, *self._argument(text[end:])])
        return self._argument(text) if self._has_begun else joined(events)

    def finish(self, *, cut: bool = False) -> list[OutputEvent]:
        events = [] if self._has_begun else self._called(self._parser.finish(cut=cut))
        return events if cut else [*events, *self._argument(""), CallArguments(0, '"}')]

    def _called(self, events: Iterable[OutputEvent]) -> list[OutputEvent]:
        found: list[OutputEvent] = []
        for event in events:
            if not isinstance(event, Content):
                self._breaks = PARAGRAPH
                found.append(event)
                continue
            text = event.text
            while self._breaks and text.startswith("\n"):
                text, self._breaks = text[1:], self._breaks - 1
            found += self._argument(text) if text else ()
        return found

    def _argument(self, text: str) -> list[OutputEvent]:
        begin = (CallBegin(0, self._name), CallArguments(0, f'{{"{INPUT}": "'))
        more = CallArguments(0, json.dumps(text, ensure_ascii=False)[1:-1])
        has_begun, self._has_begun, self._breaks = self._has_begun, True, 0
        return [more] if has_begun else [*begin, more]


class WithoutSpecialTokens:
    """Takes the spellings of special tokens out of thinking and content, for a format whose marks are special tokens:
    there the parser has to see them all. A beginning of one is held back until it is known what it is."""

    def __init__(self, parser: OutputParser, special: "SpecialSpellings") -> None:
        self._parser = parser
        self._special = special
        self._kind: type[Content] | type[Reasoning] = Content
        self._held = ""

    def push(self, text: str) -> list[OutputEvent]:
        return self._shown(self._parser.push(text))

    def finish(self, *, cut: bool = False) -> list[OutputEvent]:
        return [*self._shown(self._parser.finish(cut=cut)), *self._rest()]

    def _shown(self, events: Iterable[OutputEvent]) -> list[OutputEvent]:
        shown: list[OutputEvent] = []
        for event in events:
            if not isinstance(event, Content | Reasoning):
                shown += [*self._rest(), event]
                continue
            if type(event) is not self._kind:
                shown += self._rest()
                self._kind = type(event)
            text, self._held = self._special.split(self._held + event.text)
            shown += [self._kind(text)] if text else []
        return shown

    def _rest(self) -> list[OutputEvent]:
        held, self._held = self._held, ""
        return [self._kind(held)] if held else []


class SpecialSpellings:
    """The spellings of special tokens, and their beginnings."""

    def __init__(self, spellings: Sequence[str]) -> None:
        self._whole = re.compile("|".join(map(re.escape, sorted(spellings, key=len, reverse=True))) or r"(?!)")
        self._beginnings = frozenset(one[:size] for one in spellings for size in range(1, len(one)))
        self._longest = max((len(one) - 1 for one in spellings), default=0)

    def split(self, text: str) -> tuple[str, str]:
        """Returns the text without special tokens, and its end as far as it may be the beginning of one."""
        shown = self._whole.sub("", text)
        for size in range(min(self._longest, len(shown)), 0, -1):
            if shown[-size:] in self._beginnings:
                return shown[:-size], shown[-size:]
        return shown, ""
