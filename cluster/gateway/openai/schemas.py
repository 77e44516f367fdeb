"""The request bodies: what is honoured, neutral, or refused by name. One definition for parsing and OpenAPI.

`read_*` turn a JSON object into a frozen body whose types and ranges hold; caps that settings configure are checked
too. What needs the tokenizer or the model (lengths, defaults, vocabulary) is prompts.py's and sampling_fields.py's.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.openai.allowed_values import allowed_values, given_value
from tandem.cluster.gateway.openai.fields.tool_fields import FunctionTool, ReasoningEffort, ToolChoice
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import RequestRefused

SEED_LIMIT = 2**63
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
Count = Annotated[int, Meta(ge=1, lt=2**31)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Seed = Annotated[int, Meta(ge=-SEED_LIMIT, le=SEED_LIMIT - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
ShortText = Annotated[str, Meta(max_length=1024)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: a last chunk with the bill and no choices. continuous_usage_stats: the counts of a chunk's choice
    in every chunk; it implies include_usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that an earlier assistant turn made; `arguments` is JSON text."""

    name: ShortText
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call of an earlier assistant turn."""

    id: ShortText
    function: FunctionCall
    type: Literal["function"] = "function"


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


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The schema of response_format. The text follows it whether strict is true or not. name, description: for models
    that are shown them; here they are only checked."""

    name: ShortText | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class ResponseFormatField(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer's text. json_schema: for that type; structures, triggers: for structural_tag, as in
    vLLM."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Any = None
    triggers: Any = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's form of the answer's text: one of json, regex, choice, grammar, json_object, structural_tag, and what may
    stand between the parts of JSON."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class CommonBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that chat and completions share. None: absent from the body."""

    model: ShortText | None = None
    max_tokens: Count | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    add_special_tokens: bool | None = None
    user: ShortText | None = None
    response_format: ResponseFormatField | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Literal["auto", "guidance", "llguidance"] | None = None


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
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(CommonBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt`: text, texts, token ids, or lists of token ids. max_tokens: 0 with echo only."""

    prompt: str | list[str | int | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None


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
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: ShortText | None = None
    tokens: list[TokenId]


Body = TypeVar("Body", bound=msgspec.Struct)


class Neutral(NamedTuple):
    """The values that a field that is not served may have. `words`: their names; "" when there are none."""

    accepts: Callable[[Any], bool]
    words: str


def neutral_values(*values: Any) -> Neutral:
    """These values only."""
    words = " or ".join(json.dumps(value) for value in values)
    return Neutral(lambda given: any(given == value and type(given) is type(value) for value in values), words)


def neutral_kind(kind: type, words: str) -> Neutral:
    """All values of a type."""
    return Neutral(lambda given: isinstance(given, kind), words)


NEVER = Neutral(lambda given: False, "")
NEUTRAL: Mapping[str, Neutral] = {
    "store": neutral_values(False),
    "metadata": neutral_kind(dict, "an object"),
    "parallel_tool_calls": neutral_kind(bool, "true or false"),
    "service_tier": neutral_values("auto", "default"),
    "modalities": neutral_values(["text"]),
    "functions": neutral_values([]),
    "function_call": neutral_values("none"),
    "suffix": neutral_values(""),
    "audio": NEVER,
    "prediction": NEVER,
    "reasoning_effort": neutral_values("none"),
    "verbosity": neutral_values("medium"),
    "web_search_options": NEVER,
    "chat_template": NEVER,
    "chat_template_kwargs": neutral_values({}),
    "documents": neutral_values([]),
    "logits_processors": neutral_values([]),
    "safety_identifier": neutral_kind(str, "a string"),
    "prompt_cache_key": neutral_kind(str, "a string"),
    "echo": neutral_values(False),
    "spaces_between_special_tokens": neutral_values(True),
}
"""Fields that are known but not served: accepted only with a value that asks for nothing. null is always absent."""

NEUTRAL_IN_MESSAGES: Mapping[str, Neutral] = {
    "refusal": NEVER,
    "annotations": neutral_values([]),
    "audio": NEVER,
    "function_call": NEVER,
}
"""The same for fields of a message: clients send back an answer's whole message, with null for what it has not."""

_PATH = re.compile(r" - at `\$(.*)`$")
_KEY_PATH = re.compile(r" - at `key` in `\$(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")


def read_chat(fields: dict[str, Any], settings: GatewaySettings) -> ChatBody:
    """A chat body. RequestRefused naming the field at fault."""
    _check_kinds_of_tools(fields)
    _check_parts(fields.get("messages"))
    body = read(fields, ChatBody)
    _check_common(body, settings)
    _cap("messages", len(body.messages), settings.max_messages)
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs true.")
        _cap("top_logprobs", body.top_logprobs, settings.max_logprobs)
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("continue_final_message", "It excludes add_generation_prompt.")
    return body


def read_completion(fields: dict[str, Any], settings: GatewaySettings) -> CompletionBody:
    """A completions body. RequestRefused naming the field at fault."""
    body = read(fields, CompletionBody)
    _check_common(body, settings)
    check_prompt(body.prompt, settings, "prompt")
    if body.logprobs is not None:
        _cap("logprobs", body.logprobs, settings.max_logprobs)
        if body.echo and body.stream:
            raise unsupported("logprobs", "logprobs together with echo cannot be streamed.")
        if body.echo and body.prompt_logprobs is not None and body.prompt_logprobs != body.logprobs:
            raise invalid("prompt_logprobs", "With echo and logprobs it may only be equal to logprobs.")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "max_tokens may be 0 only with echo true.")
    return body


def read(fields: dict[str, Any], body_type: type[Body], neutral: Mapping[str, Neutral] = NEUTRAL) -> Body:
    """Drops null and neutral fields, refuses unknown and unsupported ones by name, checks types and ranges."""
    known = set(body_type.__struct_fields__)
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None:
            if name not in known and name not in neutral:
                raise unsupported(name, f"The field {printable(name)} is unknown.")
        elif name in known:
            kept[name] = value
        elif name not in neutral:
            raise unsupported(name, f"The field {printable(name)} is unknown.")
        elif not neutral[name].accepts(value):
            raise unsupported(name, not_neutral(name, neutral[name].words))
    if neutral is NEUTRAL and isinstance(kept.get("messages"), list):
        kept["messages"] = [_plain_message(i, message) for i, message in enumerate(kept["messages"])]
    try:
        return msgspec.convert(kept, body_type)
    except msgspec.ValidationError as error:
        raise _refused(str(error), body_type, kept) from None


def _plain_message(index: int, message: Any) -> Any:
    """A message without its neutral fields. RequestRefused for one that asks for something."""
    if not isinstance(message, dict) or not (found := NEUTRAL_IN_MESSAGES.keys() & message.keys()):
        return message
    for name in sorted(found):
        if message[name] is not None and not NEUTRAL_IN_MESSAGES[name].accepts(message[name]):
            raise unsupported(f"messages[{index}].{name}", not_neutral(name, NEUTRAL_IN_MESSAGES[name].words))
    return {name: value for name, value in message.items() if name not in found}


def unsupported(param: str, message: str) -> RequestRefused:
    """400 for what exists elsewhere but not here."""
    return RequestRefused(message, code="unsupported_parameter", param=param[:128])


def invalid(param: str | None, message: str) -> RequestRefused:
    """400 for a value out of range or of a wrong kind."""
    return RequestRefused(message, code="invalid_value", param=param)


def not_neutral(name: str, words: str) -> str:
    """Says that a field has a value that is not served. words: of its Neutral."""
    if not words:
        return f"The field {name} is not supported."
    return f"The field {name} is not supported with this value; it may be {words}."


def _refused(problem: str, body_type: type[msgspec.Struct], fields: Mapping[str, Any]) -> RequestRefused:
    """msgspec's message, with the path in the body as `param`; for an enumerated field, its values.
    fields: the body."""
    where = _PATH.search(problem) or _KEY_PATH.search(problem)
    path = where[1].lstrip(".") if where is not None else ""
    text = problem[: where.start()] if where is not None else problem
    if (unknown := _UNKNOWN.match(text)) is not None:
        name = f"{path}.{unknown[1]}" if path else unknown[1]
        return unsupported(name, f"The field {printable(name)} is unknown.")
    if (missing := _MISSING.match(text)) is not None:
        name = f"{path}.{missing[1]}" if path else missing[1]
        values = allowed_values(body_type, name)
        return invalid(name, f"The field {name} is required{f': {_one_of(values)}' if values else ''}.")
    given = f", not {value}" if (value := given_value(fields, path)) is not None else ""
    if values := allowed_values(body_type, path):
        return invalid(path[:128], f"{path} must be {_one_of(values)}{given}.")
    return invalid(path[:128] or None, f"{path or 'body'}: {text}{'' if 'got `' in text else given}.")


def _one_of(values: Sequence[Any]) -> str:
    """'"text"', or 'one of "system", "user"'."""
    return f"{'one of ' if len(values) > 1 else ''}{', '.join(json.dumps(value) for value in values)}"


def _check_parts(messages: Any) -> None:
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


def _check_common(body: CommonBody, settings: GatewaySettings) -> None:
    _cap("n", body.n or 1, settings.max_choices)
    _cap("best_of", body.best_of or 1, settings.max_choices)
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise invalid("best_of", "best_of must not be less than n.")
    if body.best_of is not None and body.best_of > (body.n or 1) and body.stream:
        raise unsupported("best_of", "best_of above n cannot be streamed.")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream true.")
    options = body.stream_options or StreamOptions()
    if options.continuous_usage_stats and options.include_usage is False:
        raise invalid("stream_options.continuous_usage_stats", "It excludes include_usage false.")
    if body.prompt_logprobs is not None:
        _cap("prompt_logprobs", body.prompt_logprobs, settings.max_logprobs)
        if body.stream:
            raise unsupported("prompt_logprobs", "prompt_logprobs cannot be streamed.")
    _cap("logit_bias", len(body.logit_bias or ()), settings.max_logit_bias)
    if body.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens: 0 must be -1 or at least 1.")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    _cap("stop", len(stops), settings.max_stop_strings)
    for stop in stops:
        if not 1 <= len(stop) <= settings.max_stop_chars:
            raise invalid("stop", f"Each stop string must have 1 to {settings.max_stop_chars} characters.")


def check_prompt(prompt: str | list[str | int | list[int]], settings: GatewaySettings, param: str) -> None:
    """A list holds one kind only: texts, ids, or lists of ids. param: the field's name."""
    if isinstance(prompt, str):
        return
    if not prompt:
        raise invalid(param, f"{param} is empty: it must hold at least one text or token.")
    if len({type(item) for item in prompt}) != 1:
        raise invalid(param, f"A list of {param}s must hold only texts, only token ids, or only lists of token ids.")
    if not isinstance(prompt[0], int):
        _cap(param, len(prompt), settings.max_messages)
        if any(item == [] for item in prompt):
            raise invalid(param, f"Each {param} must hold at least one token.")


def _cap(param: str, value: int, most: int) -> None:
    if value > most:
        raise invalid(param, f"{param}: {value} exceeds the limit of {most}.")
