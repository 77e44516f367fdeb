"""Results of LLM.generate() and chat(), and the sink that fills them while their requests run."""

from typing import Any

import msgspec
from tqdm import tqdm

from tandem.workers.messages.request import Abort, Ended, GenerationRequest, TokenDelta, TokenLogprobs
from tandem.workers.text.choice_text import ChoiceText


class Completion(msgspec.Struct, kw_only=True):
    """One choice of a prompt.

    index: its number, from 0. text, token_ids: the output; text ends before a stop string. finish_reason: "stop",
    "length" or "error". logprobs: natural log probabilities, one entry for each token, if asked for. error: the reason
    of "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = []
    error: str | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """Result of one prompt: its `n` completions in `outputs`, in order.

    prompt: the text, None if token ids were given. cached_tokens: prompt tokens whose KV was found in the
    prefix cache. prompt_logprobs: if asked for, one entry for each token of the prompt, None for the first.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text


class OpenChoice:
    """One unfinished choice: a Completion that ChoiceText fills."""

    def __init__(self, completion: Completion, text: ChoiceText) -> None:
        self.completion = completion
        self._text = text

    def take(self, delta: TokenDelta) -> int | None:
        """Adds a delta; returns the number of tokens to keep if a stop string was completed, else None."""
        added = self._text.take(delta)
        if added is None:
            return None
        done = self.completion
        done.text += added.text
        done.token_ids += added.token_ids
        done.logprobs += added.logprobs or []
        done.finish_reason, done.error = added.finish_reason, delta.error
        return added.abort_at


class OfflineRun:
    """OutputSink of one call of generate(): collects all requests' tokens, and aborts for completed stop strings."""

    def __init__(self, bar: "tqdm[Any]") -> None:
        self.choices: dict[str, list[OpenChoice]] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.stops: list[Abort] = []
        self.ended_ids: list[str] = []
        self._bar = bar

    def deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if delta.prompt_logprobs is not None:
                prompt = self.outputs[delta.request_id].prompt_logprobs
                assert prompt is not None and len(prompt) == delta.prompt_logprobs.first_position
                prompt += delta.prompt_logprobs.entries
                continue
            keep = self.choices[delta.request_id][delta.choice].take(delta)
            if keep is not None:
                self.stops.append(
                    Abort(request_id=delta.request_id, attempt=delta.attempt, choice=delta.choice, keep_positions=keep)
                )

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        output = self.outputs[ended.request_id]
        output.cached_tokens = ended.usage.cached_tokens
        if ended.refused is not None:
            for completion in output.outputs:
                completion.finish_reason, completion.error = "error", ended.refused[3]
        self.ended_ids.append(ended.request_id)
        self._bar.update()
