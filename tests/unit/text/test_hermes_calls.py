"""Calls in the hermes format: from text in pieces to events."""

import pytest

from tandem.workers.text.output.events import CallArguments, CallBegin, Content, OutputEvent
from tandem.workers.text.output.format_list import TOOL_FORMATS
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.stepping import joined

TOOLS = [Tool("get_weather", "", {"type": "object", "properties": {"city": {"type": "string"}}})]


def parsed(text: str, cut: int) -> list[OutputEvent]:
    parser = TOOL_FORMATS["hermes"].parser(TOOLS)
    events = [event for i in range(0, len(text), cut) for event in parser.push(text[i : i + cut])]
    return joined([*events, *parser.finish()])


@pytest.mark.parametrize("cut", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("Hello <b>", [Content("Hello <b>")]),
        (
            'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "</tool_call>"}}\n</tool_call>\n'
            '<tool_call>{"arguments":{},"name":"get_weather"}</tool_call>',
            [
                Content("I look.\n"),
                CallBegin(0, "get_weather"),
                CallArguments(0, '{"city": "</tool_call>"}'),
                CallBegin(1, "get_weather"),
                CallArguments(1, "{}"),
            ],
        ),
        (
            '<tool_call>{"name": "get_weather", "arguments": {"ci',
            [CallBegin(0, "get_weather"), CallArguments(0, '{"ci')],
        ),
        ('<tool_call>{"name": "get_weather", "argu', [CallBegin(0, "get_weather")]),
        ('<tool_call>{"name": "get_wea', [Content('<tool_call>{"name": "get_wea')]),
        (
            '<tool_call>{"name": "rm", "arguments": {"a": "<tool_call>"}}</tool_call>',
            [Content('<tool_call>{"name": "rm", "arguments": {"a": "<tool_call>"}}</tool_call>')],
        ),
    ],
)
def test_text_becomes_events(text: str, events: list[OutputEvent], cut: int) -> None:
    assert parsed(text, cut) == events
