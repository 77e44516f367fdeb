"""Chunks of a stream around their text, and the fields that every object of one answer has."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.cluster.gateway.openai.answer_usage import ChunkCounts, Metrics
from tandem.cluster.gateway.serving.answer import AnswerHead
from tandem.workers.text.choice_text import TextDelta

_encode = msgspec.json.Encoder().encode


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


def _head_fields(head: AnswerHead, kind: str) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }
