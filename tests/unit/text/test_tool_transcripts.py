"""Answers as the models' published formats have them, well-formed and broken, and the events that they become."""

import pytest

from tandem.workers.text.output.events import OutputEvent
from tests.unit.text.output_events import call, content, cut, reasoning, tool_events

ROME = '{"city": "Rome"}'
NESTED = '{"city": "{\\"a\\": [}]\\u00e9\\n", "where": {"x": [1, {"y": -2.5e3}], "z": {}}, "units": null}'
B, E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
b, sep, e = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
JSON = "<|constrain|>json<|message|>"

TRANSCRIPTS: dict[str, list[tuple[str, list[OutputEvent]]]] = {
    "hermes": [
        (
            'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "</tool_call>"}}\n</tool_call>\n'
            '<tool_call>{"arguments":{},"name":"now"}</tool_call>\n',
            [*content("I look.\n"), *call(0, "get_weather", '{"city": "</tool_call>"}'), *call(1, "now", "{}")],
        ),
        (f'<tool_call>{{"name": "get_weather", "arguments": {NESTED}}}</tool_call>', call(0, "get_weather", NESTED)),
        ('<tool_call>{"name": "now"}</tool_call>', call(0, "now", "{}")),
        ('<tool_call>{"name": "now", "arguments": {"a', call(0, "now", "{}")),
        ('<tool_call>{"name": "now", "argu', call(0, "now", "{}")),
        ('<tool_call>{"arguments": {"a": 1', content('<tool_call>{"arguments": {"a": 1')),
        ('<tool_call>{"name": "no', content('<tool_call>{"name": "no')),
        ("<tool_call>\nnow()</tool_call>", content("<tool_call>\nnow()</tool_call>")),
        (
            '<tool_call>{"name": "rm", "arguments": {"a": "<tool_call>"}}</tool_call>',
            content('<tool_call>{"name": "rm", "arguments": {"a": "<tool_call>"}}</tool_call>'),
        ),
        (
            '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>',
            call(0, "now", '{"a": "01"}'),
        ),
        (
            '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
            call(0, "now", "{}"),
        ),
        (
            f'<tool_call><tool_call>{{"name": "get_weather", "arguments": {ROME}}}</tool_call>',
            [*content("<tool_call>"), *call(0, "get_weather", ROME)],
        ),
        (
            '<tool_call>{"name": "get_weather", "arguments": {"city": "two\nlines"}}</tool_call>',
            call(0, "get_weather", '{"city": "two\\nlines"}'),
        ),
        ("", []),
        ("  \n", content("  \n")),
        ("a < b <tool", content("a < b <tool")),
        ("\n\nHello", content("\n\nHello")),
    ],
    "llama3_json": [
        (f'{{"name": "get_weather", "parameters": {ROME}}}', call(0, "get_weather", ROME)),
        (
            f' <|python_tag|>{{"name": "get_weather", "parameters": {NESTED}}}; {{"name":"now","arguments":{{}}}}',
            [*call(0, "get_weather", NESTED), *call(1, "now", "{}")],
        ),
        (
            f'{{"type": "function", "name": "get_weather", "parameters": {ROME}}}',
            call(0, "get_weather", ROME),
        ),
        ('{"name": "now"}', call(0, "now", "{}")),
        ('{"name": "get_weather"}', content('{"name": "get_weather"}')),
        ('{"answer": 42}', content('{"answer": 42}')),
        (
            '{"name": "rm", "parameters": {}}; {"name": "now", "parameters": {}}',
            [*content('{"name": "rm", "parameters": {}}'), *call(0, "now", "{}")],
        ),
        ("<|python_tag|>print(1)", content("<|python_tag|>print(1)")),
        ('See {"name": "now", "parameters": {}}', content('See {"name": "now", "parameters": {}}')),
        ('{"name": "now", "parameters": {}}; and', [*call(0, "now", "{}"), *content("; and")]),
    ],
    "mistral": [
        (
            f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {NESTED}, "id": "abc123XYZ"}}, '
            '{"name": "now", "arguments": {}}]',
            [*call(0, "get_weather", NESTED), *call(1, "now", "{}")],
        ),
        (
            f"Well.[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]now{{}}",
            [*content("Well."), *call(0, "get_weather", ROME), *call(1, "now", "{}")],
        ),
        (f"[TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS]{ROME}", call(0, "get_weather", ROME)),
        ("[TOOL_CALLS]now[ARGS]", call(0, "now", "{}")),
        ("[TOOL_CALLS]no", content("[TOOL_CALLS]no")),
        (
            '[TOOL_CALLS]rm[ARGS]{"a": "[TOOL_CALLS]now{}"}',
            content('[TOOL_CALLS]rm[ARGS]{"a": "[TOOL_CALLS]now{}"}'),
        ),
        (
            '[TOOL_CALLS][{"name": "rm", "arguments": {}}, {"name": "now", "arguments": {}}]',
            [*content('[TOOL_CALLS][{"name": "rm", "arguments": {}}'), *call(0, "now", "{}")],
        ),
        ("[TOOL_CALLS][1]", content("[TOOL_CALLS][1]")),
    ],
    "granite": [
        (f'<|tool_call|>[{{"name": "get_weather", "arguments": {ROME}}}]', call(0, "get_weather", ROME)),
        (f'<tool_call> [{{"name": "get_weather", "arguments": {ROME}}}]', call(0, "get_weather", ROME)),
        (
            '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
            [*call(0, "now", "{}"), *call(1, "now", "{}")],
        ),
        ("[1] is a source", content("[1] is a source")),
        ('<|tool_call|>[{"name": "now", "arguments": {"a": ', call(0, "now", "{}")),
    ],
    "deepseek_v3": [
        (
            f"Ok.{B}{b}function{sep}get_weather\n```json\n{NESTED}\n```{e}\n"
            f"{b}function{sep}now\n```json\n{{}}\n```{e}{E}",
            [*content("Ok."), *call(0, "get_weather", NESTED), *call(1, "now", "{}")],
        ),
        (f"{B}{b}function{sep}rm\n```json\n{{}}\n```{e}", content(f"{B}{b}function{sep}rm\n```json\n{{}}\n```{e}")),
        (f"{B}{b}function{sep}now\n``", content(f"{B}{b}function{sep}now\n``")),
        (f"{B}text", content(f"{B}text")),
    ],
    "deepseek_v31": [
        (
            f"{B}{b}get_weather{sep}{ROME}{e}{b}now{sep}{{}}{e}{E}",
            [*call(0, "get_weather", ROME), *call(1, "now", "{}")],
        ),
        (f"{B}{b}get_weather{sep}", call(0, "get_weather", "{}")),
    ],
    "pythonic": [
        (
            "[get_weather(city=\"Ro'me\", days=1), now()]",
            [*call(0, "get_weather", '{"city": "Ro\'me", "days": 1}'), *call(1, "now", "{}")],
        ),
        (
            "<|python_start|>[get_weather(city='it\\'s \"x\"\\n\\x41\\xe9', units=None)]<|python_end|>",
            call(0, "get_weather", '{"city": "it\'s \\"x\\"\\nAé", "units": null}'),
        ),
        (
            "[get_weather(where={'a': [1, (2,), True], \"b\": {}}, days=-1_000, city=.5,)]",
            call(0, "get_weather", '{"where": {"a": [1, [2], true], "b": {}}, "days": -1000, "city": 0.5}'),
        ),
        (f"[get_weather(**{ROME})]", call(0, "get_weather", ROME)),
        ('[get_weather(city="R', call(0, "get_weather", '{"city": "R"}')),
        ("[get_weather(ci", call(0, "get_weather", "{}")),
        ("[get_wea", content("[get_wea")),
        ("[1] is a source", content("[1] is a source")),
        ("[now(1)]", content("[now(1)]")),
        ('[rm(a=")", b=[1]), now()]', [*content('[rm(a=")", b=[1])'), *call(0, "now", "{}")]),
        ("Use [now()]", content("Use [now()]")),
    ],
    "qwen3_coder": [
        (
            "Ok\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRo \"me\"\n </b>\n\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=now>\n</function>\n</tool_call>",
            [
                *content("Ok\n"),
                *call(0, "get_weather", '{"city": "Ro \\"me\\"\\n </b>\\n", "days": 3}'),
                *call(1, "now", "{}"),
            ],
        ),
        (
            "<function=get_weather><parameter=city>5</parameter><parameter=units>null</parameter></function>",
            call(0, "get_weather", '{"city": "5", "units": null}'),
        ),
        (
            "<tool_call><function=get_weather><parameter=units>Kelvin</parameter>"
            "<parameter=where>{'a': \"</parameter>\"}</parameter></function></tool_call>",
            call(0, "get_weather", '{"units": "Kelvin", "where": {"a": "</parameter>"}}'),
        ),
        (
            "<tool_call><function=get_weather><parameter=where>{\"a\": \"</parameter>\"}</parameter></function>"
            "</tool_call>",
            call(0, "get_weather", '{"where": {"a": "</parameter>"}}'),
        ),
        (
            "<tool_call><function=get_weather><parameter=where>{'a': True}</parameter></function></tool_call>",
            call(0, "get_weather", '{"where": {"a": true}}'),
        ),
        ("<tool_call><function=get_weather><parameter=city>\nRo", call(0, "get_weather", '{"city": "Ro"}')),
        ("<tool_call><function=now>\n</fun", call(0, "now", "{}")),
        (
            "<tool_call><function=rm><parameter=a><tool_call><function=now></parameter></function></tool_call>",
            content("<tool_call><function=rm><parameter=a><tool_call><function=now></parameter></function></tool_call>"),
        ),
        ("<tool_call>now", content("<tool_call>now")),
    ],
    "openai": [
        (
            "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
            f"<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather {JSON}{ROME}<|call|>",
            [*reasoning("Hm <b>."), *content("I look."), *call(0, "get_weather", ROME)],
        ),
        (
            "<|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
            [*reasoning("2+2"), *content("4")],
        ),
        (f" to=functions.get_weather<|channel|>commentary {JSON}{ROME}<|call|>", call(0, "get_weather", ROME)),
        (
            f"<|start|>assistant to=functions.get_weather<|channel|>commentary {JSON}{ROME}",
            call(0, "get_weather", ROME),
        ),
        (f"<|channel|>commentary to=functions.now {JSON}<|call|>", call(0, "now", "{}")),
        (f"<|channel|>commentary to=functions.now {JSON}{{\"a", call(0, "now", "{}")),
        (f"<|channel|>analysis to=functions.now {JSON}{{}}<|end|>", reasoning("{}")),
        (
            f"<|channel|>commentary to=functions.rm {JSON}{{}}<|call|>",
            content(f"<|channel|>commentary to=functions.rm {JSON}{{}}<|call|>"),
        ),
        (f"<|channel|>commentary to=functions.now {JSON}text<|call|>", content("text")),
        ("<|channel|>comm", []),
        ("plain text <| to=", content("plain text <| to=")),
    ],
}  # fmt: skip
CASES = [(name, text, events) for name, transcripts in TRANSCRIPTS.items() for text, events in transcripts]


@pytest.mark.parametrize(("name", "text", "events"), CASES)
def test_a_transcript_becomes_its_events_however_it_is_cut(name: str, text: str, events: list[OutputEvent]) -> None:
    for size in (1, 2, 3, 7, 1000):
        assert tool_events(name, cut(text, size)) == events, size
    for at in range(len(text)):
        assert tool_events(name, [text[:at], text[at:]]) == events, at
