"""Calls that models spoil, in every format: forgotten end tags, tags inside values, Python's literals, no arguments.
Each is a call with the arguments that were meant, and nothing of it is content."""

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.text.format_list import TOOL_FORMATS
from tandem.workers.text.output.events import CallArguments, CallBegin, Content
from tandem.workers.text.output.formats import Tool
from tests.unit.text.output_events import TOOLS, arguments_of, cut, read, tool_events

B, E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
b, sep, e = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
AROUND = {
    "hermes": ('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>\n"),
    "llama3_json": ('<|python_tag|>{"name": "%s", "parameters": ', "}\n"),
    "mistral": ('[TOOL_CALLS] [{"name": "%s", "arguments": ', "}]"),
    "mistral, newer": ("[TOOL_CALLS]%s[ARGS]", ""),
    "granite": ('<|tool_call|>[{"name": "%s", "arguments": ', "}]"),
    "deepseek_v3": (f"{B}{b}function{sep}%s\n```json\n", f"\n```{e}{E}"),
    "deepseek_v31": (f"{B}{b}%s{sep}", f"{e}{E}"),
    "openai": ("<|channel|>commentary to=functions.%s <|constrain|>json<|message|>", "<|call|>"),
}
"""What stands around the arguments of a call."""
MEANT: list[tuple[str, Any]] = [
    ("{'city': 'Rome', 'units': None}", {"city": "Rome", "units": None}),
    ('{"city": "Rome", "ok": True, "x": False, "n": NaN, "i": -Infinity}',
     {"city": "Rome", "ok": True, "x": False, "n": None, "i": None}),
    ("{\"city\": 'it\\'s', \"list\": [1, 2, ], }", {"city": "it's", "list": [1, 2]}),
    ('{"city": "say "hi" to"}', {"city": 'say "hi" to'}),
    ('{"city": "a, "b", c", "days": 1}', {"city": 'a, "b", c', "days": 1}),
    ('{"city": "a" , "days": "b" ,}', {"city": "a", "days": "b"}),
    ('{"city": "a" "days": 3}', {"city": "a", "days": 3}),
    ('{"city": "a"\n "days" : 3}', {"city": "a", "days": 3}),
    ('{"city": "print("a", "b")"}', {"city": 'print("a", "b")'}),
    ('{"city": "see "note: this" there", "days": 1}', {"city": 'see "note: this" there', "days": 1}),
    ("{city: 'a', days: 'b'}", {"city": "a", "days": "b"}),
    ('{"city": "\\d+\\\'\\u00e9"}', {"city": "\\d+'é"}),
    ("{city: Rome, days: 03, units: 1}", {"city": "Rome", "days": "03", "units": 1}),
    ('{"city": "a</tool_call>[TOOL_CALLS]<|call|>```b"}', {"city": "a</tool_call>[TOOL_CALLS]<|call|>```b"}),
    ('{"city": , "where": {"x": [1, {"y": 2}}', {"city": None, "where": {"x": [1, {"y": 2}]}}),
    ('"{\\"city\\": \\"Rome\\"}"', {"city": "Rome"}),
    ('{"city": """say "hi"\n""", "days": "\\""}', {"city": 'say "hi"\n', "days": '"'}),
    ("{'city': r'\\d\\'', 'days': f'{n}', 'units': b'a, b'}", {"city": "\\d\\'", "days": "{n}", "units": "b'a, b'"}),
    ('{"city": at(1, "a}"), "days": 1 + 2}', {"city": 'at(1, "a}")', "days": "1 + 2"}),
    ('{"city": "a" + b, "days": [[1] + [2], "a".upper()]}', {"city": "a", "days": [[1], "a"]}),
    ('{"city": "a", // or, "days": 4\n "days": 3 /* or, */, # 5\n}', {"city": "a", "days": 3}),
    ('{"city": "a" // or\n, "days": ["b" # or\n, 3 // 4\n]}', {"city": "a", "days": ["b", 3]}),
    ('{"b": 7 // 2, "a": "x", "c": #fff, "d": issue #12, "e": src/*.py, "f": [1, 7 // 2], "g": {"h": 3 # 4}}',
     {"b": "7 // 2", "a": "x", "c": "#fff", "d": "issue #12", "e": "src/*.py", "f": [1, "7 // 2"],
      "g": {"h": "3 # 4"}}),
    ('{"city": 7 // or {x}\n, "days": /* or */ 1 # {}\n, "units": 2 // 3, "x": {"y": 1 # 2}}\n',
     {"city": 7, "days": 1, "units": "2 // 3", "x": {"y": "1 # 2"}}),
    ('{"city": 1 // ' + "a" * 200 + '\n, "b": 2}', {"city": "1 // " + "a" * 200, "b": 2}),
    ('{"city": Paris, France, "days": 1,234, "units": {"a": 1,234,567}, "x": yes, no}',
     {"city": "Paris, France", "days": "1,234", "units": {"a": "1,234,567"}, "x": "yes, no"}),
    ('{"city": "a", "days": 1,234\n}', {"city": "a", "days": "1,234"}),
    ('{"city": Paris, days: 1, units: x,}', {"city": "Paris", "days": 1, "units": "x"}),
    ('{"city": `x, "y", it\'s`, "days": [`a\n\\`b`, ``], "units": `${z}`}',
     {"city": 'x, "y", it\'s', "days": ["a\n`b", ""], "units": "${z}"}),
    ('{"city": "(a)\\1", "days": ("b"), "units": {"x", "y"}}', {"city": "(a)\\1", "days": "b", "units": {}}),
]  # fmt: skip
NOTHING = ["{}", "null", "None", '""', "''", "[]", '"{}"']


def check(name: str, text: str, names: list[str], meant: list[Any]) -> None:
    name = name.partition(",")[0]
    for size in (1, 3, 1000):
        events = tool_events(name, cut(text, size))
        assert [event.name for event in events if isinstance(event, CallBegin)] == names, (events, text)
        assert [json.loads(one) for one in arguments_of(events)] == meant, text
        assert len(events) == 2 * len(names), (events, text)


@pytest.mark.parametrize("name", sorted(AROUND))
def test_what_is_no_json_is_the_json_that_was_meant(name: str) -> None:
    before, behind = AROUND[name]
    for written, meant in MEANT:
        check(name, before % "get_weather" + written + behind, ["get_weather"], [meant])
    for written in NOTHING:
        check(name, before % "now" + written + behind, ["now"], [{}])


@pytest.mark.parametrize("name", sorted(AROUND))
def test_a_call_whose_end_is_forgotten_ends_with_the_text_or_at_the_next_call(name: str) -> None:
    before, behind = AROUND[name]
    begun = before % "get_weather"
    for written in (
        '{"city": "Rome',
        '{"city": "Rome"',
        '{"city": "Rome"}',
        '{"city": "Rome",',
        '{"city": "Rome", "da',
    ):
        check(name, begun + written, ["get_weather"], [{"city": "Rome"}])
    whole = before % "now" + "{}" + behind
    if name == "openai":
        whole = "<|start|>assistant" + whole
    for written in ('{"city": "Rome"', '{"city": "Rome"}'):
        check(name, begun + written + "\n" + whole, ["get_weather", "now"], [{"city": "Rome"}, {}])


@pytest.mark.parametrize("name", ["hermes", "deepseek_v3", "deepseek_v31", "openai"])
def test_what_breaks_behind_a_text_takes_nothing_of_the_next_call(name: str) -> None:
    before, behind = AROUND[name]
    whole = before % "now" + "{}" + behind
    for broken in ('"; "days": 3', '", days: 3', '", // or 4', '" /* or */, "days": 4', '", ...'):
        text = before % "get_weather" + '{"city": "a' + broken + "}" + behind
        joint = "<|start|>assistant" if name == "openai" else "\n"
        for size in (1, 3, 1000):
            events = tool_events(name, cut(text + joint + whole, size))
            assert [event.name for event in events if isinstance(event, CallBegin)] == ["get_weather", "now"], broken
            assert json.loads(arguments_of(events)[0])["city"] == "a" and arguments_of(events)[1] == "{}", events


BEHIND = {
    "hermes": "\n",
    "llama3_json": "; ",
    "mistral": "",
    "mistral, newer": "",
    "granite": "",
    "deepseek_v3": "\n",
    "deepseek_v31": "",
    "openai": "<|start|>assistant",
}
"""What stands between two calls."""
UNQUOTED = [
    ('{"city": "Paris}', {"city": "Paris"}),
    ('{"days": 1, "city": "Paris}', {"days": 1, "city": "Paris"}),
    ('{"where": {"x": ["a, b]}}', {"where": {"x": ["a, b"]}}),
    ("{'city': 'Paris}", {"city": "Paris"}),
    ('{"city": "say \\"hi\\" "to" me}', {"city": 'say "hi" "to" me'}),
    ('{"city": "Paris, "days": 3}', {"city": 'Paris, "days": 3'}),
]
"""Arguments in which a text, or a name, has no quote at its end; brackets behind it belong to the call."""


@pytest.mark.parametrize("name", sorted(AROUND))
def test_a_text_that_no_quote_ends_takes_no_other_call_with_it(name: str) -> None:
    before, behind = AROUND[name]
    for written, meant in UNQUOTED:
        broken = before % "get_weather" + written + behind
        for rest, found in (("{}", {}), ('{"city": "x", "days": 1}', {"city": "x", "days": 1})):
            next_call = (before % "now" + rest + behind).removeprefix("<|python_tag|>")
            texts = [broken + BEHIND[name] + next_call]
            if behind.endswith("}]"):  # both in one list
                begin = before.index("{")
                texts.append(broken[:-1] + ", " + next_call[begin:])
            for text in texts:
                check(name, text, ["get_weather", "now"], [meant, found])
        check(name, broken, ["get_weather"], [meant])
    text = (
        before % "get_weather" + '{"city": "Paris", "days: 3}' + behind + BEHIND[name] + before % "now" + "{}" + behind
    )
    for size in (1, 3, 1000):  # a name
        first, last = arguments_of(tool_events(name.partition(",")[0], cut(text, size)))
        assert json.loads(first)["city"].startswith("Paris") and last == "{}", text


@pytest.mark.parametrize("name", ["hermes", "deepseek_v3", "deepseek_v31", "openai"])
def test_a_text_that_no_quote_ends_takes_no_content_with_it(name: str) -> None:
    before, behind = AROUND[name]
    said = '\nThat is "it", I\'ll say.'
    said_in = "<|start|>assistant<|channel|>final<|message|>" if name == "openai" else ""
    text = before % "get_weather" + '{"city": "Paris}' + behind + said_in + said
    for size in (1, 3, 1000):
        events = tool_events(name, cut(text, size))
        assert [json.loads(one) for one in arguments_of(events)] == [{"city": "Paris"}], events
        assert events[2:] and "".join(getattr(event, "text", "") for event in events[2:]).strip() == said.strip()


def test_a_call_that_cannot_be_one_takes_no_other_with_it() -> None:
    whole = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for broken in (
        '{"name": "unknown", "arguments": {"city": "Paris}}',
        '{"name": "unknown}',
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris}',
        '{"arguments": {"city": "Paris}, "name": "get_weather"}',
        '{"id": "1, "name": "get_weather", "arguments": {}}',
    ):
        for size in (1, 3, 1000):
            events = tool_events("hermes", cut(f"<tool_call>\n{broken}\n</tool_call>\n{whole}", size))
            assert events[-2:] == [CallBegin(0, "now"), CallArguments(0, "{}")], (broken, events)


MARKS = [
    *("<tool_call>", '<tool_call>\n{"name": "now"', "</tool_call>", "<|python_tag|>{", "[TOOL_CALLS]", "[ARGS]{"),
    *("<|tool_call|>[{", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "```", "<|call|>"),
    *("<|start|>assistant", "<|end|>", "}", "}}", "]", "\n", '"', "'", "\\"),
    *(", ", "; {", "now(", ")]", "a", " ", ":", "é"),
    *("<parameter=city>", "</parameter>", "</function>"),
]
json_texts = st.lists(st.sampled_from(MARKS), max_size=9).map("".join)
JSON_SPACES = ["", "", " ", "\n  ", "\r\n", "\t", " " * 300]


def spaced(value: Any, space: Callable[[], str]) -> str:
    """JSON with any white space between its tokens."""
    if isinstance(value, dict):
        entries = (f"{json.dumps(k)}{space()}:{space()}{spaced(v, space)}" for k, v in value.items())
        inside = f"{space()},{space()}".join(entries)
    elif isinstance(value, list):
        inside = f"{space()},{space()}".join(spaced(one, space) for one in value)
    else:
        return json.dumps(value, ensure_ascii=False)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}{space()}{inside}{space()}{end}"


json_values = st.recursive(
    json_texts | st.integers() | st.sampled_from([True, None, 0.5, -1e-7]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(json_texts, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", sorted(AROUND))
@settings(deadline=None, max_examples=30)
@given(value=st.dictionaries(json_texts, json_values, max_size=3), seed=st.integers(0, 2**32))
def test_json_stays_as_it_was_written_with_any_marks_and_white_space(
    name: str, value: dict[str, Any], seed: int
) -> None:
    rng = random.Random(seed)
    written = spaced(value, lambda: rng.choice(JSON_SPACES))
    before, behind = AROUND[name]
    text = before % "get_weather" + written + behind
    events = tool_events(name.partition(",")[0], cut(text, rng.choice([1, 7, 1000])))
    assert events == [CallBegin(0, "get_weather"), CallArguments(0, written)]


@pytest.mark.parametrize("text", ['[get_weather(city="a", days=(1,2', "[get_weather(days=[(1, {'a': (2"])
def test_tuples_that_are_not_whole_are_lists(text: str) -> None:
    (arguments,) = arguments_of(tool_events("pythonic", cut(text, 2)))
    json.loads(arguments)


@pytest.mark.parametrize("name", ["hermes", "deepseek_v3", "deepseek_v31", "openai"])
def test_end_marks_close_what_a_model_left_open(name: str) -> None:
    before, behind = AROUND[name]
    for written in ('{"city": "Rome"', '{"city": ["Rome", {"x": 1', '{"city": Rome'):
        meant = {"city": ["Rome", {"x": 1}]} if "[" in written else {"city": "Rome"}
        check(name, before % "get_weather" + written + behind.lstrip("}"), ["get_weather"], [meant])
    check(name, before % "get_weather" + '{"city": 1}}}' + behind, ["get_weather"], [{"city": 1}])


@pytest.mark.parametrize(
    "text", ['{"name": "now"}', '{"name": "now", "arguments": null}', '{"arguments": "", "name": "now"}']
)
def test_a_function_without_arguments_is_called_without(text: str) -> None:
    for begin, name in (
        ("<tool_call>", "hermes"),
        ("", "llama3_json"),
        ("<tool_call>[", "granite"),
        ("[TOOL_CALLS][", "mistral"),
    ):
        check(name, begin + text, ["now"], [{}])


F = "<tool_call>\n<function=get_weather>\n"
CODER = [
    (f"{F}<parameter=city>\nParis\n</function>\n</tool_call>", {"city": "Paris"}),
    (f"{F}<parameter=city>\nParis\n</tool_call>", {"city": "Paris"}),
    (f"{F}<parameter=city>\nParis", {"city": "Paris"}),
    (f"{F}<parameter=city>\nParis\n</parameter>\n</tool_call>", {"city": "Paris"}),
    (f"{F}<parameter=city>\nParis\n</parameter>", {"city": "Paris"}),
    (f"{F}<parameter=days>\n3\n<parameter=city>\na.py\n</parameter>\n</function>", {"days": 3, "city": "a.py"}),
    (f"{F}<parameter=days>3<parameter=city>a.py</function></tool_call>", {"days": 3, "city": "a.py"}),
    (f"{F}<parameter=city>\nuse <parameter=name> and </function> here\n</parameter>\n</function>\n</tool_call>",
     {"city": "use <parameter=name> and </function> here"}),
    (f"{F}<parameter=city>\n<a>\n</function>\n</a>\n</parameter>\n</function>", {"city": "<a>\n</function>\n</a>"}),
    (f"{F}<parameter=city>\na <tool_call> b\n</parameter>\n</function>", {"city": "a <tool_call> b"}),
    (f"{F}<parameter=city>\n# README\n</tool_call>\non\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>",
     {"city": "# README\n</tool_call>\non", "days": 3}),
    (f"{F}<parameter=city>\nFormat:\n<parameter=foo>\nis a line\n</parameter>\n</function>\n</tool_call>",
     {"city": "Format:\n<parameter=foo>\nis a line"}),
    (f"{F}<parameter=city>\n<function=x>\n</function>\n</tool_call>\nand that is all\n</parameter>\n</function>",
     {"city": "<function=x>\n</function>\n</tool_call>\nand that is all"}),
    (f"{F}<parameter=where>\n{{'a': \"</parameter>\", 'b': None}}\n</parameter>\n</function>",
     {"where": {"a": "</parameter>", "b": None}}),
    (f'{F}<parameter=where>\n{{"a": [1\n</function>\n</tool_call>', {"where": {"a": [1]}}),
    (f'{F}<parameter=where>{{"a": "x}}</parameter></function></tool_call>', {"where": {"a": "x"}}),
    (f'{F}<parameter=where>{{"a": "x}}</parameter>\n<parameter=city>"y"</parameter></function></tool_call>',
     {"where": {"a": "x"}, "city": '"y"'}),
    (f"{F}<parameter=city>\nput <parameter=days> or <parameter=units>\nhere\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
     {"city": "put <parameter=days> or <parameter=units>\nhere", "days": 3}),
    (f"{F}<parameter=where>\nnone <parameter=days> 3\n</parameter>\n</function>",
     {"where": "none <parameter=days> 3"}),
    (f"{F}<parameter=city>\nRome <parameter=days>3\n<parameter=units>\nC\n</parameter>\n</function>",
     {"city": "Rome ", "days": 3, "units": "C"}),
    (f"{F}<parameter=city>\nRome <parameter=days>3</function></tool_call>", {"city": "Rome ", "days": 3}),
    (f"{F}<parameter=city>Rome<parameter=days>3</parameter></function></tool_call>", {"city": "Rome", "days": 3}),
    (f"{F}<parameter=city>\nRome\n</parameter>\n<parameter=city>\nParis\n</parameter>\n</function>",
     {"city": "Paris"}),
    (f"{F}<parameter=city\nRome\n</parameter>\n<parameter=days>\n1\n</parameter>\n</function>", {"days": 1}),
    (f'{F}<parameter=units>\n"hi"\n</parameter>\n<parameter=city>\n"hi"\n</parameter>\n</function>',
     {"units": '"hi"', "city": '"hi"'}),
    (f"{F}<parameter=units>\n null \n</parameter>\n<parameter=city>\nnull\n</parameter>\n</function>",
     {"units": None, "city": "null"}),
    (f"{F}Here it is:\n<parameter=city>\nRome\n</parameter>\nDone\n</function>\n</tool_call>", {"city": "Rome"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "meant"), CODER)
def test_tags_of_qwen3_coder_may_be_forgotten_and_stand_in_values(text: str, meant: Any) -> None:
    check("qwen3_coder", text, ["get_weather"], [meant])


@pytest.mark.parametrize("value", ["    return x\n", "x\n\n\n", "", "\n", "\n  ", "[1, 2]\n", " a", "a "])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": ["string", "null"]},
        {"type": "string", "nullable": True},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        {"type": "string", "minLength": 1},
        {"type": "string", "minLength": 1, "maxLength": 100},
        {"type": "string", "pattern": "x"},
        {"type": ["string", "integer"]},
    ],
)
def test_a_text_of_qwen3_coder_is_what_stands_between_its_line_ends(schema: Any, value: str) -> None:
    tool = Tool("write", "", {"type": "object", "properties": {"text": schema}})
    written = f"<tool_call>\n<function=write>\n<parameter=text>\n{value}\n</parameter>\n</function>\n</tool_call>"
    for size in (1, 3, 1000):
        events = read(TOOL_FORMATS["qwen3_coder"].parser([tool]), cut(written, size))
        assert [json.loads(one) for one in arguments_of(events)] == [{"text": value}], events


@pytest.mark.parametrize("schema", [{}, {"minLength": 1}, {"maxLength": 9}, {"minLength": 0, "maxLength": 9}])
def test_a_text_of_qwen3_coder_keeps_its_double_quotes_whatever_its_length_may_be(schema: Any) -> None:
    tool = Tool("write", "", {"properties": {"text": {"type": "string", **schema}}})
    written = '<tool_call>\n<function=write>\n<parameter=text>\n"hi"\n</parameter>\n</function>\n</tool_call>'
    (arguments,) = arguments_of(read(TOOL_FORMATS["qwen3_coder"].parser([tool]), [written]))
    assert json.loads(arguments) == {"text": '"hi"'}


def test_tags_in_a_value_of_qwen3_coder_are_looked_behind_once() -> None:
    """Its own end tag, far behind, says of all of them that they are text."""
    value = "\n</tool_call>" * 20_000
    text = f"{F}<parameter=city>\nend{value}\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([text], cut(text, 70_000)):
        events = tool_events("qwen3_coder", pieces)
        assert json.loads(arguments_of(events)[0]) == {"city": "end"}, "nothing is held back for longer than 16 KiB"
    value = "\n</tool_call>" * 1_200
    text = f"{F}<parameter=city>\nend{value}\n</parameter>\n</function>\n</tool_call>"
    parser = TOOL_FORMATS["qwen3_coder"].parser(TOOLS)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        events = [*parser.push(text), *parser.finish()]
    finally:
        sys.setprofile(None)
    assert json.loads(arguments_of(events)[0]) == {"city": "end" + value}
    assert calls < 1000, "the marks are passed at once"


def test_a_call_of_qwen3_coder_ends_where_the_next_begins() -> None:
    text = f"{F}<parameter=city>\nRome\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    check("qwen3_coder", text, ["get_weather", "now"], [{"city": "Rome"}, {}])
    text = f'{F}<parameter=where>{{"a": "b<tool_call>\n<function=now>\n</function>\n</tool_call>'
    check("qwen3_coder", text, ["get_weather", "now"], [{"where": {"a": "b"}}, {}])


def test_marks_in_a_text_are_looked_behind_once() -> None:
    """Without a quote that ends it, what stands behind each of many marks is looked through once for all of them."""
    begin = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "'
    for end, closed in (('"}}\n</tool_call>', True), ("", False)):
        text = begin + "</tool_call>x " * 4000 + end
        began_s = time.process_time()
        for pieces in ([text], cut(text, 500)):
            (arguments,) = arguments_of(tool_events("hermes", pieces))
            assert json.loads(arguments)["city"].count("</tool_call>") == 4000, closed
        assert time.process_time() - began_s < 5, "a search for each mark to the end takes 10 times as long"


@pytest.mark.parametrize(
    "text",
    [
        "[see](http://x)",
        "[1](a) and [2](b)",
        "[now](http://x)",
        "[now()](https://example.org/now) says the time",
        "[ now( )](#now)",
        "[get_weather (city)](#x)",
        "[x, y](z)",
    ],
)
def test_a_link_of_markdown_is_content(text: str) -> None:
    for size in (1, 3, 1000):
        assert tool_events("pythonic", cut(text, size)) == [Content(text)]
    assert tool_events("pythonic", cut("[now()] (sic)", 2))[:2] == [CallBegin(0, "now"), CallArguments(0, "{}")]


@pytest.mark.parametrize(
    ("text", "names", "meant"),
    [
        ("[get_weather(city=Rome, days=03", ["get_weather"], [{"city": "Rome", "days": "03"}]),
        ("[get_weather(city='Rome', now()]", ["get_weather"], [{"city": "Rome"}]),
        ("[get_weather(city='Rome']", ["get_weather"], [{"city": "Rome"}]),
        ("[get_weather(city='Rome)]", ["get_weather"], [{"city": "Rome"}]),
        ("[get_weather(city='Rome), now()]", ["get_weather", "now"], [{"city": "Rome"}, {}]),
        ('[get_weather(city="Rome), get_weather(city="a")]', ["get_weather"] * 2, [{"city": "Rome"}, {"city": "a"}]),
        ("[get_weather(city='a), now()')]", ["get_weather"], [{"city": "a), now()"}]),
        ("[get_weather(where={'x': ['Rome]}), now()]", ["get_weather", "now"], [{"where": {"x": ["Rome"]}}, {}]),
        ("[get_weather(city='Rome', 5), now()]", ["get_weather", "now"], [{"city": "Rome"}, {}]),
        ("[get_weather(days=nan, city=)]", ["get_weather"], [{"days": "nan", "city": None}]),
        ("[get_weather(**{'city': 'Rome'), now()]", ["get_weather", "now"], [{"city": "Rome"}, {}]),
    ],
)
def test_pythonic_calls_that_break_are_whole(text: str, names: list[str], meant: list[Any]) -> None:
    check("pythonic", text, names, meant)


def test_a_call_that_is_cut_stays_open() -> None:
    parser = TOOL_FORMATS["hermes"].parser([])
    parser.push("a")
    assert parser.finish(cut=True) == []
    for name, (before, _) in AROUND.items():
        events = tool_events(name.partition(",")[0], [before % "get_weather" + '{"city": "Ro'], is_cut=True)
        assert arguments_of(events) == ['{"city": "Ro']
