"""POST /v1/completions, /tokenize, /detokenize: from a checked body to an answer; and what other routes share.

Everything that can be refused is refused here, before the request reaches a group.
"""

import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.generation.beam_generation import BeamGeneration
from tandem.cluster.gateway.generation.delivery import GenerationResponse, TextResponse
from tandem.cluster.gateway.generation.generation import Generation
from tandem.cluster.gateway.generation.generations import Generations
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.generation.response_format import ResponseFormat
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import parse_object, read_body
from tandem.cluster.gateway.openai.answers import AnswerHead, ChunkCounts, CompletionFormat, Metrics
from tandem.cluster.gateway.openai.fields.grammar_fields import grammar_size, requested_grammar, structured_field
from tandem.cluster.gateway.openai.model_lookup import Served, served_model
from tandem.cluster.gateway.openai.prompts import (
    Asked,
    Prompt,
    check_choices,
    check_ids_fit,
    check_token_count,
    completion_prompts,
    fit,
    text_prompt,
)
from tandem.cluster.gateway.openai.sampling_fields import checked_beams, sampling_params
from tandem.cluster.gateway.openai.schemas import (
    CommonBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    invalid,
    read,
    read_completion,
)
from tandem.cluster.gateway.services import TextServices
from tandem.cluster.tenants.tenant import salted
from tandem.workers.messages.request import GenerationRequest, Pool, SamplingParams
from tandem.workers.speculation.acceptance import DraftAcceptance
from tandem.workers.text.choice_text import ChoiceText
from tandem.workers.text.tokenizer import check_token_ids

Body = TypeVar("Body")
Fields = TypeVar("Fields", bound="QueueFields", covariant=True)
DEFAULT_COMPLETION_TOKENS = 16
COMPLETION_FIELDS = Asked("prompt", "max_tokens")
PARSED_FASTER = 16
"""Bytes that are parsed and checked in the time in which one is tokenized, roughly."""


class QueueFields(Protocol):
    """The fields of every body that groups serve, of the queue and the prefix cache."""

    @property
    def priority(self) -> int | None:
        """Of the request; None: the tenant's."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """KV of the prefix cache is found under it only."""
        ...


class Posted(NamedTuple, Generic[Fields]):
    """One HTTP request: who asks, for which model, with what body. name: its id in the answer."""

    request: Request
    principal: Principal
    model: Served
    name: str
    body: Fields


async def completions(text: TextServices, generations: Generations, request: Request, principal: Principal) -> Response:
    """One or several prompts, n choices each."""
    began_s = generations.clock()
    body, size = await received(text, request, principal, lambda fields: _completion_body(text, fields))
    with ExitStack() as held:
        model = held_model(text, generations, body.model, principal, held)
        wanted = _wanted(body)
        check_choices(text, body)
        head = answer_head(text, generations, "cmpl-", model.name)
        asked = Posted(request, principal, model, head.id, body)
        parts, echo = await text.workers.run(
            principal.tenant, size + grammar_size(body), _completion_parts, text, generations, asked, body, wanted
        )
        generation = make_generation(text, generations, asked, parts, began_s, "prompt")
        shown = body.n or 1
        prompts = [part.request.prompt_token_ids for part in parts for _ in range(shown)]
        style = CompletionFormat(
            text.detokenizers,
            head,
            with_usage=includes_usage(body),
            counts=chunk_counts(body, parts),
            prompt_ids=prompts if body.return_token_ids else None,
            echo=[prompt for prompt in echo for _ in range(shown)] if body.echo else None,
            echo_ids=prompts if body.echo and body.logprobs is not None else None,
            skip_special_tokens=body.skip_special_tokens is not False,
            with_prompt_logprobs=body.prompt_logprobs is not None,
            metrics=draft_metrics(text, body, parts),
        )
        return text_answer(generations, generation, style, body, held, with_logprobs=body.logprobs is not None)


async def tokenize(text: TextServices, generations: Generations, request: Request, principal: Principal) -> Response:
    """Token ids of a text or of a rendered conversation."""
    body, size = await received(text, request, principal, lambda fields: read(fields, TokenizeBody))
    served_model(text.model_names, generations.adapters, body.model, principal)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Send either prompt or messages.")
    return await text.workers.run(principal.tenant, size, _tokenized, text, body)


async def detokenize(text: TextServices, generations: Generations, request: Request, principal: Principal) -> Response:
    """The text of token ids, special tokens included."""
    body, size = await received(text, request, principal, lambda fields: read(fields, DetokenizeBody))
    served_model(text.model_names, generations.adapters, body.model, principal)
    return await text.workers.run(principal.tenant, size, _detokenized, text, body)


async def received(
    text: TextServices, request: Request, principal: Principal, check: Callable[[dict[str, Any]], Body]
) -> tuple[Body, int]:
    """The body, read and checked, and its size in bytes."""
    data = await read_body(request, text.settings.max_body_bytes)

    def parsed() -> Body:
        return check(parse_object(data, text.settings.max_json_depth))

    return await text.workers.run(principal.tenant, len(data) // PARSED_FASTER, parsed), len(data)


async def read_fields(text: TextServices, request: Request, principal: Principal) -> dict[str, Any]:
    """The body's JSON object."""
    return (await received(text, request, principal, lambda fields: fields))[0]


def _completion_body(text: TextServices, fields: dict[str, Any]) -> CompletionBody:
    """A completions body. Token ids that do not fit are refused here: their lists are several times as large as the
    body, and would wait for their turn."""
    body = checked_beams(read_completion(fields, text.settings), text.settings.max_logprobs, text.batching_policy)
    check_ids_fit(text, body, _wanted(body), COMPLETION_FIELDS)
    return body


def _tokenized(text: TextServices, body: TokenizeBody) -> Response:
    ids = text_prompt(text, body).token_ids
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": text.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [text.tokenizer.piece(i) for i in ids]
    return json_response(answer)


def _detokenized(text: TextServices, body: DetokenizeBody) -> Response:
    check_token_count(text, len(body.tokens), "tokens")
    check_token_ids(body.tokens, text.vocab_size, "tokens")
    return json_response({"prompt": text.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _wanted(body: CompletionBody) -> int:
    return DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens


def _completion_parts(
    text: TextServices, generations: Generations, asked: "Posted[CompletionBody]", body: CompletionBody, wanted: int
) -> tuple[list[RequestPart], list[str]]:
    """A part for every prompt, and the prompts' texts where the answer begins with them."""
    grammar = requested_grammar(text.settings, body)
    work: list[tuple[Prompt, SamplingParams]] = []
    for item in completion_prompts(text, body):
        prompt, max_tokens = fit(text, item, body, wanted, COMPLETION_FIELDS)
        work.append((prompt, prompt_sampling(text, body, max_tokens, body.logprobs, grammar)))
    echo = [_echo_text(text, prompt, body) for prompt, _ in work] if body.echo else []
    return request_parts(text, generations, asked, work), echo


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def held_model(
    text: TextServices, generations: Generations, name: str | None, principal: Principal, held: ExitStack
) -> Served:
    """The model of that name, whose adapter is in use from now on."""
    adapters = generations.adapters
    model = served_model(text.model_names, adapters, name, principal)
    if adapters is not None:
        held.enter_context(adapters.request(model.adapter))
    return model


def prompt_sampling(
    text: TextServices, body: CommonBody, max_tokens: int, logprobs: int | None, grammar: str | None
) -> SamplingParams:
    """Sampling parameters; best_of above n samples more and needs log probabilities to choose; with echo, logprobs are
    those of the prompt too."""
    count = body.best_of or body.n or 1
    of_prompt = body.prompt_logprobs
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        of_prompt = body.logprobs
    if count > (body.n or 1) and logprobs is None:
        logprobs = 0
    return sampling_params(
        text,
        body,
        max_tokens=max_tokens,
        n=count,
        logprobs=logprobs,
        prompt_logprobs=of_prompt,
        grammar=grammar,
    )


def answer_head(text: TextServices, generations: Generations, prefix: str, model: str) -> AnswerHead:
    return AnswerHead(f"{prefix}{uuid.uuid4().hex}", int(generations.wall_clock()), model, text.fingerprint)


def includes_usage(body: CommonBody) -> bool:
    options = body.stream_options
    return options is not None and bool(options.include_usage or options.continuous_usage_stats)


def chunk_counts(body: CommonBody, parts: Sequence[RequestPart]) -> ChunkCounts | None:
    """What counts in every chunk, if that is asked for."""
    if body.stream_options is None or not body.stream_options.continuous_usage_stats:
        return None
    return ChunkCounts([len(part.request.prompt_token_ids) for part in parts for _ in part.choices])


def draft_metrics(text: TextServices, body: CommonBody, parts: Sequence[RequestPart]) -> Metrics:
    """`metrics` of the answer, where the service reports it: acceptance of drafts, of a single choice only."""
    level = text.settings.per_request_spec_decode_metrics
    if level == "none":
        return None
    if len(parts) > 1 or len(parts[0].choices) > 1 or body.use_beam_search:
        return lambda: {"speculative_decoding": None}
    acceptance = parts[0].acceptance = DraftAcceptance(text.max_drafts, detailed=level == "detailed")
    return lambda: {"speculative_decoding": acceptance.report()}


def _echo_text(text: TextServices, prompt: Prompt, body: CompletionBody) -> str:
    if prompt.text is not None and body.truncate_prompt_tokens is None:
        return prompt.text
    return text.tokenizer.decode(prompt.token_ids, skip_special_tokens=body.skip_special_tokens is not False)


def engine_requests(
    generations: Generations,
    asked: Posted[QueueFields],
    work: Sequence[tuple[list[int], SamplingParams]],
    pool: Pool | None = None,
) -> list[GenerationRequest]:
    """The requests of one HTTP request to the groups, for each prompt one; their ids are unique even when x-request-id
    is not. work: token ids and sampling parameters of the prompts."""
    request, principal, model, name, body = asked
    priority = body.priority if body.priority is not None else generations.tenancy.limits(principal.tenant).priority
    salt = salted(principal.tenant, body.cache_salt)
    trace_ids = {"x-request-id": request.scope.get("tandem.request_id", "")}
    return [
        GenerationRequest(
            request_id=name if len(work) == 1 else f"{name}-{number}",
            prompt_token_ids=token_ids,
            sampling=params,
            adapter=model.adapter,
            tenant=principal.tenant,
            priority=priority,
            deadline_s=generations.queue_timeout_s,
            cache_salt=salt,
            trace_ids=trace_ids,
            pool=pool,
        )
        for number, (token_ids, params) in enumerate(work)
    ]


def request_parts(
    text: TextServices,
    generations: Generations,
    asked: Posted[CommonBody],
    work: Sequence[tuple[Prompt, SamplingParams]],
    *,
    is_open_ended: bool = False,
    shows_special_tokens: bool = False,
) -> list[RequestPart]:
    """A part for every prompt of one HTTP request. shows_special_tokens: in the texts, whatever the body says."""
    skips = not shows_special_tokens and asked.body.skip_special_tokens is not False
    requests = engine_requests(generations, asked, [(prompt.token_ids, params) for prompt, params in work])
    parts = []
    for number, (request, (prompt, params)) in enumerate(zip(requests, work, strict=True)):
        choices = [_choice(text, asked.body, prompt, params, skips) for _ in range(params.n)]
        first = number * params.n
        part = RequestPart(request=request, choices=choices, first_choice=first, is_open_ended=is_open_ended)
        parts.append(part)
    return parts


def make_generation(
    text: TextServices,
    generations: Generations,
    asked: Posted[CommonBody],
    parts: list[RequestPart],
    began_s: float,
    prompt_field: str,
    *,
    grammar_field: str | None = None,
) -> Generation:
    """The generation, not started. grammar_field: of the body, for refusals of a grammar that it does not ask for by
    structured_field()."""
    named: dict[str, Any] = {
        "tenant": asked.principal.tenant,
        "model": asked.model.name,
        "began_s": began_s,
        "prompt_field": prompt_field,
        "grammar_field": grammar_field or structured_field(asked.body),
    }
    body = asked.body
    if not body.use_beam_search:
        return Generation(generations, parts, **named)
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    eos = text.tokenizer.eos_token_ids
    return BeamGeneration(generations, parts, length_penalty=penalty, eos_token_ids=eos, **named)


def _choice(
    text: TextServices, body: CommonBody, prompt: Prompt, params: SamplingParams, skips_special_tokens: bool
) -> ChoiceText:
    return ChoiceText(
        text.detokenizers.make(prompt.token_ids, skip_special_tokens=skips_special_tokens),
        params,
        include_stop=bool(body.include_stop_str_in_output),
        eos_token_ids=text.tokenizer.eos_token_ids,
    )


def text_answer(
    generations: Generations,
    generation: Generation,
    style: ResponseFormat,
    body: CommonBody,
    held: ExitStack,
    *,
    with_logprobs: bool,
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> GenerationResponse:
    """The answer to be; what is held passes to the generation. before_end: see TextResponse."""
    generation.held = held.pop_all()
    return TextResponse(
        generations,
        generation,
        style,
        stream=bool(body.stream),
        include_usage=includes_usage(body),
        shown=body.n or 1,
        with_logprobs=with_logprobs,
        is_streamable=_is_streamable(body, generation),
        before_end=before_end,
    )


def _is_streamable(body: CommonBody, generation: Generation) -> bool:
    """Whether the body would be accepted with `stream` true (schemas.py, checked_beams())."""
    sampling = generation.parts[0].request.sampling
    return sampling.prompt_logprobs is None and sampling.n == (body.n or 1) and not body.use_beam_search
