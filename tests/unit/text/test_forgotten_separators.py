"""Two calls between which the format's separator, or a mark, was forgotten: both are read."""

import json

import pytest

from tandem.workers.text.output.events import CallBegin, Content
from tests.unit.text.output_events import arguments_of, cut, tool_events

NOW, GET = '{"name": "now", "arguments": {}}', '{"name": "get_weather", "arguments": {"city": "a}{"}}'
OPEN = NOW[:-1]
CODER = "<function=get_weather>\n<parameter=city>\na}{\n</parameter>\n</function>"
B, SEP, E, JSON = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json\n"
TO, ARGS = "<|channel|>commentary to=functions.", '{"city": "a}{"}'
FORGOTTEN = [
    *(("llama3_json", one.replace("arguments", "parameters"))
      for one in (NOW + GET, f"{NOW}\n{GET}", f"{NOW}, {GET}", f"{NOW};{GET}", OPEN + GET,
                  f"<|python_tag|>{NOW} {GET}")),
    *(("hermes", one)
      for one in (f"<tool_call>\n{NOW}\n{GET}\n</tool_call>", f"<tool_call>{NOW}</tool_call>\n{GET}</tool_call>",
                  f"<tool_call>{NOW}<tool_call>{GET}", f"<tool_call>{NOW}, {GET}",
                  f"<tool_call>{OPEN}\n{GET}</tool_call>")),
    *((name, begin + one) for name, begin in (("mistral", "[TOOL_CALLS]"), ("granite", "<|tool_call|>"))
      for one in (f"[{NOW}{GET}]", f"[{NOW}\n{GET}]", f"[{OPEN} {GET}]", NOW + GET, f"{NOW}\n{GET}", f"{NOW}, {GET}",
                  f"[{NOW}][{GET}]", f"[{NOW}]\n{GET}", f"[{NOW}]{begin}[{GET}]", f"[{NOW}]\n{begin}{GET}")),
    ("granite", f"[{NOW} {GET}]"),
    ("mistral", '[TOOL_CALLS]now[ARGS]{}get_weather[ARGS]{"city": "a}{"}'),
    ("mistral", '[TOOL_CALLS]now{}\n get_weather[CALL_ID]1[ARGS]{"city": "a}{"}'),
    ("mistral", f"[TOOL_CALLS]now[ARGS]{{}}{GET}"),
    ("pythonic", "[now() get_weather(city='a}{')]"),
    ("pythonic", "[now()\n# and\nget_weather(city='a}{')]"),
    ("pythonic", "[now()][get_weather(city='a}{')]"),
    ("pythonic", "[now()]\n[get_weather(city='a}{')]"),
    ("deepseek_v31", f"{B}now{SEP}{{}}{E}get_weather{SEP}{ARGS}{E}"),
    ("deepseek_v31", f"{B}now{SEP}{{}}{B}get_weather{SEP}{ARGS}"),
    ("deepseek_v31", f"{B}now{SEP}{{}}\n get_weather{SEP}{ARGS}{E}<｜tool▁calls▁end｜>"),
    ("deepseek_v3", f"{B}function{SEP}now\n{JSON}{{}}\n```{E}\nfunction{SEP}get_weather\n{JSON}{ARGS}\n```{E}"),
    ("deepseek_v3", f"{B}function{SEP}now\n{JSON}{{}}{B}function{SEP}get_weather\n{JSON}{ARGS}"),
    *(("openai", f"{TO}now<|message|>{{}}{between}{TO}get_weather<|message|>{ARGS}<|call|>")
      for between in ("", "<|call|>", "<|start|>assistant")),
    ("qwen3_coder", f"<function=now>\n</function>\n{CODER}"),
    ("qwen3_coder", f"<tool_call><function=now>\n{CODER}"),
    ("qwen3_coder", f"<tool_call><function=now>\n</tool_call>{CODER}</tool_call>"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), FORGOTTEN)
def test_both_calls_are_read(name: str, text: str) -> None:
    for size in (1, 3, 1000):
        events = tool_events(name, cut(text, size))
        assert [event.name for event in events if isinstance(event, CallBegin)] == ["now", "get_weather"], events
        assert [json.loads(one) for one in arguments_of(events)] == [{}, {"city": "a}{"}]
        assert len(events) == 4, events


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", NOW.replace("arguments", "parameters")),
        ("hermes", f"<tool_call>{NOW}</tool_call>"),
        ("mistral", f"[TOOL_CALLS][{NOW}]"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}"),
        ("granite", f"<|tool_call|>[{NOW}]"),
        ("deepseek_v31", f"{B}now{SEP}{{}}{E}"),
        ("pythonic", "[now()]"),
    ],
)
@pytest.mark.parametrize("behind", [', {"x": 1}', '{"name": 5}', " now what?", "; [1](x)", "[1] {}", ".", "[x](now)"])
def test_what_is_no_call_behind_one_is_content(name: str, text: str, behind: str) -> None:
    for size in (1, 3, 1000):
        *_, last = tool_events(name, cut(text + behind, size))
        assert isinstance(last, Content) and last.text.lstrip() == behind.lstrip(), last
