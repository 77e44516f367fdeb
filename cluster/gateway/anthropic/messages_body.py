"""The bodies of POST /v1/messages and /v1/messages/count_tokens: what is honoured, neutral, or refused by name. One
definition for parsing and OpenAPI."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.cluster.gateway.anthropic.messages_hints import COUNT_HINTS, HINTS
from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.reading import (
    NEVER,
    Neutral,
    ShortText,
    invalid,
    neutral_values,
    read,
    unsupported,
)
from tandem.workers.messages.sampling_ranges import Count


class TextBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    """Text of a message, of the system's or of a tool's result."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="thinking"):
    """Thinking of an earlier answer. signature: anything; ours is empty."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tool_use"):
    """A call that the model has made. input: its arguments; who gathers a stream sends them as JSON text too, and null
    or "" for none."""

    id: ShortText
    name: ShortText
    input: dict[str, Any] | str | None = None


class ToolResultBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tool_result"):
    """The result of a tool that was called. is_error: the model is told that it failed."""

    tool_use_id: ShortText
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


InputBlock = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class CustomTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the client runs. input_schema: JSON schema of its arguments."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The choice of tools: none, any, or one. name: of type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The switch for thinking. adaptive: as it does by itself. budget_tokens: of type enabled, at most so many.
    display: omitted leaves it out of the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class MessagesMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """About the request. user_id: the client's name for its user."""

    user_id: ShortText | None = None


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer is JSON that fits a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """effort: of the thinking. format: of the answer's text."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: ShortText | None = None
    system: str | list[TextBlock] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountTokensBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: MessagesMetadata | None = None
    stream: bool | None = None


NEUTRAL: Mapping[str, Neutral] = {"mcp_servers": neutral_values([]), "container": NEVER}
"""Fields that are known but not served, and might change the answer: accepted only with a value that asks for nothing.
null is always absent."""
NEUTRAL_IN_COUNTS: Mapping[str, Neutral] = {"mcp_servers": NEUTRAL["mcp_servers"]}
ANTHROPICS = re.compile(
    r"(bash|code_execution|computer|memory|text_editor|tool_search_tool_(?:bm25|regex)|web_fetch|web_search)(_[0-9]{8})?"
)
"""Kinds of tools that only Anthropic's models know, whoever runs them, each with the date of its version."""
SERVERS = re.compile(
    r"(server|mcp)_tool_use|(mcp|web_search|web_fetch|tool_search|((bash|text_editor)_)?code_execution)_tool_result"
)
"""Kinds of blocks about what Anthropic's servers did for an earlier answer, which clients echo."""
BLOCK_KINDS = ("text", "thinking", "tool_use", "tool_result")


def read_messages(fields: dict[str, Any], ignored: IgnoredFields) -> MessagesBody:
    """A body of /v1/messages. RequestRefused naming the field at fault."""
    ignored.take_from(fields, HINTS)
    body = read(_plain(fields, ignored), MessagesBody, NEUTRAL)
    _check(body)
    budget = body.thinking.budget_tokens if body.thinking is not None else None
    if budget is not None and budget >= body.max_tokens:
        raise invalid("thinking.budget_tokens", "thinking.budget_tokens must be less than max_tokens.")
    return body


def read_count_tokens(fields: dict[str, Any], ignored: IgnoredFields) -> CountTokensBody:
    """A body of /v1/messages/count_tokens. RequestRefused naming the field at fault."""
    ignored.take_from(fields, COUNT_HINTS)
    body = read(_plain(fields, ignored), CountTokensBody, NEUTRAL_IN_COUNTS)
    _check(body)
    return body


def _leave_out_anthropics(fields: dict[str, Any], ignored: IgnoredFields) -> None:
    """Takes tools without a schema out of a body, which is changed, and notes them: agents send them unasked, and a
    model that is not shown them cannot call them. RequestRefused for a choice that needs one."""
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    if not isinstance(tools, list):
        return
    kept, names = [], []
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str) or (found := ANTHROPICS.fullmatch(kind)) is None:
            kept.append(tool)
            continue
        ignored.leave_out(i, kind, found[1])
        names.append(tool.get("name", found[1]))
    if not names:
        return
    wanted = choice if isinstance(choice, dict) else {}
    if wanted.get("type") == "tool" and wanted.get("name") in names:
        text = f"tool_choice.name: this model is not shown {printable(str(wanted['name']))}, a tool of Anthropic's."
        raise unsupported("tool_choice.name", text)
    if wanted.get("type") == "any" and not kept:
        raise unsupported("tool_choice", "tool_choice: all tools are Anthropic's, none of which this model is shown.")
    fields["tools"] = kept
    if not kept:
        fields["tool_choice"] = None


def _check(body: CountTokensBody) -> None:
    choice, thinking = body.tool_choice, body.thinking
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise invalid("tool_choice.name", "tool_choice.name belongs to tool_choice.type tool, and only there.")
    if thinking is not None and (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        name = "thinking.budget_tokens"
        raise invalid(name, f"{name} belongs to thinking.type enabled, and only there.")


def _plain(fields: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
    """Drops nulls of blocks and tools. Kinds that are not served are refused by name, before types are checked."""
    _leave_out_anthropics(kept := dict(fields), ignored)
    if isinstance(tools := kept.get("tools"), list):
        kept["tools"] = [_checked(tool, ("custom",), f"tools[{i}]") for i, tool in enumerate(tools)]
    if isinstance(system := kept.get("system"), list):
        kept["system"] = list(_blocks(system, "system", ("text",)))
    if isinstance(messages := kept.get("messages"), list):
        kept["messages"] = [_plain_message(message, f"messages[{i}]", ignored) for i, message in enumerate(messages)]
    return kept


def _plain_message(message: Any, place: str, ignored: IgnoredFields) -> Any:
    if not isinstance(message, dict) or not isinstance(content := message.get("content"), list):
        return message
    if message.get("role") == "assistant":
        content = [ignored.without(block, SERVERS, f"{place}.content[{j}]") for j, block in enumerate(content)]
    return {**message, "content": list(_blocks(content, f"{place}.content", BLOCK_KINDS))}


def _blocks(blocks: list[Any], place: str, kinds: tuple[str, ...]) -> Iterator[Any]:
    for j, block in enumerate(blocks):
        plain = _checked(block, kinds, f"{place}[{j}]")
        inner = plain.get("content") if isinstance(plain, dict) else None
        if isinstance(inner, list):
            plain["content"] = list(_blocks(inner, f"{place}[{j}].content", ("text",)))
        yield plain


def _checked(value: Any, kinds: tuple[str, ...], place: str) -> Any:
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if isinstance(kind, str) and kind not in kinds:
        raise unsupported(place, f"{place}: the type {printable(kind)} is not supported, only {', '.join(kinds)}.")
    return {name: one for name, one in value.items() if one is not None}
