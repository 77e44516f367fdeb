"""qwen3_coder: <tool_call><function=name><parameter=x>value</parameter></function></tool_call>.

Strings are written as they are, other values as JSON, so the tool's schema says how a value is read.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.workers.text.output import grammar_text
from tandem.workers.text.output.events import OutputEvent, OutputParser
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_calls import AnswerWriter
from tandem.workers.text.output.json_stream import JsonScanner, scanned
from tandem.workers.text.output.python_stream import to_json
from tandem.workers.text.output.schema_types import (
    Argument,
    as_typed,
    listed_values,
    not_expressible,
    plain_arguments,
    plain_text,
    types_of,
)
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

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_MARKS, _FUNCTION_END = Marks(BEGIN, FUNCTION), Marks(FUNCTION_END)
_VALUE_END = Marks("\n" + PARAMETER_END, PARAMETER_END)
_NAME = re.compile(r"[^<>\n]*")


class Qwen3Coder:
    shows_special_tokens = True  # as hermes

    def marks_in(self, template: str) -> bool:
        return BEGIN in template and FUNCTION in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return SteppedParser(lambda source: _CoderAnswer(source, tools).read())

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int] = grammar_text.NO_TOKENS
    ) -> str:
        begin, end = (grammar_text.mark(text, special_tokens) for text in (BEGIN, END))

        def call(tool: Tool) -> str:
            head = grammar_text.quoted(f"\n{FUNCTION}{tool.name}>\n")
            values = " ".join(_parameter(tool, argument) for argument in _arguments(tool))
            return f'{begin} {head} {values} "{FUNCTION_END}\\n" {end}'

        rules = grammar_text.calls(tools, call, parallel=parallel, between='"\\n"')
        return rules + f"TEXT: /(?s:.*)/ & ~/(?s:.*)<\\/parameter>(?s:.*)/\nTEXT_VALUE: TEXT {_quoted_end()}\n"


def _quoted_end() -> str:
    return grammar_text.quoted(f"\n{PARAMETER_END}\n")


def _arguments(tool: Tool) -> list[Argument]:
    arguments = plain_arguments(tool)
    if arguments is None:
        raise not_expressible(tool, "it must be an object of named properties, without conditions among them.")
    for one in arguments:
        if not one.name or _NAME.fullmatch(one.name) is None:
            raise not_expressible(tool, f"the name of property {one.name!r} has a character that ends a name.")
    return arguments


def _parameter(tool: Tool, argument: Argument) -> str:
    """Returns the Lark text of one argument."""
    value = f"{grammar_text.json_value(argument.schema)} {_quoted_end()}"
    if _is_text(argument.schema):
        values = listed_values(argument.schema)
        value = "TEXT_VALUE"
        if values is not None:
            if any(PARAMETER_END in one for one in values):
                raise not_expressible(tool, f"a value of property {argument.name!r} has {PARAMETER_END!r}.")
            value = f"({' | '.join(grammar_text.quoted(one) for one in values)}) {_quoted_end()}"
    text = f"{grammar_text.quoted(f'{PARAMETER}{argument.name}>' + chr(10))} {value}"
    return text if argument.required else f"({text})?"


def _is_text(schema: Any) -> bool:
    """Returns whether values are written as they are. Strings that a pattern or another rule limits are read in either
    way and forced as JSON."""
    if isinstance(schema, Mapping):
        schema = {key: part for key, part in schema.items() if key not in ("$defs", "definitions")}
    return plain_text(schema)


class _CoderAnswer:
    """Reads one answer."""

    def __init__(self, source: TextSource, tools: Sequence[Tool]) -> None:
        self._source, self._writer = source, AnswerWriter(tools)
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._held: list[str] = []

    def read(self) -> Steps[None]:
        source, writer = self._source, self._writer
        while (yield from text_until(source, _MARKS, writer.content)) is not None:
            source.keep()
            name = yield from self._head()
            head = source.release()
            if name in writer.names and name is not None:
                yield from writer.begin(name)
                if (yield from self._parameters(self._schemas[name])):
                    yield from spaces(source)
                    yield from one_of(source, (END,))
            else:
                yield from writer.content(head)
                if name is not None:  # nothing inside the call of another function is a call
                    yield from text_until(source, _FUNCTION_END, writer.content)
        yield from writer.finish()

    def _head(self) -> Steps[str | None]:
        source = self._source
        if (yield from one_of(source, (BEGIN, FUNCTION))) == BEGIN:
            yield from spaces(source)
            if (yield from one_of(source, (FUNCTION,))) is None:
                return None
        name = yield from run_of(source, _NAME, limit=256)
        return None if (yield from one_of(source, (">",))) is None else name.strip()

    def _parameters(self, schema: Mapping[str, Any]) -> Steps[bool]:
        """Reads parameters and the function's end. Returns whether all of it was there."""
        source, writer = self._source, self._writer
        before = "{"
        while True:
            yield from spaces(source)
            mark = yield from one_of(source, (PARAMETER, FUNCTION_END))
            if mark == FUNCTION_END:
                yield from writer.arguments("{}" if before == "{" else "}")
                return True
            name = (yield from run_of(source, _NAME, limit=256)) if mark is not None else ""
            if mark is None or (yield from one_of(source, (">",))) is None:
                return False
            yield from one_of(source, ("\n",))
            yield from writer.arguments(f"{before}{json.dumps(name.strip(), ensure_ascii=False)}: ")
            before = ", "
            if not (yield from self._value(name.strip(), schema)):
                return False

    def _value(self, name: str, schema: Mapping[str, Any]) -> Steps[bool]:
        properties = schema.get("properties")
        one = properties.get(name) if isinstance(properties, Mapping) else None
        if one is None or _is_text(one):
            yield from self._writer.arguments('"')
            mark = yield from text_until(self._source, _VALUE_END, self._text)
            yield from self._writer.arguments('"' if mark is not None else "")
        else:
            self._held = []
            mark = yield from self._literal()
            text = "".join(self._held).strip()
            yield from self._writer.arguments(as_typed(text, to_json(text), types_of(one, schema)) if mark else text)
        return mark is not None and (yield from one_of(self._source, (mark,))) is not None

    def _literal(self) -> Steps[str | None]:
        """Holds the text of a value. Marks inside its strings do not end it."""
        self._held.append((yield from spaces(self._source)))
        if (yield from self._begins_literal()):
            yield from scanned(self._source, JsonScanner(strict=True), self._hold, as_written=True)
        return (yield from text_until(self._source, _VALUE_END, self._hold))

    def _begins_literal(self) -> Steps[bool]:
        source = self._source
        while source.at == len(source.text) and not source.ended:
            yield None
        return source.at < len(source.text) and source.text[source.at] in '"{['

    def _hold(self, text: str) -> Iterator[OutputEvent]:
        self._held.append(text)
        return iter(())

    def _text(self, text: str) -> Iterator[OutputEvent]:
        return self._writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
