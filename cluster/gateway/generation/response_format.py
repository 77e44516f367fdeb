"""ResponseFormat: how an API words an answer. Implemented beside the routes of each API."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.workers.messages.request import TokenLogprobs, Usage
from tandem.workers.text.choice_text import TextDelta


@dataclass(frozen=True)
class ChoiceAnswer:
    """A whole choice, for answers that are not streamed. prompt_logprobs: of the prompt's tokens but the first."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    offsets: list[int] | None
    finish_reason: str
    stop_reason: int | str | None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class ResponseFormat(Protocol):
    """The words of one answer."""

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class StreamFormat(ResponseFormat, Protocol):
    """The words of one answer, streamed or not."""

    def opening(self, index: int) -> bytes:
        """Events that open a choice; b"" if there are none."""
        ...

    def chunk(self, index: int, addition: TextDelta) -> bytes:
        """Events for one addition; b"" when there is nothing to show."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk with the bill and no choices."""
        ...

    def closing(self, error: Exception | None) -> bytes:
        """The last events of a stream. error: what has ended it, None after a whole answer."""
        ...
