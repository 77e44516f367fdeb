"""Bodies with a conversation: chat completions', which other APIs' bodies are translated to, and tokenize's."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.generation_body import CommonBody, StreamOptions, check_common
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.openai_hints import CHAT_HINTS, take_hints
from tandem.cluster.gateway.schemas.reading import ShortText, check_limit, invalid, read, unsupported
from tandem.cluster.gateway.schemas.tool_fields import FunctionTool, ReasoningEffort, ToolChoice
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.sampling_ranges import Count


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that an earlier assistant turn made. arguments: JSON text, or the object itself; clients echo null and ""
    for none."""

    name: ShortText
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call of an earlier assistant turn."""

    id: ShortText
    function: FunctionCall
    type: Literal["function"] | None = None


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a message's content. Only text is served."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of a conversation. reasoning, reasoning_content: an assistant's thinking, under either name."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: ShortText | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: ShortText | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class RouterReasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenRouter's settings of the thinking: effort, max_tokens and exclude are reasoning_effort,
    thinking_token_budget and include_reasoning false. enabled: true is some effort, false none."""

    effort: ReasoningEffort | None = None
    max_tokens: Count | None = None
    exclude: bool | None = None
    enabled: bool | None = None


class RouterUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenRouter's usage. include: in a stream as stream_options.include_usage."""

    include: bool | None = None


class ChatBody(CommonBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning: RouterReasoning | None = None
    usage: RouterUsage | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: `prompt` or `messages`."""

    model: ShortText | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[FunctionTool] | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


def read_chat(fields: dict[str, Any], settings: GatewaySettings, ignored: IgnoredFields) -> ChatBody:
    """A chat body. Takes what is ignored out of the fields. RequestRefused naming the field at fault."""
    if isinstance(messages := fields.get("messages"), list):
        check_limit("messages", len(messages), settings.max_messages)
    _check_kinds_of_tools(fields)
    take_hints(fields, CHAT_HINTS, ignored)
    check_parts(fields.get("messages"))
    body = check_common(_without_router_words(read(fields, ChatBody)), settings, ignored)
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs true.")
        check_limit("top_logprobs", body.top_logprobs, settings.max_logprobs)
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("continue_final_message", "It excludes add_generation_prompt.")
    return body


def _without_router_words(body: ChatBody) -> ChatBody:
    """Returns the body with OpenAI's and vLLM's fields in place of OpenRouter's."""
    more: dict[str, Any] = {"reasoning": None, "usage": None}
    if (given := body.reasoning) is not None:
        effort = "none" if given.enabled is False else given.effort or ("medium" if given.enabled else None)
        words = {
            "reasoning_effort": effort,
            "thinking_token_budget": given.max_tokens,
            "include_reasoning": False if given.exclude else None,
        }
        more |= {name: value for name, value in words.items() if value is not None}
        if twice := [name for name in more if getattr(body, name) is not None and name in words]:
            raise invalid("reasoning", f"reasoning and {twice[0]} exclude each other.")
    if body.usage is not None and body.usage.include and body.stream and body.stream_options is None:
        more["stream_options"] = StreamOptions(include_usage=True)
    return body if body.reasoning is None and body.usage is None else msgspec.structs.replace(body, **more)


def check_parts(messages: Any) -> None:
    """Content parts other than text are refused by name, before types are checked."""
    if not isinstance(messages, list):
        return
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise unsupported(
                    f"messages[{i}].content[{j}]",
                    f'Content of type {printable(kind)} is not supported, only "text" is.',
                )


def _check_kinds_of_tools(fields: dict[str, Any]) -> None:
    """Kinds of tools and of choices that are not served are refused by name, before types are checked."""
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    kinds = [(f"tools[{i}].type", tool) for i, tool in enumerate(tools if isinstance(tools, list) else ())]
    for param, value in (*kinds, ("tool_choice.type", choice)):
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise unsupported(param, f'{param}: {printable(kind)} is not supported, only "function" is.')
