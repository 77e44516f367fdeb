"""OneCallChoice: a choice that the gateway ends behind its first tool call (parallel_tool_calls false, not forced)."""

from tandem.cluster.gateway.conversation.parser_wraps import OneCall
from tandem.workers.messages.request import FinishReason, TokenDelta
from tandem.workers.text.choice_text import ChoiceText, TextDelta


class OneCallChoice:
    """Implements Choice (part.py). parser: reads the text only to know when the call has ended."""

    def __init__(self, text: ChoiceText, parser: OneCall) -> None:
        self._text = text
        self._parser = parser

    @property
    def tokens(self) -> int:
        return self._text.tokens

    @property
    def finished(self) -> FinishReason | None:
        return self._text.finished

    def take(self, delta: TokenDelta) -> TextDelta | None:
        addition = self._text.take(delta)
        if addition is None or not addition.text:
            return addition
        self._parser.push(addition.text)
        if not self._parser.is_over or addition.finish_reason is not None:
            return addition
        self._text.finished = "stop"
        return addition._replace(finish_reason="stop", abort_at=self._text.tokens)
