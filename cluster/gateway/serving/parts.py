"""The parts of a generation: a prompt, its sampling parameters and its choices each."""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.generation.part import Choice, RequestPart
from tandem.cluster.gateway.schemas.generation_body import CommonBody, CompletionBody
from tandem.cluster.gateway.services.model_lookup import ServedModel
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.prompts import Prompt
from tandem.cluster.gateway.serving.received import Posted, QueueFields
from tandem.cluster.gateway.serving.route_wishes import asked_note, route_session
from tandem.cluster.gateway.serving.sampling_fields import sampling_params
from tandem.cluster.tenants.tenant import salted
from tandem.workers.messages.request import GenerationRequest, Pool, SamplingParams
from tandem.workers.speculation.acceptance import DraftAcceptance
from tandem.workers.text.choice_text import ChoiceText


class PromptWork(NamedTuple):
    """One prompt of a request, with the choices that are to come of it."""

    token_ids: list[int]
    sampling: SamplingParams
    choices: Sequence[Choice]


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


def _requests(
    context: GatewayContext,
    posted: Posted[QueueFields],
    model: ServedModel,
    name: str,
    work: Sequence[PromptWork],
    pool: Pool | None,
    attempt: int,
) -> list[GenerationRequest]:
    """Makes the requests of one HTTP request to the groups."""
    request, principal, body = posted.request, posted.principal, posted.body
    priority = body.priority if body.priority is not None else context.tenancy.limits(principal.tenant).priority
    salt = salted(principal.tenant, body.cache_salt)
    headers = {} if posted.trace is None else posted.trace.headers()
    trace_ids = {"x-request-id": request.scope.get("tandem.request_id", ""), **headers}
    return [
        GenerationRequest(
            request_id=name if len(work) == 1 else f"{name}-{number}",
            attempt=attempt,
            prompt_token_ids=one.token_ids,
            sampling=one.sampling,
            adapter=model.adapter,
            tenant=principal.tenant,
            priority=priority,
            deadline_s=context.queue_timeout_s,
            cache_salt=salt,
            trace_ids=trace_ids,
            pool=pool,
        )
        for number, one in enumerate(work)
    ]


def request_parts(
    text: TextServices,
    context: GatewayContext,
    posted: Posted[QueueFields],
    model: ServedModel,
    name: str,
    work: Sequence[PromptWork],
    *,
    pool: Pool | None = None,
    is_open_ended: bool = False,
) -> list[RequestPart]:
    """Makes the parts of one HTTP request, for each prompt one. name: the answer's id; those of the parts are unique
    even when x-request-id is not."""
    requests = _requests(context, posted, model, name, work, pool, text.first_attempt)
    session, note = route_session(posted.request, posted.principal), asked_note(posted.request, posted.principal)
    return [
        RequestPart(
            request=request,
            choices=one.choices,
            first_choice=number * one.sampling.n,
            is_open_ended=is_open_ended,
            acceptance=_acceptance(text) if len(work) == 1 and one.sampling.n == 1 else None,
            session=session,
            route_note=note if number == 0 else None,
        )
        for number, (request, one) in enumerate(zip(requests, work, strict=True))
    ]


def _acceptance(text: TextServices) -> DraftAcceptance | None:
    """Counts draft tokens, where the service reports them."""
    level = text.settings.per_request_spec_decode_metrics
    return None if level == "none" else DraftAcceptance(text.max_drafts, detailed=level == "detailed")


def text_choices(
    text: TextServices, body: CommonBody, prompt: Prompt, params: SamplingParams, *, shows_special_tokens: bool = False
) -> list[ChoiceText]:
    """Makes the choices of a prompt. shows_special_tokens: in the texts, whatever the body says."""
    skips = not shows_special_tokens and body.skip_special_tokens is not False
    return [_choice(text, body, prompt, params, skips) for _ in range(params.n)]


def _choice(
    text: TextServices, body: CommonBody, prompt: Prompt, params: SamplingParams, skips_special_tokens: bool
) -> ChoiceText:
    return ChoiceText(
        text.detokenizers.make(prompt.token_ids, skip_special_tokens=skips_special_tokens),
        params,
        include_stop=bool(body.include_stop_str_in_output),
        eos_token_ids=text.tokenizer.eos_token_ids,
    )
