"""HarmonyParser: gpt-oss's messages. Channel analysis is thinking; a message to functions.NAME is a call; the rest is
content.

A message: <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>, of which
the prompt has the begin, up to the role.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from tandem.workers.text.output.call_ends import CallEnds
from tandem.workers.text.output.events import OutputEvent, OutputParser, Reasoning
from tandem.workers.text.output.formats import Tool
from tandem.workers.text.output.json_calls import AnswerWriter, named_call
from tandem.workers.text.output.json_stream import nowhere
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

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"

_CALL_ENDS = CallEnds(ends=ENDS, begins={START: tuple("assistant")})
_HEADER = Marks(START, CHANNEL, MESSAGE)
_IN_HEADER = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
_WORDS = re.compile(r"[^<\n]*")
_BODY_END, _CALL_END = Marks(*ENDS, START), Marks(*ENDS, START, CHANNEL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([\w.-]+)")


class HarmonyParser(SteppedParser):
    """Sorts an answer of gpt-oss, thinking too. inside: the prompt ends in an open message of analysis."""

    def __init__(self, tools: Sequence[Tool], *, inside: bool = False) -> None:
        self.tools = tools
        super().__init__(lambda source: messages(source, AnswerWriter(tools, _CALL_ENDS), inside=inside))


class Writer(Protocol):
    """The part of AnswerWriter that content needs."""

    def content(self, text: str) -> Iterator[OutputEvent]: ...

    def finish(self) -> Iterator[OutputEvent]: ...


class ContentTo:
    """A Writer whose content another parser sorts."""

    def __init__(self, then: OutputParser, source: TextSource) -> None:
        self._then, self._source = then, source

    def content(self, text: str) -> Iterator[OutputEvent]:
        return iter(self._then.push(text))

    def finish(self) -> Iterator[OutputEvent]:
        return iter(self._then.finish(cut=self._source.cut))


def messages(source: TextSource, writer: Writer, *, inside: bool) -> Steps[None]:
    """Reads message after message. Text outside of messages is content."""
    if inside:
        yield from _body(source, "analysis", writer)
    else:
        yield from _first(source, writer)
    while (yield from text_until(source, _HEADER, writer.content)) is not None:
        source.keep()
        yield from _message(source, writer)
    yield from writer.finish()


def _first(source: TextSource, writer: Writer) -> Steps[None]:
    """Reads the first message, whose role is in the prompt, if its header goes on with the recipient."""
    source.keep()
    if (yield from one_of(source, (" to=",))) is None:
        yield from writer.content(source.release())
        return
    yield from run_of(source, _WORDS, limit=256)
    yield from _message(source, writer)


def _header(source: TextSource) -> Steps[str | None]:
    """Reads marks and words up to the begin of a message's text, or its end, and returns that mark; None for other
    text."""
    while (found := (yield from one_of(source, _IN_HEADER))) in (START, CHANNEL, CONSTRAIN):
        yield from run_of(source, _WORDS, limit=256)
    return found


def _message(source: TextSource, writer: Writer) -> Steps[None]:
    """Reads a message, from the header on or from the rest of it. Kept text is the begin of the header."""
    end = yield from _header(source)
    header = source.release()
    if end != MESSAGE:
        if end is None and not source.exhausted:  # a header that is cut off says nothing
            yield from writer.content(header)
        return
    channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
    name = channel.group(1) if channel is not None else "final"
    if name == "analysis" or function is None:
        yield from _body(source, name, writer)
    elif isinstance(writer, AnswerWriter) and function.group(1) in writer.names:
        yield from _call(source, function.group(1), writer)
    else:
        yield from writer.content(header)
        yield from text_until(source, _BODY_END, writer.content)
        yield from writer.content((yield from one_of(source, ENDS)) or "")


def _body(source: TextSource, channel: str, writer: Writer) -> Steps[None]:
    yield from text_until(source, _BODY_END, _reasoning if channel == "analysis" else writer.content)
    yield from one_of(source, ENDS)


def _call(source: TextSource, name: str, writer: AnswerWriter) -> Steps[None]:
    source.keep()
    yield from spaces(source)
    read = yield from named_call(source, writer, name, ENDS)
    yield from text_until(source, _CALL_END, nowhere if read.is_call else writer.content)
    yield from one_of(source, ENDS)


def _reasoning(text: str) -> Iterator[OutputEvent]:
    yield Reasoning(text)
