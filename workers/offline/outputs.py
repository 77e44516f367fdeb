"""Results of LLM.generate() and chat(), and the sink that fills them while their requests run."""

from collections.abc import Callable

import msgspec

from tandem.workers.messages.request import Abort, Ended, TokenDelta, TokenLogprobs
from tandem.workers.text.choice_text import ChoiceText, TextDelta

TokenText = Callable[[int], str]


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """Natural log probability of one token at one place, with vLLM's names.

    rank: 1 + the number of tokens that are more probable there; None of tokens in SamplingParams.logprob_token_ids.
    decoded_token: its text alone, U+FFFD for part of a character; None with detokenize=False.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]
"""Tokens of one place by their ids: the chosen one, or the prompt's, first; then the best ones."""


class Completion(msgspec.Struct, kw_only=True):
    """One choice of a prompt.

    index: its number, from 0. text, token_ids: the output; text ends before a stop string. finish_reason: "stop",
    "length", "abort" or "error". logprobs: for each token those of its place by token id, its own first, then the best;
    None if not asked for. error: the reason of "error". stop_reason: the stop string or stop token id that ended it;
    None for EOS and the rest.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    logprobs: list[Logprobs] | None = None
    error: str | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log probabilities, by vLLM's name; None if they were not asked for."""
        return None if self.logprobs is None else sum(next(iter(one.values())).logprob for one in self.logprobs)


class RequestOutput(msgspec.Struct, kw_only=True):
    """Result of one prompt: its `n` completions in `outputs`, in order.

    request_id: a number, as text; of AsyncLLM the caller's. prompt: the text, None if token ids were given.
    cached_tokens: prompt tokens whose KV was found in the prefix cache. prompt_logprobs: if asked for, as a
    Completion's, for each token of the prompt; None for the first. finished: no more comes.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int = 0
    prompt_logprobs: list[Logprobs | None] | None = None
    finished: bool = False

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def num_cached_tokens(self) -> int:
        """cached_tokens, by vLLM's name."""
        return self.cached_tokens


def logprobs_of(entry: TokenLogprobs, token_text: TokenText | None, *, is_ranked: bool = True) -> Logprobs:
    """Returns the log probabilities of one place. token_text: of a token by itself. is_ranked: the entry has the best
    tokens, in order, and none that a request names."""
    shown = {entry.token_id: (entry.logprob, entry.rank or None)}
    for place, (token_id, logprob) in enumerate(entry.top, 1):
        shown.setdefault(token_id, (logprob, place if is_ranked else None))
    return {token: Logprob(*one, None if token_text is None else token_text(token)) for token, one in shown.items()}


def empty(one: Completion) -> Completion:
    """Returns the same choice without output, with a list of its own where log probabilities were asked for."""
    return Completion(index=one.index, logprobs=None if one.logprobs is None else [])


def grow(one: Completion, added: TextDelta, logprobs: list[Logprobs], error: str | None) -> None:
    """Appends what a delta adds to a choice. logprobs: its own, as they are shown. error: the delta's."""
    one.text += added.text
    one.token_ids += added.token_ids
    if one.logprobs is not None:
        one.logprobs += logprobs
    if added.finish_reason is not None:
        one.finish_reason, one.stop_reason, one.error = added.finish_reason, added.stop_reason, error


def end_all(output: RequestOutput, finish_reason: str, error: str | None = None) -> RequestOutput:
    """Ends an output, and all its completions in one way. Returns it."""
    output.finished = True
    for completion in output.outputs:
        completion.finish_reason, completion.error = finish_reason, error
    return output


def end_output(output: RequestOutput, ended: Ended) -> None:
    """Ends an output with its request."""
    output.cached_tokens, output.finished = ended.usage.cached_tokens, True
    if ended.refused is not None:
        end_all(output, "error", ended.refused[3])
    for completion, reason in zip(output.outputs, ended.finish_reasons, strict=False):
        if completion.finish_reason is None:
            completion.finish_reason = reason


class OpenOutput:
    """A RequestOutput whose request runs, and the text of each of its choices."""

    def __init__(
        self, output: RequestOutput, texts: list[ChoiceText], token_text: TokenText | None, *, is_ranked: bool
    ) -> None:
        """Opens an output. token_text, is_ranked: as in logprobs_of(), of the output's tokens."""
        self.output = output
        self.texts = texts
        self._token_text, self._is_ranked = token_text, is_ranked

    def take(self, delta: TokenDelta) -> TextDelta | None:
        """Adds a delta to the output; returns what it adds to its choice, if anything."""
        added = self.read(delta)
        if added is not None:
            grow(self.output.outputs[delta.choice], added, self.shown(added), delta.error)
        return added

    def read(self, delta: TokenDelta) -> TextDelta | None:
        """Returns what a delta adds to its choice, if anything; log probabilities of the prompt are added here."""
        if delta.prompt_logprobs is not None:
            prompt = self.output.prompt_logprobs
            assert prompt is not None and len(prompt) == delta.prompt_logprobs.first_position
            prompt += [logprobs_of(entry, self._token_text) for entry in delta.prompt_logprobs.entries]
            return None
        return self.texts[delta.choice].take(delta)

    def shown(self, added: TextDelta) -> list[Logprobs]:
        """Returns the log probabilities of what is added, as a Completion has them."""
        return [logprobs_of(entry, self._token_text, is_ranked=self._is_ranked) for entry in added.logprobs or ()]


def abort_after(delta: TokenDelta, added: TextDelta | None) -> list[Abort]:
    """Returns what the engine has to end, where a stop string was completed."""
    if added is None or added.abort_at is None:
        return []
    return [
        Abort(request_id=delta.request_id, attempt=delta.attempt, choice=delta.choice, keep_positions=added.abort_at)
    ]


class OfflineRun:
    """CallSink of one call of generate(): collects all requests' tokens."""

    def __init__(self) -> None:
        self.open: dict[str, OpenOutput] = {}

    def deltas(self, deltas: list[TokenDelta]) -> list[Abort]:
        aborts: list[Abort] = []
        for delta in deltas:
            added = self.open[delta.request_id].take(delta)
            if added is not None and added.abort_at is not None:
                aborts += abort_after(delta, added)
        return aborts
