"""The text of the answers: chat and completion objects and their stream chunks, as the OpenAI client reads them.

Streaming is the hot path: what is constant in a chunk is serialized once per answer, a step only encodes its text.
Tokens come only in TextDeltas. Next: http/sse.py, which writes what is made here.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.cluster.gateway.generation.response_format import ChoiceAnswer
from tandem.cluster.gateway.http.sse import openai_end
from tandem.cluster.gateway.openai.answer_usage import ChunkCounts, Metrics, usage_object
from tandem.cluster.gateway.openai.chunk_frame import ChunkFrame, _head_fields
from tandem.cluster.gateway.openai.echoed_prompt import EchoedPrompt
from tandem.cluster.gateway.openai.token_formatter import TokenFormatter
from tandem.cluster.gateway.serving.answer import AnswerHead
from tandem.workers.messages.request import TokenLogprobs, Usage
from tandem.workers.text.choice_text import TextDelta
from tandem.workers.text.detokenizer import DetokenizerFactory

_encode = msgspec.json.Encoder().encode


class ChatFormat:
    """chat.completion and chat.completion.chunk. counts: None where chunks have no usage. metrics: see Metrics. by_id:
    of TokenFormatter."""

    def __init__(
        self,
        detokenizers: DetokenizerFactory,
        head: AnswerHead,
        *,
        with_usage: bool,
        counts: ChunkCounts | None = None,
        prompt_ids: list[int] | None = None,
        with_prompt_logprobs: bool = False,
        metrics: Metrics = None,
        by_id: bool = False,
    ) -> None:
        self._formatter = TokenFormatter(detokenizers, by_id=by_id)
        self._head = head
        self._prompt_ids = prompt_ids
        self._with_prompt_logprobs = with_prompt_logprobs
        self._metrics = metrics
        self._frame = ChunkFrame(
            head, "chat.completion.chunk", with_usage, counts, metrics, with_ids=prompt_ids is not None
        )

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        entries = [self._whole_choice(choice) for choice in choices]
        extra: dict[str, Any] = {"prompt_token_ids": self._prompt_ids} if self._prompt_ids is not None else {}
        if self._with_prompt_logprobs:
            extra["prompt_logprobs"] = self._formatter.prompt(choices[0].prompt_logprobs)
        shown = {**usage_object(usage), **self._usage_details()}
        return _whole(self._head, "chat.completion", entries, shown, {**extra, **_shown(self._metrics)})

    def _whole_choice(self, choice: ChoiceAnswer) -> dict[str, Any]:
        shown = {**self._logprobs(choice.logprobs), "refusal": None} if choice.logprobs is not None else None
        entry = _entry(choice, {"message": self._message(choice)}, shown)
        if self._prompt_ids is not None:
            entry["token_ids"] = choice.token_ids
        return entry

    def _message(self, choice: ChoiceAnswer) -> dict[str, Any]:
        return {"role": "assistant", "content": choice.text, "refusal": None}

    def _usage_details(self) -> dict[str, Any]:
        """More fields of the usage, once all text has been formatted."""
        return {}

    def opening(self, index: int) -> bytes:
        ids = b',"prompt_token_ids":' + _encode(self._prompt_ids) if self._prompt_ids is not None else b""
        return self._frame.going_on(index, b'"delta":{"role":"assistant","content":""}', beside=ids)

    def chunk(self, index: int, addition: TextDelta) -> bytes:
        content = b'"content":' + _encode(addition.text) if addition.text or addition.token_ids else b""
        shown = self._logprobs(addition.logprobs) if addition.logprobs else None
        return self._frame.chunk(index, b'"delta":{%b}' % content, shown, addition)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._frame.usage_chunk({**usage_object(usage), **self._usage_details()})

    def closing(self, error: Exception | None) -> bytes:
        return openai_end(error)

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": [self._formatter.chat(item) for item in entries]}


class CompletionFormat:
    """text_completion, streamed or not. `echo` and `prompt_ids`: per choice, if asked for; log probabilities cover an
    echoed prompt too. counts, metrics, by_id: as in ChatFormat."""

    def __init__(
        self,
        detokenizers: DetokenizerFactory,
        head: AnswerHead,
        *,
        with_usage: bool,
        counts: ChunkCounts | None = None,
        prompt_ids: Sequence[list[int]] | None = None,
        echo: Sequence[EchoedPrompt] | None = None,
        with_prompt_logprobs: bool = False,
        metrics: Metrics = None,
        by_id: bool = False,
    ) -> None:
        self._with_prompt_logprobs = with_prompt_logprobs
        self._metrics = metrics
        self._formatter = TokenFormatter(detokenizers, by_id=by_id)
        self._head = head
        self._prompt_ids = prompt_ids
        self._echo = echo
        self._frame = ChunkFrame(head, "text_completion", with_usage, counts, metrics, with_ids=prompt_ids is not None)

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        entries = []
        for choice in choices:
            text = (self._echo[choice.index].text if self._echo else "") + choice.text
            shown = None
            if choice.logprobs is not None:
                shown = self._formatter.completion(choice.logprobs, choice.offsets or [])
                if self._echo:
                    shown = self._echoed(choice, self._echo[choice.index], shown)
            entry = _entry(choice, {"text": text}, shown)
            if self._with_prompt_logprobs:
                entry["prompt_logprobs"] = self._formatter.prompt(choice.prompt_logprobs)
            if self._prompt_ids is not None:
                entry["token_ids"] = choice.token_ids
                entry["prompt_token_ids"] = self._prompt_ids[choice.index]
            entries.append(entry)
        return _whole(self._head, "text_completion", entries, usage_object(usage), _shown(self._metrics))

    def _echoed(self, choice: ChoiceAnswer, echo: EchoedPrompt, shown: dict[str, Any]) -> dict[str, Any]:
        """The lists of the prompt, whose first token has no log probability, before those of the output."""
        prompt = self._formatter.completion(choice.prompt_logprobs, echo.offsets[1:])
        size = len(echo.text)
        return {
            "tokens": [self._formatter.name(echo.token_ids[0]), *prompt["tokens"], *shown["tokens"]],
            "token_logprobs": [None, *prompt["token_logprobs"], *shown["token_logprobs"]],
            "top_logprobs": [None, *prompt["top_logprobs"], *shown["top_logprobs"]],
            "text_offset": [*echo.offsets, *(size + offset for offset in shown["text_offset"])],
        }

    def opening(self, index: int) -> bytes:
        text = self._echo[index].text if self._echo else ""
        ids = b""
        if self._prompt_ids is not None:
            ids = b',"prompt_token_ids":%b,"token_ids":[]' % _encode(self._prompt_ids[index])
        return self._frame.going_on(index, b'"text":' + _encode(text), inside=ids) if text or ids else b""

    def chunk(self, index: int, addition: TextDelta) -> bytes:
        logprobs = addition.logprobs
        shown = self._formatter.completion(logprobs, addition.offsets or []) if logprobs else None
        return self._frame.chunk(index, b'"text":' + _encode(addition.text), shown, addition)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._frame.usage_chunk(usage_object(usage))

    def closing(self, error: Exception | None) -> bytes:
        return openai_end(error)


def _entry(choice: ChoiceAnswer, content: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
    """A whole choice; `content` is its message or text."""
    return {
        "index": choice.index,
        **content,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def _shown(metrics: Metrics) -> dict[str, Any]:
    return {} if metrics is None else {"metrics": metrics()}


def _whole(
    head: AnswerHead, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any], extra: dict[str, Any]
) -> bytes:
    return _encode({**_head_fields(head, kind), "choices": choices, "usage": usage, **extra})
