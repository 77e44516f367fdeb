"""AnswerWriter, which words content and calls; functions that read calls whose arguments are written as JSON."""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

from tandem.workers.text.output.events import CallArguments, CallBegin, Content, OutputEvent
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_stream import JsonScanner, json_string, nowhere, scanned
from tandem.workers.text.output.stepping import SteppedParser, Steps, TextSource, goes_on_with, one_of, spaces


class AnswerWriter:
    """Words one choice's content and calls. It numbers calls, and drops content that is only white space between calls
    or between a call and the begin or the end of the text."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.names = frozenset(tool.name for tool in tools)
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


def answer_parser(steps: Callable[[TextSource, AnswerWriter], Steps[None]], tools: Sequence[Tool]) -> SteppedParser:
    """Returns the parser of one choice. steps: reads its text and words what it finds."""
    writer = AnswerWriter(tools)
    return SteppedParser(lambda source: steps(source, writer))


class Read(Enum):
    """The end of an attempt to read a call."""

    CALL = auto()
    CONTENT = auto()  # it was well-formed, but no call of ours; all of it is content
    BROKEN = auto()


class CallKeys(NamedTuple):
    """The keys of a call's object. Other keys than these and `id`, `type` show that it is no call."""

    arguments: tuple[str, ...] = ("arguments",)
    may_lack_arguments: bool = True


def json_call(source: TextSource, writer: AnswerWriter, keys: CallKeys = CallKeys()) -> Steps[Read]:
    """Reads an object with a name and arguments.

    What was read since source.keep() becomes content if the object is no call. A call begins when its name and the
    begin of its arguments are known; if it breaks later, the text from there on is left unread.
    """
    return _JsonCall(source, writer, keys).read()


def json_calls(source: TextSource, writer: AnswerWriter) -> Steps[None]:
    """Reads a list of objects as json_call() does, kept text before it likewise. Where it breaks, the rest is left."""
    yield from spaces(source)
    separator = yield from one_of(source, ("[",))
    read = Read.CONTENT
    while separator in ("[", ","):
        yield from spaces(source)
        read = yield from json_call(source, writer)
        if read is Read.BROKEN:
            return
        source.keep()
        yield from spaces(source)
        separator = yield from one_of(source, (",", "]"))
    text = source.release()
    if separator is None or read is Read.CONTENT:
        yield from writer.content(text)


def named_call(source: TextSource, writer: AnswerWriter, name: str) -> Steps[Read]:
    """Reads the arguments, an object, of a call whose name was read. Kept text becomes content if it is no call."""
    whole = yield from goes_on_with(source, "{")
    if not whole and not source.exhausted:
        yield from writer.content(source.release())
        return Read.BROKEN
    text = source.release()
    if name in writer.names:
        yield from writer.begin(name)
        whole = yield from scanned(source, JsonScanner(), writer.arguments)
        return Read.CALL if whole else Read.BROKEN
    yield from writer.content(text)
    whole = yield from scanned(source, JsonScanner(), writer.content, as_written=True)
    return Read.CONTENT if whole else Read.BROKEN


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
            separator = yield from one_of(source, (",", "}"))
            if separator is None:
                return (yield from self._give_up())
            closed = "}" if separator == "}" else None
            if closed is None:
                yield from spaces(source)
        return (yield from self._close())

    def _entry(self) -> Steps[bool]:
        """Reads a key and its value. Returns whether they can be part of a call."""
        source = self._source
        key = yield from json_string(source)
        if key is None:
            return False
        yield from spaces(source)
        if (yield from one_of(source, (":",))) is None:
            return False
        yield from spaces(source)
        if key == "name" and not self._began:
            self._name = yield from json_string(source)
            return self._name is not None
        if key in self._keys.arguments and not self._began and self._held is None:
            return (yield from self._arguments())
        if not self._began and key not in ("id", "type", *self._keys.arguments):
            return False
        return (yield from scanned(source, JsonScanner(), nowhere))

    def _arguments(self) -> Steps[bool]:
        if not (yield from goes_on_with(self._source, "{")):
            return False
        if self._name is None:
            self._held = []
            return (yield from scanned(self._source, JsonScanner(), self._hold))
        yield from self._begin(self._name)
        return (yield from scanned(self._source, JsonScanner(), self._writer.arguments))

    def _hold(self, text: str) -> Iterator[OutputEvent]:
        assert self._held is not None
        self._held.append(text)
        return iter(())

    def _begin(self, name: str) -> Iterator[OutputEvent]:
        self._source.release()
        self._began = True
        yield from self._writer.begin(name)

    def _close(self) -> Steps[Read]:
        if self._began:
            return Read.CALL
        if self._name is None or (self._held is None and not self._keys.may_lack_arguments):
            return (yield from self._give_up())
        yield from self._begin(self._name)
        yield from self._writer.arguments("{}" if self._held is None else "".join(self._held))
        return Read.CALL

    def _give_up(self) -> Steps[Read]:
        """The object broke, or the text ended in it."""
        if self._began:
            return Read.BROKEN
        if self._source.exhausted and self._name in self._writer.names and self._name is not None:
            yield from self._begin(self._name)
            yield from self._writer.arguments("".join(self._held or ()))
            return Read.BROKEN
        yield from self._writer.content(self._source.release())
        return Read.BROKEN

    def _unknown(self) -> Steps[Read]:
        """The rest of an object that calls no function of ours is content, as written."""
        yield from self._writer.content(self._source.release())
        rest = JsonScanner(inside_object=True)
        whole = yield from scanned(self._source, rest, self._writer.content, as_written=True)
        return Read.CONTENT if whole else Read.BROKEN
