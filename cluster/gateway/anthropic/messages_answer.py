"""The text of the answers of /v1/messages: messages and the events of a stream, as Anthropic's client reads them.

Whole answers and streams are made of the same steps (conversation/blocks.py). Streaming is the hot path: what is
constant in the deltas of a block is serialized once.
"""

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tandem.cluster.gateway.anthropic.anthropic_errors import error_event
from tandem.cluster.gateway.conversation.blocks import AnswerBlock, BlockBegan, BlockEnded, BlockGrew, Blocks, BlockStep
from tandem.cluster.gateway.generation.response_format import ChoiceAnswer
from tandem.workers.messages.request import Usage
from tandem.workers.text.choice_text import TextDelta

_encode = msgspec.json.Encoder().encode
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesFormat:
    """One answer, streamed or not. message_id, model: of the answer. counted: the bill so far, for its first event."""

    def __init__(self, message_id: str, model: str, blocks: Blocks, counted: Callable[[], Usage]) -> None:
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._counted = counted
        self._blocks = blocks
        self._finish_reason = "stop"
        self._stop_reason: int | str | None = None
        self._delta_start = b""

    # ---- implements ResponseFormat ----

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        (choice,) = choices
        self._blocks.push(choice.text, choice.token_ids)
        self._blocks.finish(cut=choice.finish_reason != "stop")
        content = [_whole_block(block) for block in self._blocks.all]
        stop = self._stop(choice.finish_reason, choice.stop_reason)
        return _encode({**self._head, "content": content, **stop, "usage": usage_object(usage)})

    def opening(self, index: int) -> bytes:
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **nothing, "usage": usage_object(self._counted())}
        return _event("message_start", message=message) + _event("ping")

    def chunk(self, index: int, addition: TextDelta) -> bytes:
        steps = self._blocks.push(addition.text, addition.token_ids)
        if addition.finish_reason is not None:
            steps += self._blocks.finish(cut=addition.finish_reason != "stop")
            self._finish_reason, self._stop_reason = addition.finish_reason, addition.stop_reason
        return b"".join([self._step(step) for step in steps])

    def usage_chunk(self, usage: Usage) -> bytes:
        delta = self._stop(self._finish_reason, self._stop_reason)
        return _event("message_delta", delta=delta, usage=usage_object(usage)) + _event("message_stop")

    def closing(self, error: Exception | None) -> bytes:
        return b"" if error is None else error_event(error)

    # ---- inside ----

    def _stop(self, finish_reason: str, stop_reason: int | str | None) -> dict[str, Any]:
        sequence = None
        if finish_reason == "length":
            reason = "max_tokens"
        elif self._blocks.has_calls:
            reason = "tool_use"
        elif isinstance(stop_reason, str):
            reason, sequence = "stop_sequence", stop_reason
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _step(self, step: BlockStep) -> bytes:
        match step:
            case BlockGrew(_, text):
                return self._delta_start + _encode(text) + b"}}\n\n"
            case BlockBegan(block):
                kind, name = DELTAS[block.kind]
                self._delta_start = (
                    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
                    b'"delta":{"type":"%b","%b":' % (block.index, kind.encode(), name.encode())
                )
                shown = _block(block.kind, block.name, "", {})
                return _event("content_block_start", index=block.index, content_block=shown)
            case BlockEnded(block):
                return _event("content_block_stop", index=block.index)


def usage_object(usage: Usage) -> dict[str, int]:
    """Anthropic's usage, where tokens of the cache are no input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _whole_block(block: AnswerBlock) -> dict[str, Any]:
    return _block(block.kind, block.name, block.text, _arguments(block.text) if block.kind == "call" else {})


def _block(kind: str, name: str, text: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if kind == "call":
        return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": arguments}
    if kind == "thinking":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text, "citations": None}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; {} where the answer was cut off within them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
