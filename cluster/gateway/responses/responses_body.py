"""The body of POST /v1/responses: what is honoured, ignored and named, or refused. One definition for parsing and
OpenAPI. Its items are in response_items.py, its tools in response_tools.py.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.responses.response_items import Item, plain_item
from tandem.cluster.gateway.responses.response_tools import AnyTool, Choice, take_hosted
from tandem.cluster.gateway.schemas import openai_hints
from tandem.cluster.gateway.schemas.generation_body import BadWord, StructuredOutputs
from tandem.cluster.gateway.schemas.ignored_fields import Ignorable, Ignorables, IgnoredFields, ignorable
from tandem.cluster.gateway.schemas.reading import (
    NEVER,
    Neutral,
    ShortText,
    invalid,
    neutral_values,
    read,
    unsupported,
)
from tandem.workers.messages.sampling_ranges import Count, Penalty, Seed, TokenId

MAX_METADATA = 16
LOGPROBS, THINKING = "message.output_text.logprobs", "reasoning.encrypted_content"
"""The values of `include` that add something to an answer here."""
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


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


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the thinking."""

    effort: str | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. The fields from `seed` on are vLLM's."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    model: ShortText | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    include: list[Include] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: ShortText | None = None
    metadata: dict[str, Annotated[str, Meta(max_length=512)]] | None = None
    user: ShortText | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[BadWord] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None


AS_IN_CHAT = ResponsesBody.__struct_fields__[ResponsesBody.__struct_fields__.index("seed") :]
"""Fields that mean what chat's mean, which checks their ranges."""
NEUTRAL: Mapping[str, Neutral] = {
    "stream_options": neutral_values({}),
    "conversation": NEVER,
    "moderation": NEVER,
    "prompt": NEVER,
    "chat_template": NEVER,
    "previous_input_messages": NEVER,
    "enable_response_messages": neutral_values(False),
}
"""Fields that are known but not served: accepted only with a value that asks for nothing. null is always absent."""
HINTS: Ignorables = {
    "": {
        **{name: one for name, one in openai_hints.HINTS.items() if name not in ResponsesBody.__struct_fields__},
        "context_management": Ignorable(neutral_values([])),
    },
    "stream_options": {**openai_hints.STREAM_OPTIONS, **ignorable("include_usage")},
    "text": {"verbosity": Ignorable(neutral_values("medium"))},
    "reasoning": ignorable("summary", "generate_summary"),
}
NESTED = ("text", "reasoning", "tool_choice", "tools", "stream_options")


def read_responses(fields: dict[str, Any], ignored: IgnoredFields) -> ResponsesBody:
    """A body; what it ignores is noted. RequestRefused naming the field at fault."""
    kept = {name: _without_nulls(value) if name in NESTED else value for name, value in fields.items()}
    ignored.take_from(kept, HINTS)
    if isinstance(kept.get("input"), list):
        kept["input"] = [plain_item(item, f"input[{i}]", ignored) for i, item in enumerate(kept["input"])]
    take_hosted(kept, ignored)
    body = read(kept, ResponsesBody, NEUTRAL)
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA or any(len(name) > 64 for name in metadata):
        raise invalid("metadata", f"metadata may have {MAX_METADATA} keys, of 64 characters each.")
    _check_format(body.text.format if body.text is not None else None)
    if body.background and body.store is False:
        raise invalid("background", "background needs a stored response: store may not be false.")
    if any(one not in (LOGPROBS, THINKING) for one in body.include or ()):
        ignored.note("include", f"include adds {LOGPROBS} and {THINKING} to an answer, nothing else.")
    if body.max_tool_calls is not None:
        ignored.note("max_tool_calls", "max_tool_calls counts tools that the service runs, and it runs none.")
    return body


def read_query(query: Iterable[tuple[str, str]], known: Container[str], ignored: IgnoredFields) -> dict[str, str]:
    """The parameters of a query for a stored response. What would add something to it is noted: it is shown as it was
    made. RequestRefused for parameters that are not known, and for values of include that nobody knows."""
    kept = {}
    for name, value in query:
        if name.partition("[")[0] == "include":
            for one in filter(None, value.split(",")):
                if one not in get_args(Include):
                    raise invalid("include", f"include: {printable(one)} is not one of {', '.join(get_args(Include))}.")
                ignored.note("include", "include adds nothing to a stored response.")
        elif name == "include_obfuscation" and value in ("true", "false"):
            if value == "true":
                ignored.note(name)
        elif name not in known:
            raise unsupported(name, f"The query parameter {printable(name)} is not supported.")
        else:
            kept[name] = value
    return kept


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
