"""TOOL_FORMATS and REASONING_FORMATS: every format by name; tool_format_of(), reasoning_format_of(): the choice by chat
template."""

from collections.abc import Mapping

from tandem.workers.text.output.formats import ReasoningFormat, ToolFormat
from tandem.workers.text.output.reasoning.think_tags import DeepSeekR1, Qwen3
from tandem.workers.text.output.tools.hermes import Hermes

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": Hermes(),
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": DeepSeekR1(),
    "qwen3": Qwen3(),
}


def tool_format_of(template: str) -> str | None:
    """Returns the name of the one format of tool calls that a chat template is written for, None if not sure."""
    return _only([name for name, one in TOOL_FORMATS.items() if one.marks_in(template)])


def reasoning_format_of(template: str) -> str | None:
    """Returns the name of the one format of thinking that a chat template is written for, None if not sure."""
    return _only([name for name, one in REASONING_FORMATS.items() if one.marks_in(template)])


def _only(names: list[str]) -> str | None:
    return names[0] if len(names) == 1 else None
