"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and the newer [TOOL_CALLS]name[ARGS]{...}."""

import re
from collections.abc import Mapping, Sequence

from tandem.workers.text.output import grammar_text
from tandem.workers.text.output.call_ends import OBJECT, SPACE, CallEnds
from tandem.workers.text.output.events import OutputParser
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_calls import (
    AnswerWriter,
    Read,
    answer_parser,
    behind_call,
    json_call,
    json_calls,
    named_call,
    next_begins,
)
from tandem.workers.text.output.json_stream import nowhere
from tandem.workers.text.output.stepping import (
    Marks,
    Steps,
    TextSource,
    begins_with,
    goes_on_with,
    one_of,
    run_of,
    spaces,
    text_until,
)

BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MARKS = Marks(BEGIN)
_NAME = re.compile(r"[\w.-]*")
_ENDS = CallEnds(
    begins={BEGIN: (SPACE, r"(?:\[(?=\s*(?:\{|\Z))|\{|[\w.-]{1,256}(?=[\[{]|\Z))")},
    separators={",": (*OBJECT, "[nait]")},
    closers="}",
)


class Mistral:
    """Reads both forms. It writes the newer one for tokenizers whose special tokens have [ARGS]."""

    shows_special_tokens = True

    def marks_in(self, template: str) -> bool:
        return BEGIN in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return answer_parser(_steps, tools, _ENDS)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int] = grammar_text.NO_TOKENS
    ) -> str:
        begin, arguments = (grammar_text.mark(text, special_tokens) for text in (BEGIN, ARGUMENTS))

        def named(tool: Tool) -> str:
            return f"{begin} {grammar_text.quoted(tool.name)} {arguments} {grammar_text.arguments(tool)}"

        if ARGUMENTS in special_tokens:
            return grammar_text.calls(tools, named, parallel=parallel)
        before = f'{begin} "["'
        return grammar_text.calls(
            tools, grammar_text.named_json, parallel=parallel, before=before, between='", "', after='"]"'
        )


def _steps(source: TextSource, writer: AnswerWriter) -> Steps[None]:
    while (yield from text_until(source, _MARKS, writer.content)) is not None:
        source.keep()
        yield from one_of(source, (BEGIN,))
        yield from spaces(source)
        read = yield from _calls(source, writer)
        while read is Read.CALL:
            yield from behind_call(source, writer)
            if not (yield from next_begins(source, writer, ("{", "["))):
                source.keep()
            elif (yield from begins_with(source, (BEGIN,))) is not None:
                yield from writer.content(source.release())
                break
            read = yield from _calls(source, writer)
        if read is Read.CLOSED:
            yield from text_until(source, _MARKS, nowhere)
    yield from writer.finish()


def _calls(source: TextSource, writer: AnswerWriter) -> Steps[Read]:
    if (yield from goes_on_with(source, "[")):
        return (yield from json_calls(source, writer))
    if (yield from goes_on_with(source, "{")):
        return (yield from json_call(source, writer))
    return (yield from _named(source, writer))


def _named(source: TextSource, writer: AnswerWriter) -> Steps[Read]:
    name = yield from run_of(source, _NAME, limit=256)
    separator = yield from one_of(source, (CALL_ID, ARGUMENTS))
    if separator == CALL_ID:
        yield from run_of(source, _NAME, limit=256)
        separator = yield from one_of(source, (ARGUMENTS,))
    if separator is None and not (yield from goes_on_with(source, "{")):
        yield from writer.content(source.release())
        return Read.BROKEN
    yield from spaces(source)
    return (yield from named_call(source, writer, name, (BEGIN,)))
