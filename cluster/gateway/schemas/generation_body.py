"""The fields of bodies that text is generated from, which chat and completions share, and their limits.

What needs the tokenizer or the model (lengths, defaults, vocabulary) is serving/'s. Ranges of sampling parameters are
those of LLM (workers/messages/sampling_ranges.py).
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.openai_hints import GENERATION_HINTS, take_hints
from tandem.cluster.gateway.schemas.reading import ShortText, check_limit, invalid, read, unsupported
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.sampling_ranges import (
    Bias,
    Count,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TokenId,
    TopK,
    TopP,
    Whole,
)

MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: a last chunk with the bill and no choices. continuous_usage_stats: the counts of a chunk's choice
    in every chunk; it implies include_usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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
    prompt_logprobs: Whole | None = None
    min_tokens: Whole | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    n: Count | None = None
    best_of: Count | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Bias] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
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


Body = TypeVar("Body", bound=CommonBody)


class CompletionBody(CommonBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt`: text, texts, token ids, or lists of token ids. max_tokens: 0 with echo only."""

    prompt: str | list[str | int | list[TokenId]]
    max_tokens: Whole | None = None
    logprobs: Whole | None = None
    echo: bool | None = None


def read_completion(fields: dict[str, Any], settings: GatewaySettings, ignored: IgnoredFields) -> CompletionBody:
    """A completions body. Takes what is ignored out of the fields. RequestRefused naming the field at fault."""
    take_hints(fields, GENERATION_HINTS, ignored)
    body = check_common(read(fields, CompletionBody), settings, ignored)
    check_prompt(body.prompt, settings, "prompt")
    if body.logprobs is not None:
        check_limit("logprobs", body.logprobs, settings.max_logprobs)
        if body.echo and body.stream:
            raise unsupported("logprobs", "logprobs together with echo cannot be streamed.")
        if body.echo and body.prompt_logprobs is not None and body.prompt_logprobs != body.logprobs:
            raise invalid("prompt_logprobs", "With echo and logprobs it may only be equal to logprobs.")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "max_tokens may be 0 only with echo true.")
    return body


def check_common(body: Body, settings: GatewaySettings, ignored: IgnoredFields) -> Body:
    """Checks the fields that all bodies share. Returns the body without what is ignored beside its other fields.
    RequestRefused naming the field at fault."""
    check_limit("n", body.n or 1, settings.max_choices)
    check_limit("best_of", body.best_of or 1, settings.max_choices)
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise invalid("best_of", "best_of must not be less than n.")
    if body.best_of is not None and body.best_of > (body.n or 1) and body.stream:
        raise unsupported("best_of", "best_of above n cannot be streamed.")
    options = body.stream_options or StreamOptions()
    if options.continuous_usage_stats and options.include_usage is False:
        raise invalid("stream_options.continuous_usage_stats", "It excludes include_usage false.")
    if body.prompt_logprobs is not None:
        check_limit("prompt_logprobs", body.prompt_logprobs, settings.max_logprobs)
        if body.stream:
            raise unsupported("prompt_logprobs", "prompt_logprobs cannot be streamed.")
    check_limit("logit_bias", len(body.logit_bias or ()), settings.max_logit_bias)
    if body.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens: 0 must be -1 or at least 1.")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    check_limit("stop", len(stops), settings.max_stop_strings)
    for stop in stops:
        if not 1 <= len(stop) <= settings.max_stop_chars:
            raise invalid("stop", f"Each stop string must have 1 to {settings.max_stop_chars} characters.")
    if settings.enable_force_include_usage and body.stream:
        return msgspec.structs.replace(
            _without_idle(body, ignored), stream_options=msgspec.structs.replace(options, include_usage=True)
        )
    return _without_idle(body, ignored)


def _without_idle(body: Body, ignored: IgnoredFields) -> Body:
    """Returns the body without options of streams where nothing is streamed, and of beams where there are none."""
    if body.stream_options not in (None, StreamOptions()) and not body.stream:
        ignored.note("stream_options", "stream_options needs stream true.")
        body = msgspec.structs.replace(body, stream_options=None)
    if body.length_penalty not in (None, 1) and not body.use_beam_search:
        ignored.note("length_penalty", "length_penalty needs use_beam_search true.")
        body = msgspec.structs.replace(body, length_penalty=None)
    return body


def check_prompt(prompt: str | list[str | int | list[int]], settings: GatewaySettings, param: str) -> None:
    """A list holds one kind only: texts, ids, or lists of ids. param: the field's name."""
    if isinstance(prompt, str):
        return
    if not prompt:
        raise invalid(param, f"{param} is empty: it must hold at least one text or token.")
    if len({type(item) for item in prompt}) != 1:
        raise invalid(param, f"A list of {param}s must hold only texts, only token ids, or only lists of token ids.")
    if not isinstance(prompt[0], int):
        check_limit(param, len(prompt), settings.max_messages)
        if any(item == [] for item in prompt):
            raise invalid(param, f"Each {param} must hold at least one token.")
