"""Prepared: from the parts of a request to its answer, which is what all routes that generate text end with.

Next: generation/generation.py, which the answer starts.
"""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from tandem.cluster.gateway.generation.beam_generation import BeamGeneration
from tandem.cluster.gateway.generation.delivery import Delivery
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.generation.generation import Generation
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.generation.response_format import StreamFormat
from tandem.cluster.gateway.schemas.generation_body import CommonBody
from tandem.cluster.gateway.services.text_services import TextServices
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
    return AnswerHead(f"{prefix}{text.random_ids()}", int(context.wall_clock()), model, text.fingerprint)


def includes_usage(body: CommonBody) -> bool:
    options = body.stream_options
    return options is not None and bool(options.include_usage or options.continuous_usage_stats)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request for text that is ready to be generated. held: what is in use until it has been generated. prompt_field,
    grammar_field: names in the client's body, for refusals."""

    text: TextServices
    context: GatewayContext
    posted: Posted[CommonBody]
    head: AnswerHead
    parts: list[RequestPart]
    held: ExitStack
    prompt_field: str
    grammar_field: str | None

    def answer(
        self,
        style: StreamFormat,
        *,
        with_logprobs: bool = False,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> Delivery:
        """Returns the answer, which starts the generation; what is held passes to that. before_end: see Delivery."""
        body = self.posted.body
        return Delivery(
            self.context,
            self._make_generation(),
            style,
            stream=style if body.stream else None,
            include_usage=includes_usage(body),
            shown=body.n or 1,
            with_logprobs=with_logprobs,
            is_streamable=_is_streamable(body, self.parts[0]),
            before_end=before_end,
        )

    def _make_generation(self) -> Generation:
        """Returns the generation, which owns the parts and what is held from now on: call once."""
        body = self.posted.body
        named: dict[str, Any] = {
            "trace": self.posted.note_generation(),
            "tenant": self.posted.principal.tenant,
            "model": self.head.model,
            "began_s": self.posted.began_s,
            "held": self.held.pop_all(),
            "prompt_field": self.prompt_field,
            "grammar_field": self.grammar_field,
        }
        if not body.use_beam_search:
            return Generation(self.context, self.parts, **named)
        penalty = 1.0 if body.length_penalty is None else body.length_penalty
        eos = self.text.tokenizer.eos_token_ids
        return BeamGeneration(self.context, self.parts, length_penalty=penalty, eos_token_ids=eos, **named)


def _is_streamable(body: CommonBody, part: RequestPart) -> bool:
    """True if the body would be accepted with `stream` true (schemas/, checked_beams())."""
    sampling = part.request.sampling
    return sampling.prompt_logprobs is None and sampling.n == (body.n or 1) and not body.use_beam_search
