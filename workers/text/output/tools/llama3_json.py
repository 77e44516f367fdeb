"""llama3_json: {"name": ..., "parameters": {...}}, several separated by `;`, as Llama 3.1 to 3.3 write; <|python_tag|>
may stand before."""

from collections.abc import Mapping, Sequence

from tandem.workers.text.output import grammar_text
from tandem.workers.text.output.call_ends import OBJECT, SPACE, CallEnds
from tandem.workers.text.output.events import OutputParser
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_calls import (
    AnswerWriter,
    CallKeys,
    Read,
    answer_parser,
    behind_call,
    json_call,
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
    spaces,
    text_until,
)

TAG = "<|python_tag|>"
_MARKS = Marks(TAG)
_ENDS = CallEnds(begins={TAG: OBJECT}, separators={";": (SPACE, "[{<]")}, closers="}")
_KEYS = CallKeys(arguments=("parameters", "arguments"), may_lack_arguments=False)


class Llama3Json:
    """Calls stand at the begin of an answer or behind the tag. JSON elsewhere is content."""

    shows_special_tokens = False  # the tag is one, but calls are found without

    def marks_in(self, template: str) -> bool:
        header = "<|start_header_id|>" in template or "<|header_start|>" in template
        return header and "tool_calls" in template and '"parameters": ' in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return answer_parser(_steps, tools, _ENDS)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int] = grammar_text.NO_TOKENS
    ) -> str:
        def call(tool: Tool) -> str:
            return grammar_text.named_json(tool, key="parameters")

        return grammar_text.calls(tools, call, parallel=parallel, between='"; "')


def _steps(source: TextSource, writer: AnswerWriter) -> Steps[None]:
    yield from _calls(source, writer)
    while (yield from text_until(source, _MARKS, writer.content)) is not None:
        yield from _calls(source, writer)
    yield from writer.finish()


def _calls(source: TextSource, writer: AnswerWriter) -> Steps[None]:
    source.keep()
    yield from spaces(source)
    yield from one_of(source, (TAG,))
    yield from spaces(source)
    is_next = yield from goes_on_with(source, "{")
    if not is_next:
        yield from writer.content(source.release())
    while is_next:
        read = yield from json_call(source, writer, _KEYS)
        if read is Read.BROKEN:
            return
        if read.is_call:
            yield from behind_call(source, writer)
        if read is Read.CLOSED:
            source.keep()
            yield from spaces(source)
            if (yield from begins_with(source, (";",))) is None:
                source.release()
                yield from text_until(source, _MARKS, nowhere)
                return
        is_next = yield from next_begins(source, writer)
