"""Granite: <|tool_call|>[{"name": ..., "arguments": {...}}, ...], with <tool_call> as the mark since 3.1."""

from collections.abc import Mapping, Sequence

from tandem.workers.text.output import grammar_text
from tandem.workers.text.output.call_ends import OBJECT, SPACE, CallEnds
from tandem.workers.text.output.events import OutputParser
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_calls import AnswerWriter, Read, answer_parser, json_call, json_calls, next_begins
from tandem.workers.text.output.json_stream import nowhere
from tandem.workers.text.output.stepping import (
    Marks,
    Steps,
    TextSource,
    goes_on_with,
    one_of,
    spaces,
    text_until,
)

TOKEN, TEXT = "<|tool_call|>", "<tool_call>"
_MARKS = Marks(TOKEN, TEXT)
_BEGIN = (SPACE, r"[\[{]", SPACE, "[{\"']")
_ENDS = CallEnds(begins={TOKEN: _BEGIN, TEXT: _BEGIN}, separators={",": (*OBJECT, "[nait]")}, closers="}")


class Granite:
    """A list of calls at the begin of an answer needs no mark."""

    shows_special_tokens = True

    def marks_in(self, template: str) -> bool:
        if "<|start_of_role|>" not in template:
            return False
        return TOKEN in template or (TEXT in template and "</tool_call>" not in template)

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return answer_parser(_steps, tools, _ENDS)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int] = grammar_text.NO_TOKENS
    ) -> str:
        begin = grammar_text.mark(TOKEN if TOKEN in special_tokens else TEXT, special_tokens)
        before = f'{begin} "["'
        return grammar_text.calls(
            tools, grammar_text.named_json, parallel=parallel, before=before, between='", "', after='"]"'
        )


def _steps(source: TextSource, writer: AnswerWriter) -> Steps[None]:
    source.keep()
    yield from spaces(source)
    if (yield from goes_on_with(source, "[")):
        yield from _list(source, writer)
    else:
        yield from writer.content(source.release())
    while (yield from text_until(source, _MARKS, writer.content)) is not None:
        source.keep()
        yield from one_of(source, (TOKEN, TEXT))
        yield from _list(source, writer)
    yield from writer.finish()


def _list(source: TextSource, writer: AnswerWriter) -> Steps[None]:
    yield from spaces(source)
    read = yield from _calls(source, writer)
    while read is Read.CALL and (yield from next_begins(source, writer, ("{", "["))):
        read = yield from _calls(source, writer)
    if read is Read.CLOSED:
        yield from text_until(source, _MARKS, nowhere)


def _calls(source: TextSource, writer: AnswerWriter) -> Steps[Read]:
    one = yield from goes_on_with(source, "{")
    return (yield from (json_call(source, writer) if one else json_calls(source, writer)))
