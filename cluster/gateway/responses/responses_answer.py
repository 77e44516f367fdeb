"""The text of the answers of /v1/responses: response objects and the events of a stream, as OpenAI's client reads them.

Whole answers and streams are made of the same steps (conversation/blocks.py). Streaming is the hot path: what is
constant in the deltas of an item is serialized once.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tandem.cluster.gateway.conversation.blocks import AnswerBlock, BlockBegan, BlockEnded, BlockGrew, Blocks, BlockStep
from tandem.cluster.gateway.generation.response_format import ChoiceAnswer
from tandem.cluster.gateway.http.error_answers import as_refusal
from tandem.cluster.gateway.openai.token_formatter import TokenFormatter
from tandem.cluster.gateway.responses.events.event_batch import event_of
from tandem.cluster.gateway.responses.response_items import sealed
from tandem.cluster.gateway.responses.response_tools import InputReader, input_of
from tandem.cluster.gateway.responses.text_logprobs import Entries, LoggedBlocks
from tandem.workers.messages.request import TokenLogprobs, Usage
from tandem.workers.text.choice_text import TextDelta

_encode = msgspec.json.Encoder().encode
PREFIXES = {"text": "msg_", "thinking": "rs_", "call": "fc_"}
DELTAS = {
    "text": "response.output_text.delta",
    "thinking": "response.reasoning_text.delta",
    "call": "response.function_call_arguments.delta",
}


@dataclass(frozen=True, kw_only=True)
class Additions:
    """Parts of an answer beside its blocks. formatter: of log probabilities, None for none. seals: thinking comes as
    opaque text too. customs: the names of the custom tools."""

    formatter: TokenFormatter | None = None
    seals: bool = False
    customs: frozenset[str] = frozenset()


class ResponsesFormat:
    """One answer, streamed or not. fields: of the response object, those that the request decides. now: Unix time.
    final: the whole object, once it is complete or has failed."""

    def __init__(
        self, fields: dict[str, Any], blocks: Blocks, now: Callable[[], float], added: Additions | None = None
    ) -> None:
        self._fields = fields
        self._now = now
        self._blocks = blocks
        self._added = added or Additions()
        formatter = self._added.formatter
        self._logged = None if formatter is None else LoggedBlocks(blocks, formatter)
        self._input = InputReader()
        self._ids: list[tuple[str, str]] = []
        self._sequence = 0
        self._delta_start = b""
        self._is_cut = False
        self.final: dict[str, Any] | None = None

    def queued(self) -> dict[str, Any]:
        """The object before anything was generated."""
        return self._object("queued", [])

    def announcement(self) -> bytes:
        """The first events of a response that is known before anything is generated. opening() has the next."""
        shown = self.queued()
        return self._event("response.created", response=shown) + self._event("response.queued", response=shown)

    # ---- implements ResponseFormat ----

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        (choice,) = choices
        self._push(choice.text, choice.token_ids, choice.logprobs, choice.offsets)
        self._finish(cut=choice.finish_reason != "stop")
        self._is_cut = choice.finish_reason == "length"
        return _encode(self._complete(usage))

    def opening(self, index: int) -> bytes:
        shown = self._object("in_progress", [])
        created = b"" if self._sequence else self._event("response.created", response=shown)
        return created + self._event("response.in_progress", response=shown)

    def chunk(self, index: int, addition: TextDelta) -> bytes:
        steps = self._push(addition.text, addition.token_ids, addition.logprobs, addition.offsets)
        if addition.finish_reason is not None:
            self._is_cut = addition.finish_reason == "length"
            steps += self._finish(cut=addition.finish_reason != "stop")
        return b"".join([self._step(step, entries) for step, entries in steps])

    def usage_chunk(self, usage: Usage) -> bytes:
        final = self._complete(usage)
        return self._event(f"response.{final['status']}", response=final)

    def closing(self, error: Exception | None) -> bytes:
        if error is None:
            return b""
        refusal = as_refusal(error)
        code = "invalid_prompt" if refusal.status < 500 else "server_error"
        if refusal.status == 429:
            code = "rate_limit_exceeded"
        failed = {**self._object("failed", []), "error": {"code": code, "message": str(refusal)}}
        self.final = failed
        return self._event("response.failed", response=failed)

    # ---- blocks ----

    def _push(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        offsets: Sequence[int] | None,
    ) -> list[tuple[BlockStep, Entries]]:
        """The steps of more text, each with the log probabilities that are asked for."""
        if self._logged is not None:
            return self._logged.push(text, token_ids, logprobs or (), offsets or ())
        return [(step, []) for step in self._blocks.push(text, token_ids)]

    def _finish(self, *, cut: bool) -> list[tuple[BlockStep, Entries]]:
        if self._logged is not None:
            return self._logged.finish(cut=cut)
        return [(step, []) for step in self._blocks.finish(cut=cut)]

    def _is_custom(self, block: AnswerBlock) -> bool:
        return block.kind == "call" and block.name in self._added.customs

    # ---- objects ----

    def _complete(self, usage: Usage) -> dict[str, Any]:
        output = [self._item(block, self._status(block)) for block in self._blocks.all]
        final = self._object("incomplete" if self._is_cut else "completed", output)
        final["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._blocks.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if self._is_cut:
            final["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            final["completed_at"] = int(self._now())
        self.final = final
        return final

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        nothing = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._fields, "status": status, **nothing, "output": output}

    def _status(self, block: AnswerBlock) -> str:
        return "incomplete" if self._is_cut and block is self._blocks.all[-1] else "completed"

    def _item(self, block: AnswerBlock, status: str) -> dict[str, Any]:
        """The item of a block as far as it is."""
        item_id, call_id = self._id(block)
        if self._is_custom(block):
            named = {"id": item_id, "type": "custom_tool_call", "status": status, "call_id": call_id}
            return {**named, "name": block.name, "input": input_of(block.text)}
        if block.kind == "call":
            named = {"id": item_id, "type": "function_call", "status": status, "call_id": call_id, "name": block.name}
            return {**named, "arguments": block.text}
        parts = [self._part(block)] if block.pieces else []
        if block.kind == "thinking":
            shown = {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": parts}
            return {**shown, "encrypted_content": sealed(block.text)} if self._added.seals else shown
        return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": parts}

    def _part(self, block: AnswerBlock) -> dict[str, Any]:
        if block.kind == "thinking":
            return {"type": "reasoning_text", "text": block.text}
        entries = self._entries(block) if block.pieces else []
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": entries}

    def _entries(self, block: AnswerBlock) -> Entries:
        return [] if self._logged is None else self._logged.of_text.get(block.index, [])

    def _id(self, block: AnswerBlock) -> tuple[str, str]:
        """The ids of a block's item and, if it is one, of its call."""
        while len(self._ids) <= block.index:
            block = self._blocks.all[len(self._ids)]
            prefix = "ctc_" if self._is_custom(block) else PREFIXES[block.kind]
            self._ids.append((f"{prefix}{uuid.uuid4().hex}", f"call_{uuid.uuid4().hex[:24]}"))
        return self._ids[block.index]

    # ---- events ----

    def _step(self, step: BlockStep, entries: Entries) -> bytes:
        match step:
            case BlockGrew(block, text):
                if self._is_custom(block):
                    return self._grew(self._input.push(text))
                if entries:
                    return self._event(DELTAS["text"], **self._place(block), delta=text, logprobs=entries)
                return self._grew(text)
            case BlockBegan(block):
                return self._began(block)
            case BlockEnded(block):
                return self._ended(block)

    def _grew(self, text: str) -> bytes:
        """A delta of the open item; b"" for none."""
        if not text:
            return b""
        self._sequence += 1
        return b'%b%b,"sequence_number":%d}\n\n' % (self._delta_start, _encode(text), self._sequence - 1)

    def _began(self, block: AnswerBlock) -> bytes:
        place = self._place(block)
        shown = self._item(AnswerBlock(block.kind, block.index, block.name), "in_progress")
        events = self._event("response.output_item.added", output_index=block.index, item=shown)
        if block.kind != "call":
            empty = self._part(AnswerBlock(block.kind, block.index))
            events += self._event("response.content_part.added", **place, part=empty)
        if block.kind == "text":
            place["logprobs"] = []
        kind = DELTAS[block.kind]
        if self._is_custom(block):
            kind, self._input = "response.custom_tool_call_input.delta", InputReader()
        start = _encode({"type": kind, **place})[:-1]  # lacks its closing brace
        self._delta_start = b"event: %b\ndata: %b,%b:" % (kind.encode(), start, b'"delta"')
        return events

    def _ended(self, block: AnswerBlock) -> bytes:
        place, text = self._place(block), block.text
        if self._is_custom(block):
            events = self._grew(self._input.finish())
            events += self._event("response.custom_tool_call_input.done", **place, input=input_of(text))
        elif block.kind == "call":
            name = "response.function_call_arguments.done"
            events = self._event(name, **place, name=block.name, arguments=text)
        elif block.kind == "thinking":
            events = self._event("response.reasoning_text.done", **place, text=text)
        else:
            events = self._event("response.output_text.done", **place, text=text, logprobs=self._entries(block))
        if block.kind != "call":
            events += self._event("response.content_part.done", **place, part=self._part(block))
        item = self._item(block, self._status(block))
        return events + self._event("response.output_item.done", output_index=block.index, item=item)

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._id(block)[0], "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return event_of(kind, self._sequence - 1, **fields)
