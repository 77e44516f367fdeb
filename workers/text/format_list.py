"""TOOL_FORMATS and REASONING_FORMATS: every format by name; tool_format_of(), reasoning_format_of(): the choice by chat
template."""

from collections.abc import Mapping

from tandem.workers.text.output.formats import ReasoningFormat, ToolFormat
from tandem.workers.text.output.reasoning.granite_thinking import GraniteThinking
from tandem.workers.text.output.reasoning.openai_gptoss import OpenAIGptOss
from tandem.workers.text.output.reasoning.think_tags import DeepSeekR1, Qwen3
from tandem.workers.text.output.tools.deepseek_v3 import DeepSeekV3, DeepSeekV31
from tandem.workers.text.output.tools.granite import Granite
from tandem.workers.text.output.tools.hermes import Hermes
from tandem.workers.text.output.tools.llama3_json import Llama3Json
from tandem.workers.text.output.tools.mistral import Mistral
from tandem.workers.text.output.tools.openai_functions import OpenAIFunctions
from tandem.workers.text.output.tools.pythonic import Pythonic
from tandem.workers.text.output.tools.qwen3_coder import Qwen3Coder

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "deepseek_v3": DeepSeekV3(),
    "deepseek_v31": DeepSeekV31(),
    "granite": Granite(),
    "hermes": Hermes(),
    "llama3_json": Llama3Json(),
    "mistral": Mistral(),
    "openai": OpenAIFunctions(),
    "pythonic": Pythonic(),
    "qwen3_coder": Qwen3Coder(),
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": DeepSeekR1(),
    "granite": GraniteThinking(),
    "openai_gptoss": OpenAIGptOss(),
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
