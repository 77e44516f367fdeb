"""qwen3_coder: <tool_call><function=name><parameter=x>value</parameter></function></tool_call>.

Strings are written as they are, other values as JSON, so the tool's schema says how a value is read.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.workers.text.output import grammar_text
from tandem.workers.text.output.argument_stream import ArgumentScanner
from tandem.workers.text.output.call_ends import FAR, SPACE, CallEnds, CallScanner
from tandem.workers.text.output.events import OutputEvent, OutputParser
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_calls import AnswerWriter
from tandem.workers.text.output.json_schemas import asserting
from tandem.workers.text.output.json_stream import ValueText, nowhere, scanned
from tandem.workers.text.output.python_stream import PythonScanner
from tandem.workers.text.output.schema_types import (
    Argument,
    as_typed,
    listed_values,
    not_expressible,
    plain_arguments,
    plain_text,
    text_or_null,
    types_of,
)
from tandem.workers.text.output.stepping import (
    Emit,
    Marks,
    SteppedParser,
    Steps,
    TextSource,
    begins_with,
    one_of,
    run_of,
    spaces,
    text_until,
)

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_MARKS, _FUNCTION_END = Marks(BEGIN, FUNCTION), Marks(FUNCTION_END)
_PARAMETER = Marks(PARAMETER, "\n" + PARAMETER_END, PARAMETER_END)
_PARAMETER_LINE = Marks("\n" + PARAMETER, "\n" + PARAMETER_END, PARAMETER_END)
_PARAMETERS_END = Marks(PARAMETER, FUNCTION_END, END, BEGIN, FUNCTION)
_VALUE_END = Marks(
    *(before + mark for mark in (PARAMETER_END, PARAMETER, FUNCTION_END, END, BEGIN) for before in ("\n", ""))
)
_ENDS = CallEnds(ends=(PARAMETER_END, FUNCTION_END, END), begins={PARAMETER: (), BEGIN: (SPACE, *FUNCTION)})
_AHEAD = 60
"""Characters from the begin of a mark on that say whether it can end a value."""
_CALL_ENDS = re.compile(
    r"\s*(</function>\s*)?(</tool_call>\s*)?(\Z|<tool_call>\s*<function=|<function=)|\s*</function>\s*</tool_call>"
)
_NEXT = re.compile(r"\s*<parameter=([^<>\n]*)>")
_NAME = re.compile(r"[^<>\n]*")
_LONGEST_NAME = 256


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
        texts: dict[str, str] = {}

        def call(tool: Tool) -> str:
            head = grammar_text.quoted(f"\n{FUNCTION}{tool.name}>\n")
            values = " ".join(_parameter(tool, argument, texts) for argument in _arguments(tool))
            return f'{begin} {head} {values} "{FUNCTION_END}\\n" {end}'

        rules = grammar_text.calls(tools, call, parallel=parallel, between='"\\n"')
        return rules + "".join(f"{name}: {text}\n" for name, text in texts.items())


def _quoted_end() -> str:
    return grammar_text.quoted(f"\n{PARAMETER_END}\n")


def _arguments(tool: Tool) -> list[Argument]:
    arguments = plain_arguments(tool)
    if arguments is None:
        raise not_expressible(tool, "it must be an object of named properties, without conditions among them.")
    for one in arguments:
        if len(one.name) > _LONGEST_NAME:
            raise not_expressible(tool, f"a name of {len(one.name)} characters, {one.name[:40]!r}..., is too long.")
        if not one.name or _NAME.fullmatch(one.name) is None:
            raise not_expressible(tool, f"the name of property {one.name!r} has a character that ends a name.")
    return arguments


def _text(schema: Mapping[str, Any], texts: dict[str, str]) -> str:
    """Returns the name of what a text of this length may be, up to its end tag; `texts` then has the definitions."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    name = f"TEXT_{least}_{most}"
    texts[name] = f"/(?s:.{{{least},{most}}})/ & ~/(?s:.*)<(\\/parameter>|parameter=)(?s:.*)/"
    texts[f"{name}_VALUE"] = f"{name} {_quoted_end()}"
    return f"{name}_VALUE"


def _parameter(tool: Tool, argument: Argument, texts: dict[str, str]) -> str:
    """Returns the Lark text of one argument. texts: as of _text()."""
    value = f"{grammar_text.json_value(argument.schema)} {_quoted_end()}"
    if _is_text(argument.schema):
        values = listed_values(argument.schema)
        if values is None:
            value = _text(argument.schema, texts)
        else:
            if mark := next((mark for mark in (PARAMETER_END, PARAMETER) for one in values if mark in one), None):
                raise not_expressible(tool, f"a value of property {argument.name!r} has {mark!r}.")
            value = f"({' | '.join(grammar_text.quoted(one) for one in values)}) {_quoted_end()}"
    elif text_or_null(_without_definitions(argument.schema)):
        value = _text(argument.schema, texts)
    text = f"{grammar_text.quoted(f'{PARAMETER}{argument.name}>' + chr(10))} {value}"
    return text if argument.required else f"({text})?"


def _is_text(schema: Any) -> bool:
    """Returns whether values are written as they are. Strings that a pattern or another rule limits, if it is not of
    their length, are read in either way and forced as JSON."""
    return plain_text(_without_definitions(schema))


def _without_definitions(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    return {key: part for key, part in schema.items() if key not in ("$defs", "definitions")}


class _CoderAnswer:
    """Reads one answer."""

    def __init__(self, source: TextSource, tools: Sequence[Tool]) -> None:
        self._source, self._writer = source, AnswerWriter(tools)
        self._schemas = {tool.name: asserting(tool.parameters) for tool in tools}

    def read(self) -> Steps[None]:
        source, writer = self._source, self._writer
        while (yield from text_until(source, _MARKS, writer.content)) is not None:
            source.keep()
            name = yield from self._head()
            head = source.release()
            if name in writer.names and name is not None:
                yield from writer.begin(name)
                yield from self._parameters(self._schemas[name])
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
        name = yield from run_of(source, _NAME, limit=_LONGEST_NAME)
        return None if (yield from one_of(source, (">",))) is None else name.strip()

    def _parameters(self, schema: Mapping[str, Any]) -> Steps[None]:
        """Reads parameters and what ends the function, and says them as an object, which is whole also where end tags
        are forgotten. What stands between parameters is dropped."""
        source, writer, before = self._source, self._writer, "{"
        given: set[str] = set()
        while (yield from text_until(source, _PARAMETERS_END, nowhere)) == PARAMETER:
            yield from one_of(source, (PARAMETER,))
            name = yield from run_of(source, _NAME, limit=_LONGEST_NAME)
            if name not in _properties(schema):
                name = name.strip()
            if (yield from one_of(source, (">",))) is None:
                continue
            on_lines = (yield from one_of(source, ("\n",))) is not None
            yield from writer.arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
            before = ", "
            given.add(name)
            yield from self._value(name, schema, _Unread(schema, given, on_lines=on_lines))
        if not (source.cut and source.exhausted):
            yield from writer.arguments("{}" if before == "{" else "}")
        yield from one_of(source, (FUNCTION_END,))
        yield from spaces(source)
        yield from one_of(source, (END,))

    def _value(self, name: str, schema: Mapping[str, Any], other: "_Unread") -> Steps[None]:
        source, writer = self._source, self._writer
        one = _schema_of(name, schema)
        if one is None or _is_text(one):
            yield from writer.arguments('"')
            yield from other.text_of_value(source, self._text)
            yield from writer.arguments("" if source.cut and source.exhausted else '"')
        else:
            value = _Typed(types_of(one, schema), is_text=text_or_null(_without_definitions(one)))
            yield from value.read(source, other)
            if not (source.cut and source.exhausted):
                yield from writer.arguments(value.json())
        yield from one_of(source, ("\n" + PARAMETER_END, PARAMETER_END))

    def _text(self, text: str) -> Iterator[OutputEvent]:
        return self._writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


class _Unread:
    """Says where a value ends whose end tag may be forgotten. Another tag that stands in it is text where the value has
    its end tag after all, in front of the next parameter; else it ends the value where nothing but the call's end, or a
    parameter that was not given, can begin; where the end tag follows, such a parameter begins a line, if the value has
    lines of its own. given: the parameters so far; on_lines: the value has such lines."""

    def __init__(self, schema: Mapping[str, Any], given: set[str], *, on_lines: bool) -> None:
        properties = _properties(schema).keys()
        self._left, self._on_lines = properties - given, on_lines
        self._takes_any = not properties

    def text_of_value(self, source: TextSource, emit: Emit) -> Steps[None]:
        while (mark := (yield from text_until(source, _VALUE_END, emit))) is not None:
            if mark.endswith(PARAMETER_END):
                return
            text = len(mark)
            if (yield from self._can_end(mark, source)):
                text = yield from self._goes_on(mark, source)
            if not text:
                return
            yield from emit(source.take(source.at + text))

    def _goes_on(self, mark: str, source: TextSource) -> Steps[int]:
        """Returns how many characters from a mark on, which could end the value, belong to it after all."""
        if not mark.endswith(PARAMETER):
            return (yield from _before_end_tag(source, len(mark), _PARAMETER))
        if mark == PARAMETER and self._on_lines:
            return (yield from _before_end_tag(source, len(mark), _PARAMETER_LINE))
        return 0

    def _can_end(self, mark: str, source: TextSource) -> Steps[bool]:
        """Returns whether what stands behind the mark could follow a value without an end tag."""
        while len(source.text) - source.at < _AHEAD and not source.ended:
            yield None
        ahead = source.text[source.at : source.at + _AHEAD]
        if not mark.endswith(PARAMETER):
            return mark == "\n" + END or _CALL_ENDS.match(ahead) is not None
        found = _NEXT.match(ahead)
        name = found.group(1).strip() if found is not None else ""
        return name in self._left or (self._takes_any and mark.startswith("\n"))


def _before_end_tag(source: TextSource, behind: int, tags: Marks) -> Steps[int]:
    """Returns how many characters stand in front of the next end tag; 0 if a parameter, the end of the text or too much
    text comes first. behind: characters that are known to hold neither; tags: the end tags, and those of parameters."""
    while True:
        found = tags.first(source.text, source.at + behind)
        before = len(source.text) - len("\n" + PARAMETER_END) if found is None else found.start()
        if before - source.at > FAR:
            return 0
        if found is not None:
            return before - source.at if found.group().endswith(PARAMETER_END) else 0
        if source.ended:
            return 0
        behind = max(behind, len(source.text) - source.at - len("\n" + PARAMETER_END) + 1)
        yield None


class _Typed:
    """Reads a value that may be no text: a broken list or object is mended if no string is allowed. is_text: what
    is not null is a text, as it is written."""

    def __init__(self, types: frozenset[str] | None, *, is_text: bool) -> None:
        self._types, self._is_text = types, is_text
        self._space = ""
        self._held: list[str] = []
        self._literal, self._mender = ValueText(PythonScanner()), ArgumentScanner()
        self._mended = None if types is None or "string" in types else ValueText(self._mender)

    def read(self, source: TextSource, other: "_Unread") -> Steps[None]:
        """Marks inside the strings of a literal do not end the value."""
        self._space = yield from spaces(source)
        if not self._is_text and (yield from begins_with(source, ('"', "{", "["))) is not None:
            yield from scanned(source, CallScanner(_ENDS, strict=True), self._hold, as_written=True)
        yield from other.text_of_value(source, self._hold)

    def _hold(self, text: str) -> Iterator[OutputEvent]:
        self._held.append(text)
        self._literal.push(text)
        if self._mended is not None:
            self._mended.push(text)
        return iter(())

    def json(self) -> str:
        text, converted = "".join(self._held), self._literal.finish()
        if self._is_text and converted is not None and converted.strip() != "null":
            converted = None
        if converted is None and self._mended is not None and text[:1] in ("{", "["):
            converted = self._mended.mend(self._mender.close).strip()
        if self._mended is not None:
            text = text.strip()
        else:
            text = self._space + text if text else self._space.removesuffix("\n")
        return as_typed(text, converted, self._types)


def _schema_of(name: str, schema: Mapping[str, Any]) -> Any:
    """Returns the schema of a parameter; None for one that nothing is known of, which is text. One that is required,
    though it is no property, is forced as what other properties may be."""
    required = schema.get("required")
    if isinstance(required, list) and name in required:
        return _properties(schema).get(name, schema.get("additionalProperties", True))
    return _properties(schema).get(name)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}
