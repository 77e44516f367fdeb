"""The choice of formats by chat template."""

import pytest

from tandem.workers.text.format_list import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format_of,
    tool_format_of,
)
from tests.unit.text.data import SHARED

REAL = SHARED / "chat_templates"

TEMPLATES = [
    ("{{ '<|im_start|>' }}<tool_call>\n{\"name\": <function-name>}\n</tool_call>", "hermes", None),
    ("<tool_call>{}</tool_call>{% if '</think>' in content %}{{ '<think>\\n' }}", "hermes", "qwen3"),
    ("<tool_call>\n<function=example_function_name>\n<parameter=a>", "qwen3_coder", None),
    ('<|start_header_id|>{% if message.tool_calls %}{"name": {{ \'"parameters": \' }}', "llama3_json", None),
    ("<|header_start|>{% if message.tool_calls %}<|python_start|>{{ '\"parameters\": ' }}", "llama3_json", None),
    ("<|header_start|>{{ tool_call.name + '(' -}} {{ param + '=\"' }}", "pythonic", None),
    ("<|header_start|>Use exact format: [func_name1(param1=value1)]", "pythonic", None),
    ('[AVAILABLE_TOOLS]{{- "[TOOL_CALLS] [" }}', "mistral", None),
    ("{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral", None),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ type + '<｜tool▁sep｜>\n```json", "deepseek_v3", None),
    ("<｜tool▁calls▁begin｜>{{ name }}<｜tool▁sep｜><｜Assistant｜></think>", "deepseek_v31", "deepseek_r1"),
    ("<｜Assistant｜><think>\\n{{ content.split('</think>')[-1] }}", None, "deepseek_r1"),
    ("<|start_of_role|>assistant<|end_of_role|><|tool_call|>", "granite", None),
    ("<|start_of_role|>Write your thoughts after 'Here is my thought process:' <|tool_call|>", "granite", "granite"),
    ("<|start_of_role|>assistant<tool_call>{{ call }}</tool_call>", "hermes", None),
    ("<|start|>assistant<|channel|>analysis<|message|> to=functions.{{ name }}", "openai", "openai_gptoss"),
    ("{{ '<|im_start|>' + message['role'] }}", None, None),
    ("[TOOL_CALLS] <tool_call></tool_call>", None, None),
]


@pytest.mark.parametrize(("template", "tools", "thinking"), TEMPLATES)
def test_marks_in_a_template_choose_the_formats(template: str, tools: str | None, thinking: str | None) -> None:
    assert tool_format_of(template) == tools
    assert reasoning_format_of(template) == thinking


def test_every_format_can_be_chosen() -> None:
    assert {tools for _, tools, _ in TEMPLATES} == {None, *TOOL_FORMATS}
    assert {thinking for *_, thinking in TEMPLATES} == {None, *REASONING_FORMATS}


@pytest.mark.skipif(not REAL.is_dir(), reason="no real templates here")
def test_real_templates_choose_their_formats() -> None:
    found = {path.stem: tool_format_of(path.read_text()) for path in sorted(REAL.glob("*.jinja"))}
    assert {name: one for name, one in found.items() if one is not None} == {
        "granite-3.0-instruct": "granite",
        "qwen2.5-instruct": "hermes",
    }
    assert not [path for path in REAL.glob("*.jinja") if reasoning_format_of(path.read_text())]
