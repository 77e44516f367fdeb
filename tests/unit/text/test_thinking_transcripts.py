"""Thinking before answers and calls, in each format, and where a prompt leaves it open."""

import pytest

from tandem.workers.text.format_list import REASONING_FORMATS, TOOL_FORMATS
from tandem.workers.text.output.events import OutputEvent, PlainOutput
from tests.unit.text.output_events import TOOLS, call, content, cut, read, reasoning

CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
GRANITE = "Here is my thought process:"

TRANSCRIPTS: list[tuple[str, bool, str, list[OutputEvent]]] = [
    ("qwen3", False, "<think>\nHm\n</think>\n\nYes", [*reasoning("\nHm\n"), *content("\n\nYes")]),
    ("qwen3", False, "\n<think>Hm</think>Yes", [*reasoning("Hm"), *content("Yes")]),
    ("qwen3", False, f"<think>{CALL}</think>\n\n{CALL}\n", [*reasoning(CALL), *call(0, "now", "{}")]),
    ("qwen3", False, "<think>Hm </thi", reasoning("Hm </thi")),
    ("qwen3", False, "Yes <think>no</think>", content("Yes <think>no</think>")),
    ("qwen3", False, "<thi", content("<thi")),
    ("qwen3", False, "<think></think>Yes", content("Yes")),
    ("qwen3", False, "", []),
    ("qwen3", True, "Hm</think>Yes</think>", [*reasoning("Hm"), *content("Yes</think>")]),
    ("qwen3", True, "\n Hm", reasoning("\n Hm")),
    ("qwen3", True, "<think>Hm</think>Yes", [*reasoning("Hm"), *content("Yes")]),
    ("deepseek_r1", True, "Hm\n</think>\n\nYes", [*reasoning("Hm\n"), *content("\n\nYes")]),
    ("deepseek_r1", True, "<think>Hm", reasoning("Hm")),
    ("deepseek_r1", False, f"{CALL}", call(0, "now", "{}")),
    ("granite", False, f"{GRANITE}\nHm\nHere is my response:\nYes", [*reasoning("\nHm\n"), *content("\nYes")]),
    (
        "granite",
        False,
        f"Here's my thought process: a Here's my response:{CALL}",
        [*reasoning(" a "), *call(0, "now", "{}")],
    ),
    ("granite", False, "Here is my response: Yes", content("Here is my response: Yes")),
    ("granite", False, "Here is my thou", content("Here is my thou")),
    (
        "openai_gptoss",
        False,
        f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes {CALL}<|return|>",
        [*reasoning("Hm"), *content("Yes "), *call(0, "now", "{}")],
    ),
    (
        "openai_gptoss",
        True,
        "Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        [*reasoning("Hm"), *content("Yes")],
    ),
    ("openai_gptoss", False, "<|channel|>final<|message|>Yes", content("Yes")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "inside", "text", "events"), TRANSCRIPTS)
def test_thinking_is_told_from_answer_and_calls(name: str, inside: bool, text: str, events: list[OutputEvent]) -> None:
    one = REASONING_FORMATS[name]
    for size in (1, 2, 3, 7, 1000):
        then = TOOL_FORMATS["hermes"].parser(TOOLS)
        assert read(one.parser(then, inside=inside), cut(text, size)) == events, size


def test_harmony_sorts_thinking_and_calls_together() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        "<|constrain|>json<|message|>{}<|call|>"
    )
    for size in (1, 5, 1000):
        parser = REASONING_FORMATS["openai_gptoss"].parser(TOOL_FORMATS["openai"].parser(TOOLS), inside=False)
        assert read(parser, cut(text, size)) == [*reasoning("Hm"), *call(0, "now", "{}")]
    opened = REASONING_FORMATS["openai_gptoss"].parser(TOOL_FORMATS["openai"].parser(TOOLS), inside=True)
    assert read(opened, ["Hm<|end|>"]) == reasoning("Hm")
    no_tools = REASONING_FORMATS["openai_gptoss"].parser(PlainOutput(), inside=False)
    called = "<|channel|>commentary to=functions.now<|message|>{}<|call|>"
    assert read(no_tools, [called]) == content(called)


@pytest.mark.parametrize(
    ("name", "prompt", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
        ("deepseek_r1", "<｜Assistant｜><think>\n", True),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜></think>", False),
        ("deepseek_r1", "<｜Assistant｜><think>a</think>The answer", False),
        ("deepseek_r1", "</think>a<｜User｜>b<｜Assistant｜><think>\n", True),
        ("granite", "<|start_of_role|>assistant<|end_of_role|>", False),
        ("granite", f"<|start_of_role|>assistant<|end_of_role|>{GRANITE}\n", True),
        ("openai_gptoss", "<|start|>assistant", False),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>", True),
    ],
)
def test_a_prompt_may_end_inside_the_thinking(name: str, prompt: str, inside: bool) -> None:
    assert REASONING_FORMATS[name].starts_inside(prompt) is inside


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
def test_an_answer_may_be_begun_inside_the_thinking(name: str) -> None:
    one = REASONING_FORMATS[name]
    assert one.is_open(f"{one.start}Hm") and one.is_open(one.start)
    for begun in ("", "Yes", f"{one.start}Hm{one.end}Yes", f"The mark is {one.start}", f"Hm{one.end}"):
        assert not one.is_open(begun), begun


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
def test_thinking_between_the_marks_of_a_format_is_read_back(name: str) -> None:
    one = REASONING_FORMATS[name]
    assert read(one.parser(PlainOutput(), inside=False), [f"{one.start}Hm{one.end}Yes"])[0] == reasoning("Hm")[0]
