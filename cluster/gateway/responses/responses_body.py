"""The body of POST /v1/responses: what is honoured, neutral, or refused. One definition for parsing and OpenAPI.

Items are those of a conversation: messages, calls of functions, their results, thinking. Clients send back the items of
an answer, with null for what these have not.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.reading import (
    NEVER,
    Count,
    Neutral,
    ShortText,
    invalid,
    neutral_kind,
    neutral_values,
    read,
    unsupported,
)

MAX_METADATA = 16
Nothing = Annotated[list[Any], Meta(max_length=0)]
"""An empty list: answers of other services may fill it, ours do not."""
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="input_text"):
    """Text of a message, or of a function's result."""

    text: str


class OutputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="output_text"):
    """Text of an earlier answer."""

    text: str
    annotations: Nothing | None = None
    logprobs: Nothing | None = None


class ReasoningText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="reasoning_text"):
    """Thinking of an earlier answer."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="message"):
    """A message. Its `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    id: ShortText | None = None
    status: Status | None = None


class FunctionCallItem(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="function_call"
):
    """A call that the model has made. arguments: JSON text."""

    call_id: ShortText
    name: ShortText
    arguments: str
    id: ShortText | None = None
    status: Status | None = None


class FunctionOutputItem(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="function_call_output"
):
    """The result of a function that was called."""

    call_id: ShortText
    output: str | list[InputText]
    id: ShortText | None = None
    status: Status | None = None


class ReasoningItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="reasoning"):
    """Thinking before an answer or a call."""

    summary: Nothing | None = None
    content: list[ReasoningText] | None = None
    id: ShortText | None = None
    status: Status | None = None


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


class ResponseTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call. parameters: JSON schema of its arguments."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The form of the answer's text. name, schema, strict, description: of json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the thinking. summary, generate_summary: no summaries are made, the thinking is there in full."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    model: ShortText | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: ShortText | None = None
    metadata: dict[str, Annotated[str, Meta(max_length=512)]] | None = None
    user: ShortText | None = None


NEUTRAL: Mapping[str, Neutral] = {
    "background": neutral_values(False),
    "truncation": neutral_values("disabled"),
    "include": neutral_values([]),
    "top_logprobs": neutral_values(0),
    "service_tier": neutral_values("auto", "default"),
    "stream_options": neutral_values({}, {"include_obfuscation": False}),
    "safety_identifier": neutral_kind(str, "a string"),
    "prompt_cache_key": neutral_kind(str, "a string"),
    "prompt_cache_retention": neutral_values("in_memory"),
    "context_management": neutral_values([]),
    "conversation": NEVER,
    "max_tool_calls": NEVER,
    "moderation": NEVER,
    "prompt": NEVER,
    "prompt_cache_options": NEVER,
}
"""Fields that are known but not served: accepted only with a value that asks for nothing. null is always absent."""

ITEM_KINDS = ("message", "function_call", "function_call_output", "reasoning")
PART_KINDS = ("input_text", "output_text", "reasoning_text", "summary_text")


def read_responses(fields: dict[str, Any]) -> ResponsesBody:
    """A body. RequestRefused naming the field at fault."""
    kept = {name: _without_nulls(value) if name in NESTED else value for name, value in fields.items()}
    if isinstance(kept.get("input"), list):
        kept["input"] = [_plain_item(item, f"input[{i}]") for i, item in enumerate(kept["input"])]
    _check_tools(kept)
    _check_summary(kept.get("reasoning"))
    body = read(kept, ResponsesBody, NEUTRAL)
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA or any(len(name) > 64 for name in metadata):
        raise invalid("metadata", f"metadata may have {MAX_METADATA} keys, of 64 characters each.")
    _check_format(body.text.format if body.text is not None else None)
    return body


NESTED = ("text", "reasoning", "tool_choice", "tools")


def _without_nulls(value: Any) -> Any:
    """null is absent, in the objects of these fields too; what is inside them is not ours."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if one is not None}
        if isinstance(kept.get("format"), dict):
            kept["format"] = _without_nulls(kept["format"])
        return kept
    return value


def _plain_item(item: Any, place: str) -> Any:
    """An item without nulls, and with its type. RequestRefused for a kind that is not served."""
    if not isinstance(item, dict):
        return item
    plain = {name: value for name, value in item.items() if value is not None}
    if "type" not in plain and "role" in plain:
        plain["type"] = "message"
    _check_kind(plain, ITEM_KINDS, place)
    if plain.get("encrypted_content") is not None:
        raise unsupported(f"{place}.encrypted_content", "Encrypted thinking is not supported.")
    for name in ("content", "output", "summary"):
        if isinstance(parts := plain.get(name), list):
            plain[name] = [_plain_part(part, f"{place}.{name}[{j}]") for j, part in enumerate(parts)]
    return plain


def _plain_part(part: Any, place: str) -> Any:
    if not isinstance(part, dict):
        return part
    _check_kind(part, PART_KINDS, place)
    return {name: value for name, value in part.items() if value is not None}


def _check_kind(value: dict[str, Any], kinds: tuple[str, ...], place: str) -> None:
    kind = value.get("type")
    if isinstance(kind, str) and kind not in kinds:
        raise unsupported(place, f"{place}: the type {printable(kind)} is not supported.")


def _check_tools(fields: dict[str, Any]) -> None:
    """Tools that a service would run itself, and choices among them, are refused by name."""
    tools = fields.get("tools")
    choice = fields.get("tool_choice")
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict):
            _check_kind(tool, ("function",), f"tools[{i}]")
    if isinstance(choice, dict):
        _check_kind(choice, ("function",), "tool_choice")


def _check_summary(reasoning: Any) -> None:
    for name in ("summary", "generate_summary"):
        given = reasoning.get(name) if isinstance(reasoning, dict) else None
        if given in ("concise", "detailed"):
            raise unsupported(
                f"reasoning.{name}", f'reasoning.{name} may only be "auto": the thinking is shown in full.'
            )


def _check_format(wanted: TextFormat | None) -> None:
    if wanted is None:
        return
    if wanted.type == "json_schema":
        for name in ("name", "schema"):
            if getattr(wanted, name) is None:
                raise invalid(f"text.format.{name}", f"The field text.format.{name} is required.")
    else:
        for name in ("name", "schema", "strict", "description"):
            if getattr(wanted, name) is not None:
                raise invalid(f"text.format.{name}", f"text.format.{name} needs type json_schema.")
