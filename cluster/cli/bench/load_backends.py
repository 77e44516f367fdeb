"""The kinds of routes that a load can ask: bodies, and what the events of an answer say.

What counts as a token, and so as the first one and as the end of an answer, is what counts in vLLM's bench.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from tandem.cluster.cli.bench.data_sets.samples import Sample

Text = str | None | msgspec.UnsetType
UNSET: Final = msgspec.UNSET


class Told(NamedTuple):
    """The news of one event. has_tokens: tokens came with it, whose text is `text`, empty at times. The counts are of
    `usage`; error: why the answer broke off; is_last: the answer ends with it, where no [DONE] says so."""

    has_tokens: bool = False
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    is_last: bool = False


class LoadBackend(Protocol):
    """One kind of route. streams: an answer is a stream of events; else it is one JSON object."""

    route: str
    streams: bool
    pools: bool  # no tokens come back: embeddings

    def body(self, sample: Sample) -> dict[str, Any]:
        """The fields of a request, without the model's name, its `ignore_eos` and the user's own."""
        ...

    def read(self, data: bytes) -> Told:
        """Reads one event, or the answer. msgspec.DecodeError for what is none."""
        ...


class _Counts(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Why(msgspec.Struct, frozen=True):
    message: str = "it does not say why"


class _ChatDelta(msgspec.Struct, frozen=True):
    """The delta of a chat: what it holds beside text is of tokens too."""

    content: Text = UNSET
    role: Text = UNSET
    reasoning: Text = None
    reasoning_content: Text = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def has_tokens(self) -> bool:
        """False for the first event, which has the role alone. A special token has an empty text."""
        if self.content or self.reasoning or self.reasoning_content or self.tool_calls:
            return True
        return self.content == "" and self.role is UNSET


class _OneChoice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _ChatDelta | None = None


class _StreamEvent(msgspec.Struct, frozen=True):
    choices: list[_OneChoice] = []
    usage: _Counts | None = None
    error: _Why | None = None


class CompletionRoute:
    """POST /v1/completions."""

    route, streams, pools = "/v1/completions", True, False
    _decoder = msgspec.json.Decoder(_StreamEvent)

    def __init__(self, logprobs: int | None = None) -> None:
        self._logprobs = logprobs

    def body(self, sample: Sample) -> dict[str, Any]:
        more = {} if self._logprobs is None else {"logprobs": self._logprobs}
        return {"prompt": sample.prompt, "max_tokens": sample.output_len, **STREAMED, **more}

    def read(self, data: bytes) -> Told:
        event = self._decoder.decode(data)
        if event.choices:
            return Told(True, event.choices[0].text or "")
        return _ended(event)


class ChatRoute:
    """POST /v1/chat/completions; a sample is one message of the user's."""

    route, streams, pools = "/v1/chat/completions", True, False
    _decoder = msgspec.json.Decoder(_StreamEvent)

    def __init__(self, logprobs: int | None = None) -> None:
        self._logprobs = logprobs

    def body(self, sample: Sample) -> dict[str, Any]:
        messages = [{"role": "user", "content": sample.prompt}]
        more = {} if self._logprobs is None else {"logprobs": True, "top_logprobs": self._logprobs}
        return {"messages": messages, "max_completion_tokens": sample.output_len, **STREAMED, **more}

    def read(self, data: bytes) -> Told:
        event = self._decoder.decode(data)
        delta = event.choices[0].delta if event.choices else None
        if delta is not None and delta.has_tokens:
            return Told(True, delta.content or "")
        return _ended(event)


class _Response(msgspec.Struct, frozen=True):
    usage: _Counts | None = None
    error: _Why | None = None


class _ResponseEvent(msgspec.Struct, frozen=True):
    type: str = ""
    delta: msgspec.Raw = msgspec.Raw(b'""')
    response: _Response | None = None
    message: str | None = None


class ResponseRoute:
    """POST /v1/responses; a sample is its input."""

    route, streams, pools = "/v1/responses", True, False
    _decoder = msgspec.json.Decoder(_ResponseEvent)

    def body(self, sample: Sample) -> dict[str, Any]:
        return {"input": sample.prompt, "max_output_tokens": sample.output_len, "stream": True}

    def read(self, data: bytes) -> Told:
        event = self._decoder.decode(data)
        if event.type in ("response.output_text.delta", "response.reasoning_text.delta"):
            return Told(True, msgspec.json.decode(event.delta, type=str))
        if event.type == "error":
            return Told(error=event.message or _Why().message)
        if event.response is None or event.type not in FINAL:
            return Told()
        error, counts = event.response.error, event.response.usage or _Counts()
        why = None if error is None else error.message
        return Told(False, "", counts.input_tokens, counts.output_tokens, why, is_last=True)


class EmbeddingRoute:
    """POST /v1/embeddings; a sample is its input, and nothing is streamed."""

    route, streams, pools = "/v1/embeddings", False, True
    _decoder = msgspec.json.Decoder(_StreamEvent)

    def body(self, sample: Sample) -> dict[str, Any]:
        return {"input": sample.prompt}

    def read(self, data: bytes) -> Told:
        return _ended(self._decoder.decode(data))


STREAMED: Final[Mapping[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}
FINAL: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


def load_backend(name: str, logprobs: int | None) -> LoadBackend:
    """The backend of a name of --backend. logprobs: of every token; only completions and chats have a field for it."""
    if name == "openai-chat":
        return ChatRoute(logprobs)
    if name == "openai-responses":
        return ResponseRoute()
    return EmbeddingRoute() if name == "openai-embeddings" else CompletionRoute(logprobs)


def _ended(event: _StreamEvent) -> Told:
    """Reads an event without tokens."""
    if event.error is not None:
        return Told(error=event.error.message)
    counts = event.usage
    return Told() if counts is None else Told(False, "", counts.prompt_tokens, counts.completion_tokens)
