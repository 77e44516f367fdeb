"""AnswerWriter, which words content and calls; functions that read calls whose arguments are written as JSON."""

import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

from tandem.workers.text.output.argument_stream import ArgumentScanner, argument_value, short_string, written_object
from tandem.workers.text.output.call_ends import NO_ENDS, CallEnds
from tandem.workers.text.output.events import CallArguments, CallBegin, Content, OutputEvent
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_stream import nowhere, scanned
from tandem.workers.text.output.stepping import (
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


class AnswerWriter:
    """Words one choice's content and calls. It numbers calls, and drops content that is only white space between calls
    or between a call and the begin or the end of the text. ends: what ends a call."""

    def __init__(self, tools: Sequence[Tool], ends: CallEnds = NO_ENDS) -> None:
        self.ends = ends
        self.names = frozenset(tool.name for tool in tools)
        self.need_nothing = frozenset(tool.name for tool in tools if not tool.parameters.get("required"))
        self._call = -1
        self._space: list[str] | None = []

    def content(self, text: str) -> Iterator[OutputEvent]:
        if not text:
            return
        if self._space is not None:
            self._space.append(text)
            if text.isspace():
                return
            text, self._space = "".join(self._space), None
        yield Content(text)

    def begin(self, name: str) -> Iterator[OutputEvent]:
        self._space = []
        self._call += 1
        yield CallBegin(self._call, name)

    def arguments(self, text: str) -> Iterator[OutputEvent]:
        if text:
            yield CallArguments(self._call, text)

    def finish(self) -> Iterator[OutputEvent]:
        """Ends the choice. A text of nothing but white space is content after all."""
        if self._call < 0 and self._space:
            yield Content("".join(self._space))


def answer_parser(
    steps: Callable[[TextSource, AnswerWriter], Steps[None]], tools: Sequence[Tool], ends: CallEnds
) -> SteppedParser:
    """Returns the parser of one choice. steps: reads its text and words what it finds; ends: what ends a call."""
    writer = AnswerWriter(tools, ends)
    return SteppedParser(lambda source: steps(source, writer))


_NOTHING = ("null", "None", "[]")
"""Arguments of a call that has none, beside {} and an empty string."""
_STRAY = re.compile(r"[\s})]*")


class Read(Enum):
    """The end of an attempt to read a call."""

    CALL = auto()
    CLOSED = auto()  # it is a call that broke: its arguments were made whole, what is left of it is unread
    CONTENT = auto()  # it was well-formed, but no call of ours; all of it is content
    BROKEN = auto()  # it was no call; what was read is content

    @property
    def is_call(self) -> bool:
        return self in (Read.CALL, Read.CLOSED)


class CallKeys(NamedTuple):
    """The keys of a call's object. Other keys than these and `id`, `type` show that it is no call. may_lack_arguments:
    also of a function that requires some."""

    arguments: tuple[str, ...] = ("arguments",)
    may_lack_arguments: bool = True


def json_call(source: TextSource, writer: AnswerWriter, keys: CallKeys = CallKeys()) -> Steps[Read]:
    """Reads an object with a name and arguments.

    What was read since source.keep() becomes content if the object is no call. A call begins when its name and the
    begin of its arguments are known; from there on it is one, and its arguments are JSON, whatever comes.
    """
    return _JsonCall(source, writer, keys).read()


def json_calls(source: TextSource, writer: AnswerWriter) -> Steps[Read]:
    """Reads a list of objects as json_call() does, kept text before it likewise. Where it breaks, the rest is left.
    Returns CLOSED if what is left belongs to a call."""
    yield from spaces(source)
    separator = yield from one_of(source, ("[",))
    read = Read.CONTENT
    while separator is not None and separator != "]":
        yield from spaces(source)
        read = yield from json_call(source, writer)
        if read is Read.BROKEN:
            return read
        source.keep()
        yield from run_of(source, _STRAY) if read.is_call else spaces(source)
        separator = yield from one_of(source, (",", "]"))
        if separator is None and read.is_call and (yield from goes_on_with(source, "{")):
            separator = ","  # or the end of the call before, was forgotten
    text = source.release()
    if read is Read.CLOSED:
        return Read.CALL if separator == "]" else Read.CLOSED
    if separator is None or read is Read.CONTENT:
        yield from writer.content(text if read is Read.CONTENT else re.sub("[})]", "", text))
    return read


def named_call(source: TextSource, writer: AnswerWriter, name: str, ends: Sequence[str] = ()) -> Steps[Read]:
    """Reads the arguments, an object, of a call whose name was read. Kept text becomes content if it is no call. ends:
    marks behind which there are no arguments; they are left unread."""
    if name not in writer.names:
        return (yield from _unknown_call(source, writer))
    if (yield from goes_on_with(source, "{")):
        source.release()
        yield from writer.begin(name)
        whole = yield from argument_value(source, writer.arguments, ArgumentScanner(writer.ends))
        return Read.CALL if whole else Read.CLOSED
    written = yield from _written_arguments(source, writer.ends, ends)
    if written is None:
        yield from writer.content(source.release())
        return Read.BROKEN
    source.release()
    yield from writer.begin(name)
    yield from writer.arguments(written)
    return Read.CALL


def after_call(source: TextSource, read: Read, end: str, marks: Marks) -> Steps[None]:
    """Reads what belongs to a call up to its end mark, which may be forgotten. marks: the end mark, and those that can
    only follow it; what stands before them in a broken call is dropped."""
    if read is Read.CLOSED:
        yield from text_until(source, marks, nowhere)
    elif read is Read.CALL:
        yield from run_of(source, _STRAY)
    if read.is_call:
        yield from one_of(source, (end,))


def next_begins(source: TextSource, writer: AnswerWriter, begins: Sequence[str] = ("{",)) -> Steps[bool]:
    """Returns whether what may be the next call stands behind a call, as marks between them may be forgotten. What
    stands before it is kept; if there is none, it is content."""
    source.keep()
    yield from spaces(source)
    if (yield from one_of(source, (";", ","))) is not None:
        yield from spaces(source)
    if (yield from begins_with(source, begins)) is not None:
        return True
    yield from writer.content(source.release())
    return False


def behind_call(source: TextSource, writer: AnswerWriter) -> Steps[None]:
    """Reads what may stand behind a whole call: closing brackets too many are dropped."""
    source.keep()
    yield from run_of(source, _STRAY)
    yield from writer.content(re.sub("[})]", "", source.release()))


def _unknown_call(source: TextSource, writer: AnswerWriter) -> Steps[Read]:
    whole = yield from goes_on_with(source, "{")
    yield from writer.content(source.release())
    if whole:
        whole = yield from scanned(source, ArgumentScanner(writer.ends), writer.content, as_written=True)
    return Read.CONTENT if whole else Read.BROKEN


def _written_arguments(source: TextSource, ends: CallEnds, marks: Sequence[str] = ()) -> Steps[str | None]:
    """Reads arguments that are no object and returns the JSON that they mean: of nothing, or of an object in a string.
    None for others. A text that is cut before them has none yet, which is "". marks: those behind which there are
    none."""
    if (yield from one_of(source, _NOTHING)) is not None or (marks and (yield from begins_with(source, marks))):
        return "{}"
    if (yield from begins_with(source, ("'", '"'))):
        is_read, written = yield from written_object(source, ends)
        if is_read:
            return written
    return ("" if source.cut else "{}") if source.exhausted else None


class _JsonCall:
    def __init__(self, source: TextSource, writer: AnswerWriter, keys: CallKeys) -> None:
        self._source, self._writer, self._keys = source, writer, keys
        self._name: str | None = None
        self._held: list[str] | None = None
        self._began = False

    def read(self) -> Steps[Read]:
        source = self._source
        if (yield from one_of(source, ("{",))) is None:
            return (yield from self._give_up())
        yield from spaces(source)
        closed = yield from one_of(source, ("}",))
        while closed is None:
            if not (yield from self._entry()):
                return (yield from self._give_up())
            if self._name is not None and self._name not in self._writer.names:
                return (yield from self._unknown())
            yield from spaces(source)
            if (yield from one_of(source, (",",))) is not None:
                yield from spaces(source)
                closed = yield from one_of(source, ("}",))
            elif (closed := (yield from one_of(source, ("}",)))) is None:
                return (yield from self._unclosed())
        return (yield from self._close())

    def _entry(self) -> Steps[bool]:
        """Reads a key and its value. Returns whether they can be part of a call."""
        source = self._source
        key = yield from short_string(source, self._writer.ends)
        if key is None:
            return False
        yield from spaces(source)
        if (yield from one_of(source, (":",))) is None:
            return False
        yield from spaces(source)
        if key == "name" and not self._began:
            self._name = yield from short_string(source, self._writer.ends)
            return self._name is not None
        if key in self._keys.arguments and not self._began and self._held is None:
            return (yield from self._arguments())
        if not self._began and key not in ("id", "type", *self._keys.arguments):
            return False
        return (yield from scanned(source, ArgumentScanner(self._writer.ends), nowhere))

    def _arguments(self) -> Steps[bool]:
        if not (yield from goes_on_with(self._source, "{")):
            written = yield from _written_arguments(self._source, self._writer.ends)
            self._held = None if written is None else [written]
            return written is not None
        if self._name is None:
            self._held = []
            return (yield from argument_value(self._source, self._hold, ArgumentScanner(self._writer.ends)))
        yield from self._begin(self._name)
        return (yield from argument_value(self._source, self._writer.arguments, ArgumentScanner(self._writer.ends)))

    def _hold(self, text: str) -> Iterator[OutputEvent]:
        assert self._held is not None
        self._held.append(text)
        return iter(())

    def _begin(self, name: str) -> Iterator[OutputEvent]:
        self._source.release()
        self._began = True
        yield from self._writer.begin(name)

    def _unclosed(self) -> Steps[Read]:
        """Neither goes the object on nor does it end here: its end is forgotten, if a mark or an object follows."""
        if self._name is not None and (yield from goes_on_with(self._source, "{")):
            return (yield from self._close())
        if (yield from goes_on_with(self._source, "<")) and self._name is not None:
            read = yield from self._close()
            return Read.CLOSED if read is Read.CALL else read
        return (yield from self._give_up())

    def _close(self) -> Steps[Read]:
        if self._began:
            return Read.CALL
        may_lack = self._keys.may_lack_arguments or self._name in self._writer.need_nothing
        if self._name is None or (self._held is None and not may_lack):
            return (yield from self._give_up())
        yield from self._begin(self._name)
        yield from self._writer.arguments("{}" if self._held is None else "".join(self._held))
        return Read.CALL

    def _give_up(self) -> Steps[Read]:
        """The object broke, or the text ended in it."""
        if self._began:
            return Read.CLOSED
        if self._source.exhausted and self._name in self._writer.names and self._name is not None:
            yield from self._begin(self._name)
            yield from self._writer.arguments("".join(self._held or () if self._source.cut else self._held or ("{}",)))
            return Read.CLOSED
        yield from self._writer.content(self._source.release())
        return Read.BROKEN

    def _unknown(self) -> Steps[Read]:
        """The rest of an object that calls no function of ours is content, as written."""
        yield from self._writer.content(self._source.release())
        rest = ArgumentScanner(self._writer.ends, inside_object=True)
        whole = yield from scanned(self._source, rest, self._writer.content, as_written=True)
        return Read.CONTENT if whole else Read.BROKEN
