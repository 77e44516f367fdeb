"""openai: calls as gpt-oss writes them in harmony, thinking and final answer sorted too."""

from collections.abc import Mapping, Sequence

from tandem.workers.text.output import grammar_text
from tandem.workers.text.output.events import OutputParser
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.tools.harmony import CHANNEL, CONSTRAIN, MESSAGE, START, HarmonyParser


class OpenAIFunctions:
    """The model ends its turn with each call, so the grammar has one call, also if several are allowed."""

    shows_special_tokens = True

    def marks_in(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template and "functions" in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return HarmonyParser(tools)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int] = grammar_text.NO_TOKENS
    ) -> str:
        start, channel, constrain, message = (
            grammar_text.mark(text, special_tokens) for text in (START, CHANNEL, CONSTRAIN, MESSAGE)
        )

        def call(tool: Tool) -> str:
            to = grammar_text.quoted(f"commentary to=functions.{tool.name} ")
            return f'{channel} {to} {constrain} "json" {message} {grammar_text.arguments(tool)}'

        # behind thinking a message begins with its role, which else the prompt has
        return grammar_text.calls(tools, call, parallel=False, before=f'({start} "assistant")?')
