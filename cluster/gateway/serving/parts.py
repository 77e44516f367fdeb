"""The parts of a generation: a prompt, its sampling parameters and its choices each."""

from collections.abc import Sequence

from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.schemas.generation_body import CommonBody, CompletionBody
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.prompts import Prompt
from tandem.cluster.gateway.serving.received import Posted, QueueFields
from tandem.cluster.gateway.serving.sampling_fields import sampling_params
from tandem.cluster.tenants.tenant import salted
from tandem.workers.messages.request import GenerationRequest, Pool, SamplingParams
from tandem.workers.text.choice_text import ChoiceText


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


def engine_requests(
    context: GatewayContext,
    asked: Posted[QueueFields],
    work: Sequence[tuple[list[int], SamplingParams]],
    pool: Pool | None = None,
) -> list[GenerationRequest]:
    """The requests of one HTTP request to the groups, for each prompt one; their ids are unique even when x-request-id
    is not. work: token ids and sampling parameters of the prompts."""
    request, principal, model, name, body = asked
    priority = body.priority if body.priority is not None else context.tenancy.limits(principal.tenant).priority
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
            deadline_s=context.queue_timeout_s,
            cache_salt=salt,
            trace_ids=trace_ids,
            pool=pool,
        )
        for number, (token_ids, params) in enumerate(work)
    ]


def request_parts(
    text: TextServices,
    context: GatewayContext,
    asked: Posted[CommonBody],
    work: Sequence[tuple[Prompt, SamplingParams]],
    *,
    is_open_ended: bool = False,
    shows_special_tokens: bool = False,
) -> list[RequestPart]:
    """A part for every prompt of one HTTP request. shows_special_tokens: in the texts, whatever the body says."""
    skips = not shows_special_tokens and asked.body.skip_special_tokens is not False
    requests = engine_requests(context, asked, [(prompt.token_ids, params) for prompt, params in work])
    parts = []
    for number, (request, (prompt, params)) in enumerate(zip(requests, work, strict=True)):
        choices = [_choice(text, asked.body, prompt, params, skips) for _ in range(params.n)]
        first = number * params.n
        part = RequestPart(request=request, choices=choices, first_choice=first, is_open_ended=is_open_ended)
        parts.append(part)
    return parts


def _choice(
    text: TextServices, body: CommonBody, prompt: Prompt, params: SamplingParams, skips_special_tokens: bool
) -> ChoiceText:
    return ChoiceText(
        text.detokenizers.make(prompt.token_ids, skip_special_tokens=skips_special_tokens),
        params,
        include_stop=bool(body.include_stop_str_in_output),
        eos_token_ids=text.tokenizer.eos_token_ids,
    )
