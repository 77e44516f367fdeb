"""Laws of every parser: joined events do not depend on cuts, arguments are JSON, nothing is lost but what a broken call
leaves, text is not held back, work is linear."""

import json
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.text.format_list import REASONING_FORMATS, TOOL_FORMATS
from tandem.workers.text.output.events import (
    CallArguments,
    CallBegin,
    Content,
    OutputEvent,
    OutputParser,
    PlainOutput,
    Reasoning,
)
from tandem.workers.text.output.stepping import SteppedParser
from tests.unit.text.output_events import TOOLS, arguments_of, cut, read
from tests.unit.text.test_tool_transcripts import CASES

MAX_EXAMPLES = 20

PARSERS: dict[str, Callable[[], OutputParser]] = {
    **{name: (lambda one=one: one.parser(TOOLS)) for name, one in TOOL_FORMATS.items()},
    **{
        f"{name}, {'' if inside else 'not '}inside": (
            lambda one=one, inside=inside: one.parser(TOOL_FORMATS["hermes"].parser(TOOLS), inside=inside)
        )
        for name, one in REASONING_FORMATS.items()
        for inside in (False, True)
    },
}
FRAGMENTS = st.sampled_from(
    [
        *"{}[]():,;=\"'\\ \n<>|*é\x01",
        *("<tool_call>", "</tool_call>", "<function=", "now", ">", "</function>", "<parameter=", "city"),
        *("</parameter>", "<|python_tag|>", "<|python_start|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *("<|tool_call|>", "get_weather(", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("function", "```json", "<｜tool▁call▁end｜>", "<|channel|>", "commentary", " to=functions.now"),
        *("<|message|>", "<|start|>", "<|end|>", "analysis", "final", "<think>", "</think>"),
        *("n" * 255, "n" * 511, '{"' + "n" * 509, "w" * 395),
        *("</tool_call", "<parameter=days>\n", "\n</function>\n", "None", '"a "b" c"', "\\d", "}}", "1,}"),
        *("Here is my thought process:", "Here's my response:", "True", "null", "1", "-0.5e", "\\u00"),
        *("'''", '"""', "#", "# a\n", "//", "/*", "*/", "r'", "f(", "' '", " + ", "a="),
        *("now(a=", "**{", "}; {", "\\N{", "\\101"),
        *('{"name": "now", "arguments": {', '{"name": "now", "parameters": {"a": ', '"arguments": {}'),
    ]
)  # fmt: skip
WHOLE = st.sampled_from([text for _, text, _ in CASES])
texts = st.lists(st.one_of(FRAGMENTS, FRAGMENTS, FRAGMENTS, WHOLE, st.text(max_size=3)), max_size=12).map("".join)


def check_arguments(name: str, pieces: Sequence[str], whole: list[OutputEvent]) -> None:
    """They are an object, whatever the model wrote; of a text that was cut they are the beginning of one."""
    given = arguments_of(whole)
    assert all(isinstance(json.loads(text), dict) for text in given), given
    begun = arguments_of(read(PARSERS[name](), pieces, cut=True))
    assert len(begun) == len(given) and all(map(str.startswith, given, begun)), (begun, given)


@pytest.mark.parametrize("name", sorted(PARSERS))
@settings(deadline=None, max_examples=MAX_EXAMPLES)
@given(text=texts, data=st.data())
def test_joined_events_do_not_depend_on_cuts_and_nothing_is_lost(name: str, text: str, data: st.DataObject) -> None:
    whole = read(PARSERS[name](), [text])
    ends = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert read(PARSERS[name](), pieces) == read(PARSERS[name](), cut(text, 1)) == whole
    if name in TOOL_FORMATS and name != "openai" and all(isinstance(event, Content) for event in whole):
        assert "".join(event.text for event in whole if isinstance(event, Content)) == text
    check_arguments(name, pieces, whole)
    numbers = [event.call for event in whole if isinstance(event, CallBegin)]
    assert numbers == list(range(len(numbers)))
    assert all(isinstance(event, CallBegin) or event.text for event in whole)


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_content_is_held_back_no_longer_than_the_longest_mark(name: str) -> None:
    parser, text = PARSERS[name](), "So <b> [1] {2} ```x``` <|no|> `<tool` said Here is my <｜end｜> </th <fun " * 3
    said = 0
    for at, char in enumerate(text):
        said += sum(len(event.text) for event in parser.push(char) if isinstance(event, Content | Reasoning))
        assert at + 1 - said < len("Here's my thought process:")
    said += sum(len(event.text) for event in parser.finish() if isinstance(event, Content | Reasoning))
    assert said == len(text)


CALLS = {
    "hermes": '<tool_call>{"name": "get_weather", "arguments": {"city": "',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "',
    "mistral": "[TOOL_CALLS]get_weather[ARGS]{\"city\": \"",
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "',
    "deepseek_v3": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "',
    "deepseek_v31": '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "',
    "openai": '<|channel|>commentary to=functions.get_weather<|message|>{"city": "',
    "pythonic": '[get_weather(city="',
    "qwen3_coder": "<function=get_weather>\n<parameter=city>\n",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CALLS))
def test_arguments_stream_as_they_are_written(name: str) -> None:
    parser = TOOL_FORMATS[name].parser(TOOLS)
    first = parser.push(CALLS[name])
    assert first[0] == CallBegin(0, "get_weather")
    assert first[1] == CallArguments(0, '{"city": "')
    for word in ("Rome", " and", " Pa", "ris"):
        assert parser.push(word) == [CallArguments(0, word)]


def work(name: str, text: str) -> tuple[int, int]:
    """Returns the calls of functions that reading `text` in small pieces takes, and the most text that was unread."""
    calls, most = 0, 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    parser = PARSERS[name]()
    assert isinstance(parser, SteppedParser)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for piece in cut(text, 5):
            parser.push(piece)
            most = max(most, len(parser._source.text) - parser._source.at)
        parser.finish()
    finally:
        sys.setprofile(before)
    return calls, most


REPEATED = [
    *("a", "\n", "{", "[", "<", "\\", "(1,", "<tool_call>", "<|start|>", "[TOOL_CALLS]", "<function=now>"),
    '{"a":',
]


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_work_is_linear_in_the_text(name: str) -> None:
    starts = ["", CALLS.get(name, "<think>"), *(text for case, text, _ in CASES if case == name)]
    for text in [start + repeated * 120 for start in starts[:3] for repeated in REPEATED] + [starts[-1] * 15]:
        calls, unread = work(name, text)
        assert calls < 30 * len(text) + 1000, text[:80]  # a rescan of the text per piece makes it hundreds
        assert unread < 64, text[:80]


def test_nesting_is_bounded() -> None:
    for name in CALLS:
        if name != "qwen3_coder":
            start = CALLS[name].removesuffix('"')
            events = read(TOOL_FORMATS[name].parser(TOOLS), [start + "[" * 10_000])
            assert events[0] == CallBegin(0, "get_weather")
            (arguments,) = arguments_of(events)
            assert json.loads(arguments)["city"] and len(arguments) < 300


def test_plain_output_is_all_content() -> None:
    assert read(PlainOutput(), ["<think>", "", "a"]) == [Content("<think>a")]
