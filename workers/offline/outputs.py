"""Results of LLM.generate() and chat(), and the sink that fills them while their requests run."""

import msgspec

from tandem.workers.messages.request import Abort, Ended, TokenDelta, TokenLogprobs
from tandem.workers.text.choice_text import ChoiceText, TextDelta


class Completion(msgspec.Struct, kw_only=True):
    """One choice of a prompt.

    index: its number, from 0. text, token_ids: the output; text ends before a stop string. finish_reason: "stop",
    "length", "abort" or "error". logprobs: natural log probabilities, one entry for each token, if asked for. error:
    the reason of "error". stop_reason: the stop string or stop token id that ended it; None for EOS and the rest.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = []
    error: str | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log probabilities, by vLLM's name; None if they were not asked for."""
        return sum(token.logprob for token in self.logprobs) if self.logprobs else None


class RequestOutput(msgspec.Struct, kw_only=True):
    """Result of one prompt: its `n` completions in `outputs`, in order.

    request_id: a number, as text; of AsyncLLM the caller's. prompt: the text, None if token ids were given.
    cached_tokens: prompt tokens whose KV was found in the prefix cache. prompt_logprobs: if asked for, one entry for
    each token of the prompt, None for the first. finished: no more comes.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = False

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def num_cached_tokens(self) -> int:
        """cached_tokens, by vLLM's name."""
        return self.cached_tokens


def grow(one: Completion, added: TextDelta, error: str | None) -> None:
    """Appends what a delta adds to a choice. error: the delta's."""
    one.text += added.text
    one.token_ids += added.token_ids
    one.logprobs += added.logprobs or []
    if added.finish_reason is not None:
        one.finish_reason, one.stop_reason, one.error = added.finish_reason, added.stop_reason, error


def refuse_output(output: RequestOutput, why: str) -> None:
    """Ends an output with an error in all its completions."""
    output.finished = True
    for completion in output.outputs:
        completion.finish_reason, completion.error = "error", why


def end_output(output: RequestOutput, ended: Ended) -> None:
    """Ends an output with its request."""
    output.cached_tokens, output.finished = ended.usage.cached_tokens, True
    if ended.refused is not None:
        refuse_output(output, ended.refused[3])
    for completion, reason in zip(output.outputs, ended.finish_reasons, strict=False):
        if completion.finish_reason is None:
            completion.finish_reason = reason


class OpenOutput:
    """A RequestOutput whose request runs, and the text of each of its choices."""

    def __init__(self, output: RequestOutput, texts: list[ChoiceText]) -> None:
        self.output = output
        self.texts = texts

    def take(self, delta: TokenDelta) -> TextDelta | None:
        """Adds a delta to the output; returns what it adds to its choice, if anything."""
        added = self.read(delta)
        if added is not None:
            grow(self.output.outputs[delta.choice], added, delta.error)
        return added

    def read(self, delta: TokenDelta) -> TextDelta | None:
        """Returns what a delta adds to its choice, if anything; log probabilities of the prompt are added here."""
        if delta.prompt_logprobs is not None:
            prompt = self.output.prompt_logprobs
            assert prompt is not None and len(prompt) == delta.prompt_logprobs.first_position
            prompt += delta.prompt_logprobs.entries
            return None
        return self.texts[delta.choice].take(delta)


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
