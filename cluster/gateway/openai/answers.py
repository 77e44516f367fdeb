"""The text of the answers: chat and completion objects and their stream chunks, as the OpenAI client reads them.

Streaming is the hot path: what is constant in a chunk is serialized once per answer, a step only encodes its text.
Tokens come only in TextDeltas.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from tandem.cluster.gateway.generation.response_format import ChoiceAnswer
from tandem.cluster.gateway.http.sse import openai_end
from tandem.workers.messages.request import TokenLogprobs, Usage
from tandem.workers.text.choice_text import TextDelta
from tandem.workers.text.detokenizer import DetokenizerFactory

_encode = msgspec.json.Encoder().encode
Metrics = Callable[[], dict[str, Any]] | None
"""Makes the object `metrics` beside `usage`; None: answers have none."""


class AnswerHead(NamedTuple):
    """Fields that every object of one answer has."""

    id: str
    created: int
    model: str
    fingerprint: str


class ChunkCounts:
    """The counts in every chunk of a stream (vLLM's continuous_usage_stats): of the chunk's choice, as in vLLM.

    prompt_tokens: by choice, those of its prompt. The output tokens are those whose text has been formatted, whichever
    group they came from.
    """

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = [0] * len(prompt_tokens)

    def add(self, index: int, num_tokens: int) -> None:
        """Counts new tokens of a choice, whether or not a chunk shows them."""
        self._completion_tokens[index] += num_tokens

    def tail(self, index: int) -> bytes:
        """The end of a chunk of this choice."""
        prompt, output = self._prompt_tokens[index], self._completion_tokens[index]
        counts = b'"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % (prompt, prompt + output, output)
        return b',"usage":{%b}}\n\n' % counts


class ChatFormat:
    """chat.completion and chat.completion.chunk. counts: None where chunks have no usage. metrics: see Metrics."""

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
    ) -> None:
        self._formatter = TokenFormatter(detokenizers)
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
    """text_completion, streamed or not. `echo` and `prompt_ids`: per choice, if asked for; echo_ids: prompt_ids
    where the log probabilities cover the prompt too. counts, metrics: as in ChatFormat."""

    def __init__(
        self,
        detokenizers: DetokenizerFactory,
        head: AnswerHead,
        *,
        with_usage: bool,
        counts: ChunkCounts | None = None,
        prompt_ids: Sequence[list[int]] | None = None,
        echo: Sequence[str] | None = None,
        echo_ids: Sequence[list[int]] | None = None,
        skip_special_tokens: bool = True,
        with_prompt_logprobs: bool = False,
        metrics: Metrics = None,
    ) -> None:
        self._detokenizers = detokenizers
        self._echo_ids = echo_ids
        self._skip_special_tokens = skip_special_tokens
        self._with_prompt_logprobs = with_prompt_logprobs
        self._metrics = metrics
        self._formatter = TokenFormatter(detokenizers)
        self._head = head
        self._prompt_ids = prompt_ids
        self._echo = echo
        self._frame = ChunkFrame(head, "text_completion", with_usage, counts, metrics, with_ids=prompt_ids is not None)

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        entries = []
        for choice in choices:
            text = (self._echo[choice.index] if self._echo else "") + choice.text
            shown = None
            if choice.logprobs is not None:
                shown = self._formatter.completion(choice.logprobs, choice.offsets or [])
                if self._echo_ids is not None:
                    shown = self._echoed(choice, shown)
            entry = _entry(choice, {"text": text}, shown)
            if self._with_prompt_logprobs:
                entry["prompt_logprobs"] = self._formatter.prompt(choice.prompt_logprobs)
            if self._prompt_ids is not None:
                entry["token_ids"] = choice.token_ids
                entry["prompt_token_ids"] = self._prompt_ids[choice.index]
            entries.append(entry)
        return _whole(self._head, "text_completion", entries, usage_object(usage), _shown(self._metrics))

    def _echoed(self, choice: ChoiceAnswer, shown: dict[str, Any]) -> dict[str, Any]:
        """The lists of the prompt, whose first token has no log probability, before those of the output."""
        assert self._echo is not None and self._echo_ids is not None
        ids, size = self._echo_ids[choice.index], len(self._echo[choice.index])
        detokenizer = self._detokenizers.make([], skip_special_tokens=self._skip_special_tokens)
        offsets, chars = [], 0
        for token_id in ids:
            offsets.append(min(chars, size))
            chars += len(detokenizer.push(token_id))
        prompt = self._formatter.completion(choice.prompt_logprobs, offsets[1:])
        return {
            "tokens": [self._formatter.text(ids[0]), *prompt["tokens"], *shown["tokens"]],
            "token_logprobs": [None, *prompt["token_logprobs"], *shown["token_logprobs"]],
            "top_logprobs": [None, *prompt["top_logprobs"], *shown["top_logprobs"]],
            "text_offset": [*offsets, *(size + offset for offset in shown["text_offset"])],
        }

    def opening(self, index: int) -> bytes:
        text = self._echo[index] if self._echo else ""
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


class ChunkFrame:
    """The frame of both formats' chunks around the text: the head, serialized once, and the end. `content` is a
    choice's `"delta":...` or `"text":...`."""

    def __init__(
        self,
        head: AnswerHead,
        kind: str,
        with_usage: bool,
        counts: ChunkCounts | None,
        metrics: Metrics,
        *,
        with_ids: bool,
    ) -> None:
        constant = _encode(_head_fields(head, kind))[:-1]  # lacks its closing brace
        self._with_ids = with_ids
        self._start = b"data: " + constant + b',"choices":[{"index":'
        self._usage_start = b"data: " + constant + b',"choices":[],"usage":'
        self._tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._counts = counts
        self._metrics = metrics

    def chunk(self, index: int, content: bytes, logprobs: dict[str, Any] | None, addition: TextDelta) -> bytes:
        """One addition; b"" when there is nothing to show. The end comes with the last text, if any."""
        text, token_ids, entries, _, finish, _, _ = addition
        if self._counts is not None:
            self._counts.add(index, len(token_ids))
        if finish is None and entries is None and not self._with_ids:
            return self.going_on(index, content) if text else b""
        if not text and not token_ids and finish is None:
            return b""
        return self._ended(index, content, logprobs, addition)

    def sorted_chunks(
        self, index: int, contents: Sequence[bytes], logprobs: dict[str, Any] | None, addition: TextDelta
    ) -> bytes:
        """One addition whose text became several deltas, or none yet; the last has what belongs to the tokens."""
        token_ids, entries, finish = addition.token_ids, addition.logprobs, addition.finish_reason
        if self._counts is not None:
            self._counts.add(index, len(token_ids))
        if finish is None and not (token_ids and (self._with_ids or entries is not None)):
            return b"".join([self.going_on(index, content) for content in contents])
        *first, last = contents or (b'"delta":{}',)
        ended = self._ended(index, last, logprobs, addition)
        return b"".join([*(self.going_on(index, content) for content in first), ended])

    def _ended(self, index: int, content: bytes, logprobs: dict[str, Any] | None, addition: TextDelta) -> bytes:
        _, token_ids, _, _, finish, stop_reason, _ = addition
        return b'%b%d,%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}]%b' % (
            self._start,
            index,
            content,
            _encode(logprobs),
            _encode(finish),
            _encode(stop_reason),
            b',"token_ids":' + _encode(token_ids) if self._with_ids else b"",
            self._tail if self._counts is None else self._counts.tail(index),
        )

    def going_on(self, index: int, content: bytes, *, inside: bytes = b"", beside: bytes = b"") -> bytes:
        """A choice that has not ended; more fields of the choice (`inside`) and of the chunk (`beside`)."""
        return b'%b%d,%b,"logprobs":null,"finish_reason":null%b}]%b%b' % (
            self._start,
            index,
            content,
            inside,
            beside,
            self._tail if self._counts is None else self._counts.tail(index),
        )

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The chunk with the bill and no choices."""
        metrics = b"" if self._metrics is None else b',"metrics":' + _encode(self._metrics())
        return self._usage_start + _encode(usage) + metrics + b"}\n\n"


class TokenFormatter:
    """Token ids and logprobs in both of OpenAI's styles."""

    LOWEST = -9999.0

    def __init__(self, detokenizers: DetokenizerFactory) -> None:
        self._bytes = detokenizers.token_bytes

    def text(self, token_id: int) -> str:
        """A token's text; bytes that are no whole character become U+FFFD."""
        return self._bytes(token_id).decode("utf-8", "replace")

    def chat(self, entry: TokenLogprobs) -> dict[str, Any]:
        """One item of logprobs.content."""
        top = [self._item(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._item(entry.token_id, entry.logprob), "top_logprobs": top}

    def completion(self, entries: Sequence[TokenLogprobs], offsets: Sequence[int]) -> dict[str, Any]:
        """The parallel lists of completions; the chosen token is always among its top_logprobs. These are by text: of
        tokens with one text (as parts of characters have, U+FFFD) the chosen one is shown, else the best."""
        tops: list[dict[str, float]] = []
        for entry in entries:
            top: dict[str, float] = {}
            for token_id, logprob in entry.top:
                top.setdefault(self.text(token_id), self._finite(logprob))
            top[self.text(entry.token_id)] = self._finite(entry.logprob)
            tops.append(top)
        return {
            "tokens": [self.text(entry.token_id) for entry in entries],
            "token_logprobs": [self._finite(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": list(offsets[: len(entries)]),
        }

    def prompt(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
        """vLLM's prompt_logprobs: nothing of the first token, then by token id its own and those of the best tokens."""
        shown: list[dict[str, Any] | None] = [None]
        for entry in entries:
            found = [(entry.token_id, entry.logprob, entry.rank)]
            found += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
            one: dict[str, Any] = {}
            for token_id, logprob, rank in found:
                item = {"logprob": self._finite(logprob), "rank": rank, "decoded_token": self.text(token_id)}
                one.setdefault(str(token_id), item)
            shown.append(one)
        return shown

    def _item(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": self._finite(logprob), "bytes": list(raw)}

    def _finite(self, logprob: float) -> float:
        """JSON has no infinities; OpenAI's value for "very unlikely"."""
        return max(logprob, self.LOWEST)


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _head_fields(head: AnswerHead, kind: str) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }


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
