"""POST /v1/score and /v1/rerank: pairs of texts, each prompt an engine request of its own."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.generation.delivery import Delivery
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.generation.generation import Generation
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.generation.response_format import ChoiceAnswer
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.openai.answer_usage import usage_object
from tandem.cluster.gateway.openai.embeddings import AT_ONCE, FLOAT_BYTES
from tandem.cluster.gateway.scoring.scorers import Scorer, scorer_of
from tandem.cluster.gateway.scoring.scoring_body import RerankBody, ScoringBody, TextPairs, read_rerank, read_score
from tandem.cluster.gateway.services.model_lookup import ServedModel, held_model
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.parts import request_parts
from tandem.cluster.gateway.serving.received import Posted, ignored_fields, received
from tandem.workers.messages.request import Usage

Worded = Callable[[str, str, Sequence[float], Usage], dict[str, Any]]
"""Makes the answer of its id, the model's name, the scores and the usage."""


async def score(text: TextServices, context: GatewayContext, request: Request, principal: Principal) -> Response:
    """The scores of pairs of texts, in their order."""
    began_s = context.clock()
    (body, pairs), size = await received(
        text, request, principal, lambda fields, ignored: read_score(fields, text.settings, ignored)
    )
    created = int(context.wall_clock())

    def worded(name: str, model: str, scores: Sequence[float], usage: Usage) -> dict[str, Any]:
        data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(scores)]
        head = {"id": name, "object": "list", "created": created, "model": model}
        return {**head, "data": data, "usage": usage_object(usage)}

    return await _answer(text, context, Posted(request, principal, body, size, began_s), pairs, "score-", worded)


async def rerank(text: TextServices, context: GatewayContext, request: Request, principal: Principal) -> Response:
    """Documents by their scores with a query, best first."""
    began_s = context.clock()
    (body, pairs), size = await received(
        text, request, principal, lambda fields, ignored: read_rerank(fields, text.settings, ignored)
    )

    def worded(name: str, model: str, scores: Sequence[float], usage: Usage) -> dict[str, Any]:
        used = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return {"id": name, "model": model, "usage": used, "results": _results(body, pairs, scores)}

    return await _answer(text, context, Posted(request, principal, body, size, began_s), pairs, "rerank-", worded)


def _results(body: RerankBody, pairs: TextPairs, scores: Sequence[float]) -> list[dict[str, Any]]:
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    results = []
    for i in order:
        document = {} if body.return_documents is False else {"document": {"text": pairs.seconds[i]}}
        results.append({"index": i, **document, "relevance_score": scores[i]})
    return results


async def _answer(
    text: TextServices,
    context: GatewayContext,
    posted: Posted[ScoringBody],
    pairs: TextPairs,
    prefix: str,
    worded: Worded,
) -> Response:
    body, principal, name = posted.body, posted.principal, f"{prefix}{text.random_ids()}"
    scorer = scorer_of(text, body)
    if body.use_activation is not None and text.judge is None:
        ignored_fields(posted.request).note("use_activation", "use_activation is of models that judge pairs.")
    with ExitStack() as held:
        model = held_model(text, context, body.model, principal, held)
        args = (text, context, posted, pairs, scorer, model, name)
        parts = await text.workers.run(principal.tenant, posted.size, _parts, *args)
        generation = Generation(
            context,
            parts,
            trace=posted.note_generation(),
            tenant=principal.tenant,
            model=model.name,
            began_s=posted.began_s,
            held=held.pop_all(),
            prompt_field=pairs.names[1],
            at_once=AT_ONCE,
        )
        style = ScoreFormat(scorer, pairs, parts, name, model.name, worded)
        components = len(parts) * text.pooling.size if scorer.pool is not None else 0
        return Delivery(context, generation, style, other_bytes=components * FLOAT_BYTES)


def _parts(
    text: TextServices,
    context: GatewayContext,
    posted: Posted[ScoringBody],
    pairs: TextPairs,
    scorer: Scorer,
    model: ServedModel,
    name: str,
) -> list[RequestPart]:
    work = scorer.work(text, posted.body, pairs)
    return request_parts(text, context, posted, model, name, work, pool=scorer.pool)


class ScoreFormat:
    """The answer, once all prompts have been computed."""

    def __init__(
        self, scorer: Scorer, pairs: TextPairs, parts: Sequence[RequestPart], name: str, model: str, worded: Worded
    ) -> None:
        self._scorer = scorer
        self._pairs = pairs
        self._parts = parts
        self._name = name
        self._model = model
        self._worded = worded

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        """Implements ResponseFormat. RequestRefused for a prompt that ended without what its score is made of."""
        del choices
        scores = self._scorer.scores(self._pairs, self._parts)
        return msgspec.json.encode(self._worded(self._name, self._model, scores, usage))
