"""LoggedBlocks: the blocks of an answer, and the log probabilities of the tokens of its text.

Blocks are made of text, tokens come with the places where their texts begin. Each token's text is pushed by itself, and
what grows then is looked up in what the parser has not placed so far. Entries of thinking, calls and marks are left
out.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from tandem.cluster.gateway.conversation.blocks import BlockGrew, Blocks, BlockStep
from tandem.cluster.gateway.openai.token_formatter import TokenFormatter
from tandem.workers.messages.request import TokenLogprobs

Entries = list[dict[str, Any]]


class LoggedBlocks:
    """Sorts the text of one choice with its log probabilities. of_text: entries by the index of their block."""

    def __init__(self, blocks: Blocks, formatter: TokenFormatter) -> None:
        self._blocks = blocks
        self._formatter = formatter
        # tokens whose text has not come yet, those whose text the parser has not placed yet, and that text
        self._waiting: deque[tuple[int, TokenLogprobs]] = deque()
        self._held: list[tuple[int, dict[str, Any]]] = []
        self._raw = ""
        self._chars = 0
        self.of_text: dict[int, Entries] = {}

    def push(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
    ) -> list[tuple[BlockStep, Entries]]:
        """Takes more text and its tokens. offsets: where each token's text begins in the whole text, which may come
        later than the token."""
        self._blocks.push("", token_ids)
        self._waiting += zip(offsets, logprobs, strict=True)
        begin, end = self._chars, self._chars + len(text)
        cuts = sorted({begin, *(at for at, _ in self._waiting if begin < at < end)})
        steps: list[tuple[BlockStep, Entries]] = []
        for first, last in zip(cuts, [*cuts[1:], end], strict=True):
            self._take_until(last)
            piece = text[first - begin : last - begin]
            self._raw, self._chars = self._raw + piece, last
            steps += [(step, self._own(step)) for step in self._blocks.push(piece, ())]
        return steps

    def finish(self, *, cut: bool) -> list[tuple[BlockStep, Entries]]:
        """Ends the answer; cut: not by its own end. Tokens without text there, as EOS, belong to the text before."""
        self._take_until(None)
        steps = [(step, self._own(step)) for step in self._blocks.finish(cut=cut)]
        if self._blocks.all and self._blocks.all[-1].kind == "text":
            entries = self.of_text.setdefault(self._blocks.all[-1].index, [])
            entries += [entry for _, entry in self._held]
        return steps

    def _take_until(self, end: int | None) -> None:
        """The entries whose text begins before `end` are those of what is pushed next."""
        while self._waiting and (end is None or self._waiting[0][0] < end):
            at, entry = self._waiting.popleft()
            self._held.append((at, self._formatter.chat(entry)))

    def _own(self, step: BlockStep) -> Entries:
        """The entries that belong to a step. What is held before its text are those of marks."""
        if not isinstance(step, BlockGrew):
            return []
        raw_at, size = self._chars - len(self._raw), len(step.text)
        at = len(self._raw) - size if self._raw.endswith(step.text) else self._raw.rfind(step.text)
        begin, end = (raw_at + at, raw_at + at + size) if at >= 0 else (raw_at, self._chars)
        ends = [*(start for start, _ in self._held[1:]), self._chars]
        own = (
            [
                entry
                for (start, entry), stop in zip(self._held, ends, strict=True)
                if start < end and (start >= begin or stop > begin)
            ]
            if self._held
            else []
        )
        self._held = [one for one in self._held if one[0] >= end]
        self._raw = self._raw[end - raw_at :]
        if step.block.kind != "text":
            return []
        self.of_text.setdefault(step.block.index, []).extend(own)
        return own
