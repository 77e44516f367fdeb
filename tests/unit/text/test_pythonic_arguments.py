"""Arguments of pythonic calls: strings as ast.literal_eval() reads them, and values that are no literals, of which the
other arguments do not suffer."""

import ast
import json
import warnings
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.workers.text.output.events import CallBegin, Content
from tests.unit.text.output_events import arguments_of, cut, tool_events

PIECES = [
    *("a", "é", " ", "{", "}", ")", "]", ",", ", b=1)", "), now(", "]<|python_end|>", "'", '"', "''", '""'),
    *("\\n", "\\\\", "\\'", '\\"', "\\x41", "\\u00e9", "\\U0001f600", "\\N{BULLET}", "\\N{em dash}", "\\0", "\\7"),
    *("\\101", "\\1018", "\\08", "\\d", "\\8", "\\\n", "\n", "\\a\\v", "w" * 190),
]
QUOTES = st.sampled_from(["'", '"', "'''", '"""'])
PREFIXES = st.sampled_from(["", "", "", "r", "R", "u", "U"])
strings = st.builds(
    lambda prefix, quote, body: prefix + quote + "".join(body) + quote,
    PREFIXES, QUOTES, st.lists(st.sampled_from(PIECES), max_size=5),
)  # fmt: skip
spaces = st.sampled_from(["", " ", "\n    ", "\t"])
joined = st.lists(st.tuples(strings, spaces), min_size=1, max_size=3).map(lambda all: "".join(a + b for a, b in all))


def literal(text: str) -> Any:
    """What Python reads, None if that is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes of nothing
        try:
            return ast.literal_eval(f"({text})")
        except (SyntaxError, ValueError):
            return None


@settings(deadline=None, max_examples=300)
@given(text=joined, wrap=st.sampled_from(["%s", "(%s)", "[%s, 1]", "{'k': %s, 'l': ( %s )}"]), size=st.integers(1, 9))
@example(text="'It''s'", wrap="%s", size=1)
@example(text="'a\\\r\nb'", wrap="%s", size=1)
@example(text="'a' # it's\n  'b#' # c, d=1\n", wrap="{'k': %s, 'l': ( %s )}", size=1)
@example(text="'a'\\\n'b'", wrap="(%s)", size=1)
@example(text="'a' r'\\'b'", wrap="(%s)", size=2)
@example(text="''' it's '''", wrap="%s", size=3)
@example(text='"""say "hi\\""""', wrap="[%s, 1]", size=1)
@example(text="'" + "a" * 250 + "' 'b'", wrap="{'k': %s, 'l': ( %s )}", size=7)
@example(text="'a' '" + "b" * 250 + "'", wrap="(%s)", size=1000)
def test_strings_are_those_that_python_reads(text: str, wrap: str, size: int) -> None:
    written = wrap.replace("%s", text)
    meant = literal(written)
    if not isinstance(literal(text), str):
        return
    for pieces in (cut(call := f"[get_weather(city={written}, days=1)]", size), [call]):
        events = tool_events("pythonic", pieces)
        assert events[0] == CallBegin(0, "get_weather")
        assert len(events) == 2 and json.loads(arguments_of(events)[0]) == {"city": meant, "days": 1}, written


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("b'x, y'", "b'x, y'"),  # JSON has no bytes
        ("rb'\\d)'", "rb'\\d)'"),
        ("f'at {place}'", "at {place}"),
        ('"\\/"', "/"),  # as in JSON
        ("'\\x4'", "\\x4"),
        ("'\\N{no such name}\\N'", "\\N{no such name}\\N"),
        ("'\\ud83d\\ude00'", "\U0001f600"),
        ("'say 'hi', now'", "say 'hi"),
        ("'it's'", "it's"),
        ("Rome", "Rome"),
        ("Config.CITY", "Config.CITY"),
        ("city(1, ')', \"it's\")", "city(1, ')', \"it's\")"),
        ("datetime.now() - timedelta(days=1)", "datetime.now() - timedelta(days=1)"),
        ("names['a, b'][0]", "names['a, b'][0]"),
        ("x if y == 'a, b' else z", "x if y == 'a, b' else z"),
        ("not x", "not x"),
        ("`x, y`", "x, y"),
        ("1 + 2", "1 + 2"),
        ("1 <\n 2", "1 <\n 2"),
        ("lambda: (1, 2)", "lambda: (1, 2)"),
        ("f(" + "x, " * 300 + "1)", "f(" + "x, " * 300 + "1)"),
        ("", None),
        ("'a' + b", "a"),
        ("'%s, %s' % (a, b)", "%s, %s"),
        ("'a'.join(b)", "a"),
        ("['a', f(1, 2)] + [3]", ["a", "f(1, 2)"]),
        ("[x for x in y if f(x, 1)]", ["x for x in y if f(x, 1)"]),
        ("{'k': g(x)['y']} | {'l': 1}", {"k": "g(x)['y']"}),
        ("{'k': 1, **x, 'l': 2}", {"k": 1}),
        ("{1, 2}", {}),
        ("(1)", 1),
        ("((1), ('a'\n 'b'), ())", [1, "ab", []]),
        ("('a')", "a"),
        ("1 # or 2, or 3", 1),
        ("'a' # or 'b', or 'c'", "a"),
        ("# a comment, b=2\n 1", 1),
        ("[1, # one\n 2 # two\n]", [1, 2]),
        ("{'k': 'a', # it's\n 'l': 2}", {"k": "a", "l": 2}),
    ],
)
def test_what_is_no_literal_costs_no_other_argument(written: str, meant: Any) -> None:
    for begin, others in (
        ("", {}),
        ("# one, two\n", {}),
        ("days=1, ", {"days": 1}),
        ("days=1, 'x', *f(3, 4), ", {"days": 1}),
        ("days=1,234, ", {"days": "1,234"}),
        ("days=Paris, France, ", {"days": "Paris, France"}),
    ):
        text = f"[get_weather({begin}city={written}\n, units=None), now()]"
        want = {**others, "city": meant, "units": None}
        for size in (1, 3, 1000):
            events = tool_events("pythonic", cut(text, size))
            assert [json.loads(one) for one in arguments_of(events)] == [want, {}], (text, events)
            assert len(events) == 4


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("[get_weather(**{'city': 'a'}, days=1)]", [{"city": "a", "days": 1}]),
        (
            "[get_weather(city='a', **{'days': {'b': 1}}, **{}, units=None)]",
            [{"city": "a", "days": {"b": 1}, "units": None}],
        ),
        ("[get_weather(**{}, city='a')]", [{"city": "a"}]),
        ("[get_weather(**{})]", [{}]),
        ("[get_weather(**{'city': ['a')]", [{"city": ["a"]}]),
        ("[get_weather(city='a') # )\n, # now(),\n now()]", [{"city": "a"}, {}]),
        (
            "[get_weather(city=#fff, days=issue #12, units=[#fff, 7 // 2])]",
            [{"city": "#fff", "days": "issue #12", "units": ["#fff", "7 // 2"]}],
        ),
        ("[get_weather(city='a', #fff, days=2), now()]\n<|python_end|>", [{"city": "a", "days": 2}, {}]),
        ("[get_weather(city=f(, now()]", [{"city": "f(, now()"}]),
        ("[get_weather(city='a', days=f(1", [{"city": "a", "days": "f(1"}]),
        ("[get_weather(city=a<|python_end|>", [{"city": "a"}]),
        ("[get_weather(city=f(a<|python_start|>[now()]", [{"city": "f(a"}, {}]),
    ],
)
def test_calls_of_python_are_whole(text: str, meant: list[Any]) -> None:
    for size in (1, 3, 1000):
        events = tool_events("pythonic", cut(text, size))
        assert [json.loads(one) for one in arguments_of(events)] == meant, (text, events)
        assert len(events) == 2 * len(meant), events


@pytest.mark.parametrize("text", ["[now(1)]", "[now('x', a=1)]", "[now(*x)]", "[# now()]", "[now(f(x))]"])
def test_a_call_whose_first_argument_has_no_name_is_content(text: str) -> None:
    assert tool_events("pythonic", cut(text, 2)) == [Content(text)]
