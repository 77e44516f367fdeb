"""The text of one choice as it grows: detokenizes its tokens, finds stop strings, and counts the tokens to bill.

Used by the gateway (its hot path: `take` runs once per token delta) and by offline runs.
"""

from typing import NamedTuple

from tandem.workers.messages.request import FinishReason, SamplingParams, TokenDelta, TokenLogprobs
from tandem.workers.text.detokenizer import Detokenizer
from tandem.workers.text.stop_strings import StopMatcher


class TextDelta(NamedTuple):
    """The text that one token delta adds to a choice. `offsets[i]`: where token i's text begins in the choice's whole
    text.

    finish_reason is None while the choice goes on. stop_reason: the stop string or stop token id, None for EOS.
    abort_at: the number of tokens to keep, when a stop string was found and the engine must abort the choice.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    offsets: list[int] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    abort_at: int | None


class ChoiceText:
    """Detokenizes one choice and watches its stop strings. After the finish, `take` returns None."""

    __slots__ = (
        "_detokenizer",
        "_eos",
        "_hide_stop",
        "_matcher",
        "_params",
        "chars",
        "finished",
        "logprob_sum",
        "tokens",
    )

    def __init__(
        self, detokenizer: Detokenizer, params: SamplingParams, *, include_stop: bool, eos_token_ids: frozenset[int]
    ) -> None:
        """Starts an empty choice. include_stop: the text includes the stop string or token that ends it."""
        self._detokenizer = detokenizer
        self._params = params
        self._eos = eos_token_ids
        self._hide_stop = not include_stop
        self._matcher = (
            StopMatcher(params.stop, include_stop=include_stop, min_tokens=params.min_tokens) if params.stop else None
        )
        self.finished: FinishReason | None = None
        self.tokens = 0
        self.chars = 0
        self.logprob_sum = 0.0

    def take(self, delta: TokenDelta) -> TextDelta | None:
        """Adds a delta and returns its text; tokens that were already taken are skipped."""
        if self.finished is not None:
            return None
        token_ids, logprobs = delta.token_ids, delta.logprobs
        if delta.first_position != self.tokens:
            seen = max(0, self.tokens - delta.first_position)
            token_ids, logprobs = token_ids[seen:], logprobs[seen:] if logprobs is not None else None
        offsets: list[int] | None = None
        if logprobs is not None:
            offsets = []
        elif self._matcher is None and delta.finish_reason is None:
            return self._plain(token_ids)
        silent = self._silent_tokens(token_ids, delta)
        text, kept, stop = self._read(token_ids, silent, offsets)
        finish = delta.finish_reason
        if stop is None and finish is not None:
            rest, stop = self._flush()
            text += rest
        if stop is not None:
            token_ids = token_ids[:kept]
            logprobs = logprobs[:kept] if logprobs is not None else None
        self._count(len(token_ids), logprobs)
        if stop is not None:
            already = finish is not None
            self.finished = "stop"
            return TextDelta(text, token_ids, logprobs, offsets, "stop", stop, None if already else self.tokens)
        self.finished = finish
        return TextDelta(text, token_ids, logprobs, offsets, finish, self._stop_reason(delta), None)

    def _plain(self, token_ids: list[int]) -> TextDelta:
        """Adds tokens on the fast path of most deltas: no stop strings, no logprobs, no end."""
        push = self._detokenizer.push
        text = push(token_ids[0]) if len(token_ids) == 1 else "".join([push(i) for i in token_ids])
        self.tokens += len(token_ids)
        self.chars += len(text)
        return TextDelta(text, token_ids, None, None, None, None, None)

    def _silent_tokens(self, token_ids: list[int], delta: TokenDelta) -> int:
        """Returns the number of tokens at the end of the delta whose text is hidden: the one that stopped the
        choice."""
        if not (self._hide_stop and delta.finish_reason == "stop" and token_ids):
            return 0
        last = token_ids[-1]
        return int(last == delta.stop_reason or last in self._eos or last in self._params.stop_token_ids)

    def _read(self, token_ids: list[int], silent: int, offsets: list[int] | None) -> tuple[str, int, str | None]:
        """Returns (text to emit, tokens read, stop string found)."""
        parts: list[str] = []
        for index, token_id in enumerate(token_ids):
            if offsets is not None:
                offsets.append(self.chars)
            piece = "" if index >= len(token_ids) - silent else self._detokenizer.push(token_id)
            self.chars += len(piece)
            if self._matcher is None:
                parts.append(piece)
                continue
            text, stop = self._matcher.push(piece)
            parts.append(text)
            if stop is not None:
                return "".join(parts), index + 1, stop
        return "".join(parts), len(token_ids), None

    def _flush(self) -> tuple[str, str | None]:
        rest = self._detokenizer.flush()
        self.chars += len(rest)
        return (rest, None) if self._matcher is None else self._matcher.flush(rest)

    def _stop_reason(self, delta: TokenDelta) -> int | None:
        reason = delta.stop_reason
        return None if reason is None or reason in self._eos else reason

    def _count(self, tokens: int, logprobs: list[TokenLogprobs] | None) -> None:
        self.tokens += tokens
        if logprobs is not None:
            self.logprob_sum += sum(entry.logprob for entry in logprobs)
