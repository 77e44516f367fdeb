"""An invented way to write calls, `<call>name {json}</call>`, and one to think, `<think>...</think>`."""

import json
from collections.abc import Sequence
from typing import Any

from tandem.workers.text.output.events import CallArguments, CallBegin, Content, OutputEvent, OutputParser, Reasoning
from tandem.workers.text.output.formats import Tool

BEGIN, END = "<call>", "</call>"


def without_start_of(mark: str, text: str) -> tuple[str, str]:
    """The text, and its end as far as it may be the start of the mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return text[:-size], text[-size:]
    return text, ""


class InventedCalls:
    """Parses one choice."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._held = ""
        self._calls = 0
        self._in_call = False

    def push(self, text: str) -> list[OutputEvent]:
        self._held += text
        events: list[OutputEvent] = []
        while True:
            mark = END if self._in_call else BEGIN
            before, found, behind = self._held.partition(mark)
            if not found:
                break
            events += self._call(before) if self._in_call else [Content(before)] if before else []
            self._held, self._in_call = behind, not self._in_call
        if not self._in_call:
            shown, self._held = without_start_of(BEGIN, self._held)
            events += [Content(shown)] if shown else []
        return events

    def finish(self) -> list[OutputEvent]:
        text = BEGIN + self._held if self._in_call else self._held
        return [Content(text)] if text else []

    def _call(self, text: str) -> list[OutputEvent]:
        name, _, arguments = text.partition(" ")
        if name not in self._names:
            return [Content(f"{BEGIN}{text}{END}")]
        self._calls += 1
        half = len(arguments) // 2
        call = self._calls - 1
        return [CallBegin(call, name), CallArguments(call, arguments[:half]), CallArguments(call, arguments[half:])]


class InventedToolFormat:
    """Implements ToolFormat. shows_special_tokens may be given, to try what follows from it."""

    def __init__(self, *, shows_special_tokens: bool = False) -> None:
        self.shows_special_tokens = shows_special_tokens

    def marks_in(self, template: str) -> bool:
        return BEGIN in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return InventedCalls([tool.name for tool in tools])

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Any = None) -> str:
        calls = " | ".join(
            f"{json.dumps(f'{BEGIN}{tool.name} ')} %json {json.dumps(dict(tool.parameters))}" for tool in tools
        )
        return f"start: call{'+' if parallel else ''}\ncall: ({calls}) {json.dumps(END)}\n"


class InventedReasoning:
    """Implements ReasoningFormat."""

    shows_special_tokens = False
    start, end = "<think>", "</think>"

    def marks_in(self, template: str) -> bool:
        return self.start in template

    def starts_inside(self, prompt: str) -> bool:
        return prompt.endswith(self.start)

    def parser(self, then: OutputParser, *, inside: bool) -> OutputParser:
        return _Thinking(then, inside=inside)


class _Thinking:
    def __init__(self, then: OutputParser, *, inside: bool) -> None:
        self._then = then
        self._state = "inside" if inside else "before"
        self._held = ""

    def push(self, text: str) -> list[OutputEvent]:
        if self._state == "behind":
            return self._then.push(text)
        self._held += text
        if self._state == "before":
            if InventedReasoning.start.startswith(self._held):
                if self._held == InventedReasoning.start:
                    self._state, self._held = "inside", ""
                return []
            if not self._held.startswith(InventedReasoning.start):
                return self._go_behind(self._held)
            self._state, self._held = "inside", self._held.removeprefix(InventedReasoning.start)
        thought, found, behind = self._held.partition(InventedReasoning.end)
        if found:
            return [*([Reasoning(thought)] if thought else []), *self._go_behind(behind)]
        thought, self._held = without_start_of(InventedReasoning.end, self._held)
        return [Reasoning(thought)] if thought else []

    def finish(self) -> list[OutputEvent]:
        if self._state == "behind":
            return self._then.finish()
        kind = Reasoning if self._state == "inside" else Content
        return [kind(self._held)] if self._held else []

    def _go_behind(self, text: str) -> list[OutputEvent]:
        self._state = "behind"
        return self._then.push(text) if text else []
