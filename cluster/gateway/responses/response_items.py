"""Items of a conversation in the Responses API: messages, calls of tools, their results, thinking; and their reading.

Clients send back the items of an answer, with null for what these have not, and with what other services add to theirs.
Thinking may come back as the opaque text that include ["reasoning.encrypted_content"] asks for: its own text, encoded
with a mark of the version. It is no secret: the same thinking is in the answer.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.ignored_fields import Ignorable, Ignorables, IgnoredFields, ignorable
from tandem.cluster.gateway.schemas.reading import ShortText, neutral_values, unsupported

SEAL = "tandem.thinking.1."
"""The beginning of thinking that was encoded by this service; the number is that of the form."""
Nothing = Annotated[list[Any], Meta(max_length=0)]
"""An empty list: what answers have there is taken out before."""
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="input_text"):
    """Text of a message, or of a tool's result."""

    text: str


class OutputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="output_text"):
    """Text of an earlier answer."""

    text: str
    annotations: Nothing | None = None
    logprobs: Nothing | None = None


class ReasoningText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="reasoning_text"):
    """Thinking of an earlier answer."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="summary_text"):
    """A summary by which another service shows its thinking."""

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


class CustomCallItem(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="custom_tool_call"
):
    """A call of a custom tool. input: free text."""

    call_id: ShortText
    name: ShortText
    input: str
    id: ShortText | None = None
    status: Status | None = None


class CustomOutputItem(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="custom_tool_call_output"
):
    """The result of a custom tool that was called."""

    call_id: ShortText
    output: str | list[InputText]
    id: ShortText | None = None
    status: Status | None = None


class ReasoningItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="reasoning"):
    """Thinking before an answer or a call."""

    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    id: ShortText | None = None
    status: Status | None = None


Item = MessageItem | FunctionCallItem | FunctionOutputItem | CustomCallItem | CustomOutputItem | ReasoningItem
ItemKind = type[Item]
KINDS: dict[str, ItemKind] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CustomOutputItem,
    "reasoning": ReasoningItem,
}
PART_KINDS = ("input_text", "output_text", "reasoning_text", "summary_text")
ECHOED: Ignorables = {
    "": ignorable("phase", "created_by", "caller", "provider_specific_fields", "cache_control"),
    "content[]": {
        **ignorable("logprobs", "cache_control", "prompt_cache_breakpoint", "provider_specific_fields"),
        "annotations": Ignorable(neutral_values([])),
    },
    "output[]": ignorable("cache_control", "prompt_cache_breakpoint", "provider_specific_fields"),
}
"""Fields that clients echo of an answer, and hints, by place in an item."""


def sealed(thought: str) -> str:
    """Thinking as the opaque text of an item."""
    return SEAL + base64.urlsafe_b64encode(thought.encode()).decode("ascii")


def opened(seal: str) -> str | None:
    """The thinking in such a text; None: it is another service's, or broken."""
    if not seal.startswith(SEAL):
        return None
    try:
        return base64.b64decode(seal[len(SEAL) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def plain_item(item: Any, place: str, ignored: IgnoredFields) -> Any:
    """An item without nulls and without what is ignored, and with its type. RequestRefused for a kind that is not
    served."""
    if not isinstance(item, dict):
        return item
    plain = {name: value for name, value in item.items() if value is not None}
    if "type" not in plain and "role" in plain:
        plain["type"] = "message"
    check_kind(plain, KINDS, place)
    if plain.get("type") == "function_call" and isinstance(given := plain.get("arguments", {}), dict):
        plain["arguments"] = msgspec.json.encode(given).decode()
    for name in ("content", "output", "summary"):
        if isinstance(parts := plain.get(name), list):
            plain[name] = [_plain_part(part, f"{place}.{name}[{j}]") for j, part in enumerate(parts)]
    ignored.take_from(plain, ECHOED, place)
    if isinstance(seal := plain.get("encrypted_content"), str) and plain.get("type") == "reasoning":
        del plain["encrypted_content"]
        _open(plain, seal, f"{place}.encrypted_content", ignored)
    return plain


def answered_items(output: Sequence[dict[str, Any]]) -> list[Item]:
    """The items of an answer of ours as a later request would send them."""
    unnamed = IgnoredFields()
    return msgspec.convert([plain_item(item, "output", unnamed) for item in output], list[Item])


def check_kind(value: dict[str, Any], kinds: Any, place: str) -> None:
    """RequestRefused for an object of another type than these."""
    kind = value.get("type")
    if isinstance(kind, str) and kind not in kinds:
        raise unsupported(place, f"{place}: the type {printable(kind)} is not supported.")


def _open(item: dict[str, Any], seal: str, place: str, ignored: IgnoredFields) -> None:
    """Puts sealed thinking into its item's content, unless that is there."""
    if item.get("content"):
        return
    if (thought := opened(seal)) is not None:
        item["content"] = [{"type": "reasoning_text", "text": thought}] if thought else []
    elif item.get("summary"):
        ignored.note(place, f"{place} is not of this service.")
    else:
        raise unsupported(place, f"{place} is not of this service, which cannot read the thinking in it.")


def _plain_part(part: Any, place: str) -> Any:
    if not isinstance(part, dict):
        return part
    check_kind(part, PART_KINDS, place)
    return {name: value for name, value in part.items() if value is not None}
