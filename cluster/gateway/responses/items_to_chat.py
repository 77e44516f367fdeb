"""Translates items to the chat body that says the same, which read_chat() checks."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.cluster.gateway.conversation.field_names import FieldNames
from tandem.cluster.gateway.responses.responses_body import (
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ResponsesBody,
    ResponseTool,
    TextFormat,
)
from tandem.cluster.gateway.schemas.chat_body import ChatBody, read_chat
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.configs.schema import GatewaySettings

FIELDS = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}
"""The body's names of chat fields whose names differ."""


def given_items(body: ResponsesBody) -> list[Item]:
    """The items of a body's own input."""
    return [MessageItem("user", body.input)] if isinstance(body.input, str) else list(body.input)


def chat_of(
    body: ResponsesBody, before: Sequence[Item], settings: GatewaySettings, ignored: IgnoredFields
) -> tuple[ChatBody, FieldNames]:
    """The chat body, and the client's names of its fields. before: the items of the conversation that goes on.
    RequestRefused naming the client's field at fault."""
    turns = Turns()
    if body.instructions is not None:
        turns.add("instructions", {"role": "system", "content": body.instructions})
    for item in before:
        turns.take("previous_response_id", item)
    for i, item in enumerate(given_items(body)):
        turns.take("input" if isinstance(body.input, str) else f"input[{i}]", item)
    names = FieldNames(FIELDS, "input", "max_output_tokens", turns.places)
    fields: dict[str, Any] = {
        "messages": turns.messages,
        "model": body.model,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "tool_choice": _choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "user": body.user,
        "stream": body.stream,
        "stream_options": {"include_usage": True} if body.stream else None,
    }
    if body.text is not None:
        fields["verbosity"] = body.text.verbosity
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
                call = {"name": item.name, "arguments": item.arguments}
                calls = self._open(place, ()).setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": call})
            case FunctionOutputItem():
                self.add(place, {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case ReasoningItem():
                if thought := "".join(part.text for part in item.content or ()):
                    message = self._open(place, ("reasoning", "content", "tool_calls"))
                    message["reasoning"] = thought

    def _open(self, place: str, closed_by: Sequence[str]) -> dict[str, Any]:
        """The assistant's message that goes on, a new one if it has any of these fields."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(name in last for name in closed_by):
            self.add(place, {"role": "assistant"})
        return self.messages[-1]


def _text(content: str | Sequence[InputText | OutputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool(tool: ResponseTool) -> dict[str, Any]:
    function = msgspec.to_builtins(tool)
    return {"type": function.pop("type"), "function": function}


def _choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice.name}}


def _format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    given = {name: getattr(wanted, name) for name in ("name", "schema", "strict", "description")}
    return {"type": "json_schema", "json_schema": {name: one for name, one in given.items() if one is not None}}
