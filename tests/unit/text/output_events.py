"""Helpers of the tests of parsers: text in pieces to joined events."""

from collections.abc import Sequence

from tandem.workers.text.format_list import TOOL_FORMATS
from tandem.workers.text.output.events import CallArguments, CallBegin, Content, OutputEvent, OutputParser, Reasoning
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.stepping import joined

TOOLS = [
    Tool(
        "get_weather",
        "Says how the weather will be.",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"type": ["string", "null"]},
                "where": {"type": "object"},
            },
            "required": ["city"],
        },
    ),
    Tool("now", "", {"type": "object", "properties": {}}),
]


def read(parser: OutputParser, pieces: Sequence[str], *, cut: bool = False) -> list[OutputEvent]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish(cut=cut)])


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def tool_events(name: str, pieces: Sequence[str], *, is_cut: bool = False) -> list[OutputEvent]:
    return read(TOOL_FORMATS[name].parser(TOOLS), pieces, cut=is_cut)


def call(number: int, name: str, arguments: str) -> list[OutputEvent]:
    return [CallBegin(number, name), *([CallArguments(number, arguments)] if arguments else [])]


def arguments_of(events: Sequence[OutputEvent]) -> list[str]:
    """The arguments of each call."""
    arguments: list[str] = []
    for event in events:
        if isinstance(event, CallBegin):
            arguments.append("")
        elif isinstance(event, CallArguments):
            arguments[event.call] += event.text
    return arguments


def content(text: str) -> list[OutputEvent]:
    return [Content(text)]


def reasoning(text: str) -> list[OutputEvent]:
    return [Reasoning(text)]
