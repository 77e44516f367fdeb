"""Translates items to the chat body that says the same, which read_chat() checks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from tandem.cluster.gateway.conversation.field_names import FieldNames
from tandem.cluster.gateway.responses.response_items import (
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
)
from tandem.cluster.gateway.responses.response_tools import call_arguments, chat_choice, chat_tools, held_text
from tandem.cluster.gateway.responses.responses_body import AS_IN_CHAT, LOGPROBS, ResponsesBody, TextFormat
from tandem.cluster.gateway.schemas.chat_body import ChatBody, read_chat
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.configs.schema import GatewaySettings

FIELDS = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""The body's names of chat fields whose names differ."""


class Placed(NamedTuple):
    """An item, and the field that it comes from."""

    place: str
    item: Item


def given_items(body: ResponsesBody) -> list[Item]:
    """The items of a body's own input."""
    return [MessageItem("user", body.input)] if isinstance(body.input, str) else list(body.input)


def placed_items(body: ResponsesBody, before: Sequence[Item]) -> list[Placed]:
    """All items of a conversation. before: those of the one that goes on."""
    own = [
        Placed("input" if isinstance(body.input, str) else f"input[{i}]", x) for i, x in enumerate(given_items(body))
    ]
    return [*(Placed("previous_response_id", item) for item in before), *own]


def chat_of(
    body: ResponsesBody, items: Sequence[Placed], settings: GatewaySettings, ignored: IgnoredFields
) -> tuple[ChatBody, FieldNames]:
    """The chat body of these items, and the client's names of its fields. RequestRefused naming the client's field at
    fault."""
    turns = Turns()
    if body.instructions is not None:
        turns.add("instructions", {"role": "system", "content": body.instructions})
    for place, item in items:
        turns.take(place, item)
    streams = body.stream or body.background  # one of the background is made like a stream
    tools = chat_tools(body.tools, body.tool_choice, ignored)
    names = FieldNames(FIELDS, "input", "max_output_tokens", turns.places, tools=list(tools))
    held = held_text(body.tools, body.tool_choice)
    fields = {
        "messages": turns.messages,
        "model": body.model,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": list(tools.values()) or None,
        "tool_choice": chat_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "user": body.user,
        "stream": streams or None,
        "stream_options": {"include_usage": True} if streams else None,
        **_logprob_fields(body),
        **{name: _plain(getattr(body, name)) for name in AS_IN_CHAT},
    }
    if held is not None:
        fields |= {"tool_choice": "none", "structured_outputs": {"grammar": held.definition}}
        own = {**FIELDS, "structured_outputs": held.place}
        names = replace(names, fields=own, parts=(*names.parts, (".grammar", ".definition")))
    elif body.text is not None:
        fields["response_format"] = _format(body.text.format)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    with names.in_refusals():
        given = {name: value for name, value in fields.items() if value is not None}
        return read_chat(given, settings, ignored.named(names.of)), names


class Turns:
    """Chat messages, made of items: the thinking, the text and the calls of one turn are one message. places: for each
    message the field that it comes from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []

    def add(self, place: str, message: dict[str, Any]) -> None:
        """Appends a message."""
        self.messages.append(message)
        self.places.append(place)

    def take(self, place: str, item: Item) -> None:
        """Appends an item, to the assistant's message before it where it belongs there."""
        match item:
            case MessageItem(role="assistant"):
                message = self._open(place, ("content", "tool_calls"))
                message["content"] = _text(item.content)
            case MessageItem():
                self.add(place, {"role": item.role, "content": _text(item.content)})
            case FunctionCallItem():
                self._call(place, item.call_id, item.name, item.arguments)
            case CustomCallItem():
                self._call(place, item.call_id, item.name, call_arguments(item.input))
            case FunctionOutputItem() | CustomOutputItem():
                self.add(place, {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case ReasoningItem():
                if thought := "".join(part.text for part in item.content or item.summary or ()):
                    message = self._open(place, ("reasoning", "content", "tool_calls"))
                    message["reasoning"] = thought

    def _call(self, place: str, call_id: str, name: str, arguments: str) -> None:
        calls = self._open(place, ()).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _open(self, place: str, closed_by: Sequence[str]) -> dict[str, Any]:
        """The assistant's message that goes on, a new one if it has any of these fields."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(name in last for name in closed_by):
            self.add(place, {"role": "assistant"})
        return self.messages[-1]


def _text(content: str | Sequence[InputText | OutputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _logprob_fields(body: ResponsesBody) -> dict[str, Any]:
    """Log probabilities are asked for by include, or by a number of the best tokens."""
    if LOGPROBS not in (body.include or ()) and not body.top_logprobs:
        return {}
    return {"logprobs": True, "top_logprobs": body.top_logprobs}


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value


def _format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    given = {name: getattr(wanted, name) for name in ("name", "schema", "strict", "description")}
    return {"type": "json_schema", "json_schema": {name: one for name, one in given.items() if one is not None}}
