"""DeepSeek V3, R1 and V3.1: calls between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>, each in marks of its own."""

import re
from collections.abc import Mapping, Sequence

from tandem.workers.text.output import grammar_text
from tandem.workers.text.output.call_ends import SPACE, CallEnds
from tandem.workers.text.output.events import OutputParser
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_calls import AnswerWriter, after_call, answer_parser, named_call
from tandem.workers.text.output.stepping import (
    Marks,
    Steps,
    TextSource,
    goes_on_with,
    one_of,
    run_of,
    spaces,
    text_until,
)

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_MARKS, _BEHIND_CALL = Marks(CALLS_BEGIN, BEGIN), Marks(CALLS_BEGIN, BEGIN, END, CALLS_END)
FENCE = "```"
_ENDS = CallEnds(ends=(END, CALLS_END), begins={CALLS_BEGIN: (), BEGIN: (), FENCE: (SPACE, *"<｜tool▁call")})
_NAME = re.compile(r"[\w.-]*")


class DeepSeekV3:
    """Reads both forms and writes V3's: `function`, separator, name, arguments in a block of ```json."""

    shows_special_tokens = False

    def marks_in(self, template: str) -> bool:
        return CALLS_BEGIN in template and "```json" in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return answer_parser(_steps, tools, _ENDS)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int] = grammar_text.NO_TOKENS
    ) -> str:
        before, begin, separator, end, after = (
            grammar_text.mark(text, special_tokens) for text in (CALLS_BEGIN, BEGIN, SEPARATOR, END, CALLS_END)
        )

        def call(tool: Tool) -> str:
            head, inner, tail = (grammar_text.quoted(text) if text else "" for text in self._around(tool.name))
            return f"{begin} {head} {separator} {inner} {grammar_text.arguments(tool)} {tail} {end}"

        between = '"\\n"' if self._around("")[1] else ""  # V3.1 chains calls directly
        return grammar_text.calls(tools, call, parallel=parallel, before=before, between=between, after=after)

    def _around(self, name: str) -> tuple[str, str, str]:
        """Returns the texts before the separator, before the arguments and behind them."""
        return "function", f"{name}\n```json\n", "\n```"


class DeepSeekV31(DeepSeekV3):
    """Writes V3.1's form: name, separator, arguments."""

    def marks_in(self, template: str) -> bool:
        return CALLS_BEGIN in template and "```json" not in template

    def _around(self, name: str) -> tuple[str, str, str]:
        return name, "", ""


def _steps(source: TextSource, writer: AnswerWriter) -> Steps[None]:
    while (yield from text_until(source, _MARKS, writer.content)) is not None:
        source.keep()
        if (yield from one_of(source, (CALLS_BEGIN, BEGIN))) == CALLS_BEGIN:
            yield from spaces(source)
            yield from one_of(source, (BEGIN,))
        while (yield from _call(source, writer)):
            source.keep()  # the next one's begin may be forgotten
    yield from writer.finish()


def _call(source: TextSource, writer: AnswerWriter) -> Steps[bool]:
    """Reads a call behind its begin mark. Returns whether the next may follow."""
    name = yield from _name(source)
    if name is None:
        yield from writer.content(source.release())
        return False
    read = yield from named_call(source, writer, name, (FENCE, END, CALLS_END))
    yield from after_call(source, read, FENCE, _BEHIND_CALL)
    if not read.is_call:
        return False
    yield from spaces(source)
    yield from one_of(source, (END,))
    yield from spaces(source)
    return (yield from one_of(source, (CALLS_END,))) is None


def _name(source: TextSource) -> Steps[str | None]:
    """Reads up to the arguments and returns the function's name, or None."""
    name = yield from run_of(source, _NAME, limit=256)
    if (yield from one_of(source, (SEPARATOR,))) is None:
        return None
    yield from spaces(source)
    if name == "function" and not (yield from goes_on_with(source, "{")):
        name = yield from run_of(source, _NAME, limit=256)
        yield from spaces(source)
        if (yield from one_of(source, ("```json",))) is None and not (yield from goes_on_with(source, "{")):
            return None
        yield from spaces(source)
    return name
