"""Pythonic: [name(x=1), other(y="z")], as Llama 3.2 and Llama 4 write, perhaps between <|python_start|> and
<|python_end|>."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from tandem.workers.text.output import grammar_text
from tandem.workers.text.output.argument_stream import argument_value
from tandem.workers.text.output.call_ends import SPACE, CallEnds
from tandem.workers.text.output.events import OutputEvent, OutputParser
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_calls import AnswerWriter, Read
from tandem.workers.text.output.json_stream import nowhere, scanned
from tandem.workers.text.output.schema_types import Argument, plain_arguments
from tandem.workers.text.output.stepping import (
    Emit,
    Marks,
    SteppedParser,
    Steps,
    TextSource,
    begins_with,
    goes_on_with,
    one_of,
    run_of,
    spaces,
    text_until,
)
from tandem.workers.text.output.tools.python_arguments import PythonArguments

START, END = "<|python_start|>", "<|python_end|>"
_MARKS, _BEHIND_CALLS, _CALL_END = Marks(START), Marks(START, END), Marks(")", START, END)
_ENDS = CallEnds(
    ends=(END,), begins={START: (SPACE, r"\[")}, separators={",": (SPACE, r"[\w.-]{1,256}", r"\(")}, closers=")"
)
_NOTHING_READ = PythonArguments(_ENDS)
_NAME, _COMMAS = re.compile(r"[\w.-]*"), re.compile(",*")
_WRITES_CALLS = re.compile(r"""\[func_name|name\s*[+~]\s*['"]\(""")


class Pythonic:
    """Calls stand at the begin of an answer or behind the mark. Arguments that are no Python names are written, and
    read, as **{"a-b": 1}."""

    shows_special_tokens = False  # the marks are some, but calls are found without

    def marks_in(self, template: str) -> bool:
        return _WRITES_CALLS.search(template) is not None or (START in template and '"parameters": ' not in template)

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return SteppedParser(lambda source: _PythonicAnswer(source, AnswerWriter(tools, _ENDS)).read())

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int] = grammar_text.NO_TOKENS
    ) -> str:
        rules: list[str] = []

        def call(tool: Tool) -> str:
            return f'{grammar_text.quoted(tool.name + "(")} {_arguments(tool, rules)} ")"'

        text = grammar_text.calls(tools, call, parallel=parallel, before='"["', between='", "', after='"]"')
        return text + "".join(rules)


def _arguments(tool: Tool, rules: list[str]) -> str:
    """Returns the Lark text between the parentheses. rules: what it names is added there."""
    arguments = plain_arguments(tool)
    if arguments is None or not all(re.fullmatch(r"\w+", one.name) for one in arguments):
        return f'"**" {grammar_text.arguments(tool)}'
    first = [_argument(one) for one in arguments if one.required]
    rest = [_argument(one) for one in arguments if not one.required]
    if first:
        return ' ", " '.join(first) + "".join(f' (", " {one})?' for one in rest)
    # any of them may be the first; rules of their own, so that none is written twice
    begin, end = len(rules), len(rules) + len(rest)
    for i, one in enumerate(rest, begin):
        more = f'(", " arg_{i + 1})? behind_{i + 1}' if i + 1 < end else '""'
        rules.append(f"arg_{i}: {one}\nbehind_{i}: {more}\n")
    return f"({' | '.join(f'arg_{i} behind_{i}' for i in range(begin, end))})?" if rest else ""


def _argument(argument: Argument) -> str:
    return f"{grammar_text.quoted(argument.name + '=')} {grammar_text.json_value(argument.schema)}"


class _PythonicAnswer:
    """Reads one answer."""

    def __init__(self, source: TextSource, writer: AnswerWriter) -> None:
        self._source, self._writer = source, writer
        self._name = ""
        self._ours = self._began = False
        self._scanner = _NOTHING_READ

    def read(self) -> Steps[None]:
        source, writer = self._source, self._writer
        while (yield from self._calls()) or (yield from text_until(source, _MARKS, writer.content)) is not None:
            pass
        yield from writer.finish()

    def _calls(self) -> Steps[bool]:
        """Reads a list of calls. Returns whether there was one, behind which the next may stand."""
        source, writer = self._source, self._writer
        source.keep()
        yield from spaces(source)
        yield from one_of(source, (START,))
        yield from spaces(source)
        separator = yield from one_of(source, ("[",))
        read = Read.CONTENT
        while separator in ("[", ","):
            yield from spaces(source) if separator == "[" else _gap(source)
            read = yield from self._call()
            if not read.is_call:
                yield from writer.content(source.release())
            if read is Read.BROKEN:
                return False
            if read is Read.CLOSED:
                yield from self._rest_of_call()
            source.keep()
            yield from _gap(source)
            separator = yield from one_of(source, (",", "]"))
            if separator is None and read is Read.CALL and (yield from _is_name(source)):
                separator = ","  # it was forgotten
        text = source.release()
        if read is Read.CLOSED and separator is None:
            yield from text_until(source, _BEHIND_CALLS, nowhere)
        elif separator is None or read is Read.CONTENT:
            yield from writer.content(text)
        if read.is_call:
            yield from spaces(source) if separator is not None else ()
            yield from one_of(source, (END,))
        return read.is_call and separator is not None

    def _call(self) -> Steps[Read]:
        source = self._source
        self._name = yield from run_of(source, _NAME, limit=256)
        self._ours, self._began = self._name in self._writer.names, False
        if not self._name or (yield from one_of(source, ("(",))) is None:
            return Read.BROKEN
        yield from _gap(source)
        if (yield from one_of(source, (")",))) is not None:
            if (yield from begins_with(source, ("](",))):  # the words of a link of Markdown
                return Read.BROKEN
            yield from self._say("{}")
            return self._read()
        if (yield from self._arguments()):
            return self._read()
        if source.exhausted and not self._began:
            yield from self._say("" if source.cut else "{}")
        return Read.CLOSED if self._began else Read.BROKEN

    def _read(self) -> Read:
        return Read.CALL if self._ours else Read.CONTENT

    def _rest_of_call(self) -> Steps[None]:
        """Drops what is left of a call that broke, unless the call's end is all that was forgotten."""
        if (yield from begins_with(self._source, ("]", ","))) != "]":
            yield from text_until(self._source, _CALL_END, nowhere)
            yield from one_of(self._source, (")",))

    def _arguments(self) -> Steps[bool]:
        """Reads arguments, and says them as an object, which is whole also where they break. One without a name is
        dropped, but the first one, which says that this may be no call."""
        source, before = self._source, "{"
        while True:
            self._scanner = _NOTHING_READ
            name = yield from run_of(source, _NAME, limit=256)
            yield from _gap(source)
            if name and (yield from one_of(source, ("=",))) is not None:
                yield from _gap(source)
                yield from self._say(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
                yield from self._argument(self._say)
                before = ", "
            elif not name and (yield from one_of(source, ("**",))) and (yield from goes_on_with(source, "{")):
                before = yield from self._entries(before)
            elif source.exhausted or not self._began:
                return (yield from self._broken())
            yield from _gap(source)
            if (yield from begins_with(source, (",", ")"))) is None:
                yield from scanned(source, self._scanner.rest(name), nowhere)
                yield from _gap(source)
            if (yield from run_of(source, _COMMAS)):
                yield from _gap(source)
            elif not source.exhausted and not (yield from goes_on_with(source, ")")):
                return (yield from self._broken())
            if (yield from one_of(source, (")",))) is not None:
                yield from self._say("{}" if before == "{" else "}")
                return True

    def _argument(self, emit: Emit) -> Steps[None]:
        self._scanner = PythonArguments(_ENDS)
        yield from argument_value(self._source, emit, self._scanner)

    def _entries(self, before: str) -> Steps[str]:
        """Reads a mapping and says its entries. Returns what stands before the next argument."""
        held, said = "", False

        def emit(text: str) -> Iterator[OutputEvent]:
            nonlocal held, said
            held += text
            entries = held.removesuffix("}")
            rest = held[len(entries) :]
            if not said:
                entries = entries.lstrip()[1:].lstrip()
            if entries:
                yield from self._say(entries if said else before + entries)
                held, said = rest, True

        yield from self._argument(emit)
        return ", " if said else before

    def _broken(self) -> Steps[bool]:
        if self._began and not (self._source.cut and self._source.exhausted):
            yield from self._say("}")
        return False

    def _say(self, text: str) -> Iterator[OutputEvent]:
        """Emits more of the arguments of a call of ours, which begins with the first of them."""
        if not self._ours:
            return
        if not self._began:
            self._began = True
            self._source.release()
            yield from self._writer.begin(self._name)
        yield from self._writer.arguments(text)


def _is_name(source: TextSource) -> Steps[bool]:
    """Returns whether a word comes next, which stays unread."""
    while source.at == len(source.text) and not source.ended:
        yield None
    return source.text[source.at : source.at + 1].isalpha()


def _gap(source: TextSource) -> Steps[None]:
    """Reads white space and comments."""
    yield from spaces(source)
    while (yield from goes_on_with(source, "#")):
        while (end := _ENDS.behind_comment(source.text, source.at, is_all=source.ended)) is None:
            yield None
        if end == source.at:
            return
        source.take(end)
        yield from spaces(source)
