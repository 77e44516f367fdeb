"""An invented way to write calls, `<call>name {json}</call>`, and one to think, `<think>...</think>`."""

import re
from collections.abc import Mapping, Sequence

from tandem.workers.text.output import grammar_text
from tandem.workers.text.output.events import OutputParser
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_calls import AnswerWriter, named_call
from tandem.workers.text.output.reasoning.think_tags import Qwen3
from tandem.workers.text.output.stepping import (
    Marks,
    SteppedParser,
    Steps,
    TextSource,
    one_of,
    run_of,
    spaces,
    text_until,
)

BEGIN, END = "<call>", "</call>"
_MARKS = Marks(BEGIN)
_NAME = re.compile(r"[\w-]*")


class InventedToolFormat:
    """Implements ToolFormat. shows_special_tokens may be given, to try what follows from it."""

    def __init__(self, *, shows_special_tokens: bool = False) -> None:
        self.shows_special_tokens = shows_special_tokens

    def marks_in(self, template: str) -> bool:
        return BEGIN in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        writer = AnswerWriter(tools)
        return SteppedParser(lambda source: _steps(source, writer))

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int] = grammar_text.NO_TOKENS
    ) -> str:
        begin, end = (grammar_text.mark(text, special_tokens) for text in (BEGIN, END))

        def call(tool: Tool) -> str:
            return f"{begin} {grammar_text.quoted(tool.name + ' ')} {grammar_text.arguments(tool)} {end}"

        return grammar_text.calls(tools, call, parallel=parallel)


class InventedReasoning(Qwen3):
    """Implements ReasoningFormat."""


def _steps(source: TextSource, writer: AnswerWriter) -> Steps[None]:
    while (yield from text_until(source, _MARKS, writer.content)) is not None:
        source.keep()
        yield from one_of(source, (BEGIN,))
        name = yield from run_of(source, _NAME, limit=64)
        yield from spaces(source)
        yield from named_call(source, writer, name)
        yield from one_of(source, (END,))
    yield from writer.finish()
