"""From parts to the answer of a request: what all APIs that generate text end with."""

import uuid
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from tandem.cluster.gateway.generation.beam_generation import BeamGeneration
from tandem.cluster.gateway.generation.delivery import GenerationResponse, TextResponse
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.generation.generation import Generation
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.generation.response_format import ResponseFormat
from tandem.cluster.gateway.schemas.generation_body import CommonBody
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.grammar_fields import structured_field
from tandem.cluster.gateway.serving.received import Posted


class AnswerHead(NamedTuple):
    """Fields that every object of one answer has."""

    id: str
    created: int
    model: str
    fingerprint: str


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def answer_head(text: TextServices, context: GatewayContext, prefix: str, model: str) -> AnswerHead:
    return AnswerHead(f"{prefix}{uuid.uuid4().hex}", int(context.wall_clock()), model, text.fingerprint)


def includes_usage(body: CommonBody) -> bool:
    options = body.stream_options
    return options is not None and bool(options.include_usage or options.continuous_usage_stats)


def make_generation(
    text: TextServices,
    context: GatewayContext,
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
        return Generation(context, parts, **named)
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    eos = text.tokenizer.eos_token_ids
    return BeamGeneration(context, parts, length_penalty=penalty, eos_token_ids=eos, **named)


def text_answer(
    context: GatewayContext,
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
        context,
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


_encode = msgspec.json.Encoder().encode
