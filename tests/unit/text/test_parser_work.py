"""The work of one push is linear in its text, and the text that may be held back is bounded: counted are calls of
functions, and characters that patterns look at or slices copy, not time."""

import json
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from tandem.workers.text.format_list import TOOL_FORMATS
from tandem.workers.text.output.call_ends import FAR, CallEnds
from tandem.workers.text.output.stepping import Marks, SteppedParser
from tests.unit.text.output_events import TOOLS, arguments_of, cut, tool_events
from tests.unit.text.test_parser_laws import CALLS

ROOM = "tandem.workers.text.output"
HOSTILE = [
    *('{"name": "now", "arguments": {}}', ",", "a,", '"', "'", '"""', "' 'a", "r'", '" + "', '"+', "'.a("),
    *("\\", '\\"', "\\N{", "(a,", "((", "f(", "[{", '{"a":[', "a ", "} ", ")]", "1,"),
    *("\n", " ", "#", " #,", "'#a\n", "/*", "//a\n", "<", "`", "[", "{}", "1 "),
]
_DEEPSEEK = ["<｜tool▁call▁end｜>x ", "<｜tool▁call▁begin｜>", "```<｜tool▁call▁end｜>"]
MARKS = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "granite": ["<tool_call>[", "<|tool_call|>x "],
    "hermes": [
        "<tool_call>{",
        "</tool_call>",
        "}}</tool_call>",
        "<tool_call>{'name':'now','arguments':{'a':'",
        "</tool_call>x ",
    ],
    "llama3_json": ["<|python_tag|>{", "}; {"],
    "mistral": ["[TOOL_CALLS]{", '[TOOL_CALLS]{"', "[TOOL_CALLS]now{"],
    "openai": ["<|call|>x ", "<|start|>assistant", "<|call|>"],
    "pythonic": ["<|python_end|>x ", "[now(),", ", now(", "<|python_end|>"],
    "qwen3_coder": [
        *("<parameter=days> ", "\n</parameter>", "\n<parameter=x>", "<function=now>", "</function>\n</tool_call>"),
        *("</function>x ", "<tool_call>", "<function=now>\n<parameter=where>\n{"),
    ],
}
"""Texts that are repeated: in every format, and with marks of one."""
MOST_CALLS = MOST_LOOKS = 70
"""Per character of a text. Of 16 KiB, which is the most that is held back, the calls take some 50 ms."""

MOST_COPIED = 220
"""Characters that are copied per character of a text: 200 tell whether a quote ends one."""


class Counted:
    """A pattern that counts the characters that it looks at, as far as a match says so."""

    looks = 0

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._pattern, name)

        def counting(text: str, at: int = 0, end: int = sys.maxsize) -> re.Match[str] | None:
            found: re.Match[str] | None = method(text, at, end)
            missed = min(end, len(text)) - at if name == "search" else 1
            Counted.looks += missed if found is None else found.end() - at
            return found

        return counting if name in ("match", "search", "fullmatch") else method


def owners(value: Any) -> Iterator[tuple[Any, str]]:
    """The places of patterns in a value: what holds one, and under which name."""
    if isinstance(value, Marks | CallEnds | type):
        for name, one in list(vars(value).items()):
            if isinstance(one, re.Pattern):
                yield value, name
            elif isinstance(one, dict | Marks):
                yield from owners(one)
    elif isinstance(value, dict):
        for name, one in value.items():
            if isinstance(one, re.Pattern):
                yield value, name
            elif isinstance(one, Marks):
                yield from owners(one)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[tuple[Any, str]] = []
    for name, module in list(sys.modules.items()):
        if name.startswith(ROOM):
            for key, value in vars(module).items():
                places += [(module, key)] if isinstance(value, re.Pattern) else owners(value)
    assert len(places) > 60
    for owner, key in places:
        if isinstance(owner, dict):
            if isinstance(owner[key], re.Pattern):
                monkeypatch.setitem(owner, key, Counted(owner[key]))
        elif isinstance(getattr(owner, key), re.Pattern):
            monkeypatch.setattr(owner, key, Counted(getattr(owner, key)))


def work(name: str, text: str, before: str = "") -> tuple[int, int]:
    """The calls and the looks that one push of a text, and the end of it, take. before: read in pieces before it."""

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    parser = TOOL_FORMATS[name].parser(TOOLS)
    for piece in cut(before, 64):
        parser.push(piece)
    calls, Counted.looks, profile = 0, 0, sys.getprofile()
    sys.setprofile(count)
    try:
        parser.push(text)
        parser.finish()
    finally:
        sys.setprofile(profile)
    return calls, Counted.looks


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_a_push_is_read_in_linear_time(name: str) -> None:
    start = CALLS[name].removesuffix('"')
    for begin in ("", start + '"', start + "'", start + "f(", start + '"x", '):
        for repeated in [*HOSTILE, *MARKS[name]]:
            small, large = (begin + repeated * (size // len(repeated)) for size in (200, 600))
            larger = 1.3 * len(large) / len(small)
            for less, more, most in zip(work(name, small), work(name, large), (MOST_CALLS, MOST_LOOKS), strict=True):
                assert more < larger * less + 500, (begin, repeated)
                assert more < most * len(large), (begin, repeated)


class Copied(str):
    """A text that counts the characters of its slices."""

    __slots__ = ()
    count = 0

    def __getitem__(self, index: Any) -> str:
        piece = super().__getitem__(index)
        if not isinstance(index, slice):
            return piece
        Copied.count += len(piece)
        return Copied(piece)

    def __add__(self, other: str) -> str:
        return Copied(super().__add__(other))

    def __radd__(self, other: str) -> str:
        return Copied(other + str(self))


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_a_push_copies_no_more_than_what_is_near(name: str) -> None:
    start = CALLS[name].removesuffix('"')
    for begin in ("", '"\U0001f600", "c": ['):
        for repeated in ("1,", "x, ", '"', "'", '"x", ', "a=1, ", " /", " #,", "[", '"+', "`", "<"):
            parser, Copied.count = TOOL_FORMATS[name].parser(TOOLS), 0
            text = start + begin + repeated * (MOST_COPIED * 10 // len(repeated))
            parser.push(Copied(text))
            parser.finish()
            assert len(text) / 2 < Copied.count < MOST_COPIED * len(text), (begin, repeated)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_no_more_than_16_kib_wait_for_what_ends_a_text(name: str) -> None:
    for repeated in (one for one in [*HOSTILE, *MARKS[name]] if '"' not in one):
        parser, held = TOOL_FORMATS[name].parser(TOOLS), 0
        assert isinstance(parser, SteppedParser)
        parser.push(CALLS[name])
        for _ in range(50):
            parser.push(repeated * (400 // len(repeated)))
            held = max(held, len(parser._source.text) - parser._source.at)
        assert held < FAR + 1000, repeated


NUMBERS = [{"a": [number, None, "\U0001f600"]} for number in range(400)]
WHERE = "<function=get_weather>\n<parameter=where>\n"
LONG = [
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": ' + json.dumps(json.dumps({"where": NUMBERS})), "}"),
    ("mistral", "[TOOL_CALLS]get_weather[ARGS]" + json.dumps(json.dumps({"where": NUMBERS}, ensure_ascii=False)), ""),
    ("qwen3_coder", WHERE + json.dumps({"where": NUMBERS}), "\n</parameter>\n</function>"),
    ("qwen3_coder", WHERE + repr({"where": NUMBERS}), "\n</parameter>\n</function>"),
    ("qwen3_coder", WHERE + json.dumps({"where": NUMBERS})[:-1], "\n</parameter>\n</function>"),
]
"""Calls with a long value that is held back whole, up to its end, and this."""


@pytest.mark.parametrize(("name", "begin", "end"), LONG)
def test_the_end_of_a_long_value_does_not_cost_the_time_of_all(name: str, begin: str, end: str) -> None:
    calls, _ = work(name, begin[-20:] + end, before=begin[:-20])
    assert calls < work(name, begin + end)[0] / 4
    for size in (7, 1000, len(begin)):
        (arguments,) = arguments_of(tool_events(name, cut(begin + end, size)))
        given = json.loads(arguments)["where"]
        assert (given if name != "qwen3_coder" else given["where"]) == NUMBERS
