"""Blocks: an answer as other APIs than chat completions show it, one run of thinking, text or a call after the other.

output events of a parser --push--> BlockBegan, BlockGrew, BlockEnded --> events of a stream, or all blocks of an answer
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tandem.cluster.gateway.conversation.chat_output import ChatOutput
from tandem.cluster.gateway.conversation.parser_wraps import AsCall
from tandem.workers.messages.thinking import ThinkingSpan
from tandem.workers.text.output.events import CallArguments, CallBegin, Content, OutputEvent, OutputParser, Reasoning

BlockKind = Literal["thinking", "text", "call"]


@dataclass(eq=False)
class AnswerBlock:
    """One run of an answer. index: its number in the answer, from 0. name: of the function that is called. pieces: its
    text so far, of a call the JSON text of its arguments."""

    kind: BlockKind
    index: int
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockBegan(NamedTuple):
    """A block begins; no other one is open."""

    block: AnswerBlock


class BlockGrew(NamedTuple):
    """The open block has more text."""

    block: AnswerBlock
    text: str


class BlockEnded(NamedTuple):
    """The open block has ended."""

    block: AnswerBlock


BlockStep = BlockBegan | BlockGrew | BlockEnded


class Blocks:
    """Sorts the text of one choice. White space alone between parts is dropped. thinking: counts its tokens,
    if the model's thinking is known."""

    def __init__(self, parser: OutputParser, thinking: ThinkingSpan | None = None) -> None:
        self._parser = parser
        self._thinking = thinking
        self._open: AnswerBlock | None = None
        self._space = ""
        self.all: list[AnswerBlock] = []

    def push(self, text: str, token_ids: Sequence[int]) -> list[BlockStep]:
        """Takes more text, and its tokens."""
        if self._thinking is not None:
            self._thinking.add(token_ids)
        return self._take(self._parser.push(text)) if text else []

    def finish(self, *, cut: bool) -> list[BlockStep]:
        """Ends the answer and its last block. cut: it did not end by itself. Called once."""
        steps = self._take(self._parser.finish(cut=cut))
        if self._space and not self.all:
            self._grow("text", self._space, steps)
        self._end(steps)
        return steps

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._thinking is None else self._thinking.tokens

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def _take(self, events: list[OutputEvent]) -> list[BlockStep]:
        steps: list[BlockStep] = []
        for event in events:
            match event:
                case Content(text):
                    self._content(text, steps)
                case Reasoning(text):
                    self._grow("thinking", text, steps)
                case CallBegin(_, name):
                    self._begin("call", steps, name)
                case CallArguments(_, text):
                    assert self._open is not None and self._open.kind == "call", "arguments follow their call's begin"
                    self._grow("call", text, steps)
        return steps

    def _content(self, text: str, steps: list[BlockStep]) -> None:
        if self._open is None or self._open.kind != "text":
            text = self._space + text
            self._space = text if text.isspace() else ""
            if self._space:
                return
        self._grow("text", text, steps)

    def _grow(self, kind: BlockKind, text: str, steps: list[BlockStep]) -> None:
        if not text:
            return
        block = self._open
        if block is None or block.kind != kind:
            block = self._begin(kind, steps)
        block.pieces.append(text)
        steps.append(BlockGrew(block, text))

    def _begin(self, kind: BlockKind, steps: list[BlockStep], name: str = "") -> AnswerBlock:
        self._end(steps)
        self._space = ""
        self._open = block = AnswerBlock(kind, len(self.all), name)
        self.all.append(block)
        steps.append(BlockBegan(block))
        return block

    def _end(self, steps: list[BlockStep]) -> None:
        if self._open is not None:
            steps.append(BlockEnded(self._open))
            self._open = None


def blocks_of(output: ChatOutput, called: str | None = None) -> Blocks:
    """Makes the blocks of one choice of a conversation. called: the tool whose text all content is."""
    marks = output.thinking
    span = None if marks is None else ThinkingSpan(marks.start, marks.end, inside=marks.inside)
    parser = output.make_parser()
    if called is not None:
        parser = AsCall(parser, called, behind_thinking=marks is not None and marks.inside)
    return Blocks(parser, span)
