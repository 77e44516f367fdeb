"""Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen2.5, Qwen3 and Hermes write."""

from collections.abc import Mapping, Sequence

from tandem.workers.text.output import grammar_text
from tandem.workers.text.output.call_ends import OBJECT, CallEnds
from tandem.workers.text.output.events import OutputParser
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_calls import AnswerWriter, after_call, answer_parser, json_call, next_begins
from tandem.workers.text.output.stepping import Marks, Steps, TextSource, one_of, spaces, text_until

BEGIN, END = "<tool_call>", "</tool_call>"
NEW_LINE = "\n"
_MARKS, _BEHIND_CALL = Marks(BEGIN), Marks(BEGIN, END)
_ENDS = CallEnds(ends=(END,), begins={BEGIN: OBJECT}, closers="}")


class Hermes:
    shows_special_tokens = True  # some models have the marks as special tokens

    def marks_in(self, template: str) -> bool:
        return BEGIN in template and END in template and "<function=" not in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return answer_parser(_steps, tools, _ENDS)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int] = grammar_text.NO_TOKENS
    ) -> str:
        def call(tool: Tool) -> str:
            begin, end = (grammar_text.mark(text, special_tokens) for text in (BEGIN, END))
            return f"{begin} {grammar_text.named_json(tool, before=NEW_LINE, after=NEW_LINE)} {end}"

        return grammar_text.calls(tools, call, parallel=parallel, between='"\\n"')


def _steps(source: TextSource, writer: AnswerWriter) -> Steps[None]:
    while (yield from text_until(source, _MARKS, writer.content)) is not None:
        source.keep()
        yield from one_of(source, (BEGIN,))
        yield from spaces(source)
        is_next = True
        while is_next:
            read = yield from json_call(source, writer)
            yield from after_call(source, read, END, _BEHIND_CALL)
            is_next = read.is_call and (yield from next_begins(source, writer))
    yield from writer.finish()
