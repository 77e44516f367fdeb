"""POST /v1/completions: one or several prompts, n choices each."""

from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.openai.answer_usage import chunk_counts, draft_metrics
from tandem.cluster.gateway.openai.answers import CompletionFormat
from tandem.cluster.gateway.schemas.generation_body import CompletionBody, read_completion
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.reading import invalid
from tandem.cluster.gateway.services.model_lookup import ServedModel, held_model
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import Prepared, answer_head, includes_usage
from tandem.cluster.gateway.serving.grammar_fields import grammar_size, requested_grammar, structured_field
from tandem.cluster.gateway.serving.parts import PromptWork, prompt_sampling, request_parts, text_choices
from tandem.cluster.gateway.serving.prompts import LimitNames, Prompt, check_token_count, fit, prompt_items, tokenized
from tandem.cluster.gateway.serving.received import Posted, received
from tandem.cluster.gateway.serving.sampling_fields import checked_beams

DEFAULT_COMPLETION_TOKENS = 16


COMPLETION_FIELDS = LimitNames("prompt", "max_tokens")


async def completions(text: TextServices, context: GatewayContext, request: Request, principal: Principal) -> Response:
    """One or several prompts, n choices each."""
    began_s = context.clock()
    body, size = await received(text, request, principal, partial(_completion_body, text))
    with ExitStack() as held:
        model = held_model(text, context, body.model, principal, held)
        wanted = _wanted(body)
        check_choices(text, body)
        head = answer_head(text, context, "cmpl-", model.name)
        posted = Posted(request, principal, body, size, began_s)
        parts, echo = await text.workers.run(
            principal.tenant, size + grammar_size(body), _parts, text, context, posted, model, head.id, wanted
        )
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
        prepared = Prepared(
            text=text,
            context=context,
            posted=posted,
            head=head,
            parts=parts,
            held=held,
            prompt_field="prompt",
            grammar_field=structured_field(body),
        )
        return prepared.answer(style, with_logprobs=body.logprobs is not None)


def _completion_body(text: TextServices, fields: dict[str, Any], ignored: IgnoredFields) -> CompletionBody:
    """A completions body. Token ids that do not fit are refused here: their lists are several times as large as the
    body, and would wait for their turn."""
    body = read_completion(fields, text.settings, ignored)
    body = checked_beams(body, text.settings.max_logprobs, text.batching_policy)
    check_ids_fit(text, body, _wanted(body), COMPLETION_FIELDS)
    return body


def _wanted(body: CompletionBody) -> int:
    return DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens


def _parts(
    text: TextServices,
    context: GatewayContext,
    posted: Posted[CompletionBody],
    model: ServedModel,
    name: str,
    wanted: int,
) -> tuple[list[RequestPart], list[str]]:
    """A part for every prompt, and the prompts' texts where the answer begins with them."""
    body = posted.body
    grammar = requested_grammar(text.settings, body)
    prompts: list[Prompt] = []
    work: list[PromptWork] = []
    for item in completion_prompts(text, body):
        prompt, max_tokens = fit(text, item, body, wanted, COMPLETION_FIELDS)
        params = prompt_sampling(text, body, max_tokens, body.logprobs, grammar)
        prompts.append(prompt)
        work.append(PromptWork(prompt.token_ids, params, text_choices(text, body, prompt, params)))
    echo = [_echo_text(text, prompt, body) for prompt in prompts] if body.echo else []
    return request_parts(text, context, posted, model, name, work), echo


def _echo_text(text: TextServices, prompt: Prompt, body: CompletionBody) -> str:
    if prompt.text is not None and body.truncate_prompt_tokens is None:
        return prompt.text
    return text.tokenizer.decode(prompt.token_ids, skip_special_tokens=body.skip_special_tokens is not False)


def completion_prompts(services: TextServices, body: CompletionBody) -> list[Prompt]:
    """Tokenizes every prompt of a completions body, in order."""
    return tokenized(
        services,
        prompt_items(body.prompt),
        "prompt",
        add_special_tokens=body.add_special_tokens is not False,
        truncates=body.truncate_prompt_tokens is not None,
    )


def check_choices(services: TextServices, body: CompletionBody) -> None:
    """Refuses more prompts times choices than one request may have, before any is tokenized."""
    prompts = 1 if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else len(body.prompt)
    choices = prompts * (body.best_of or body.n or 1)
    if choices > services.settings.max_messages:
        limit = services.settings.max_messages
        raise invalid("n", f"Prompts times n are {choices} choices, above the limit of {limit}.")


def check_ids_fit(services: TextServices, body: CompletionBody, wanted: int, names: LimitNames) -> None:
    """Refuses, as fit() does, token ids that do not fit. Those that are to be cut may be as many as text gives."""
    if isinstance(body.prompt, str):
        return
    prompts = [body.prompt] if isinstance(body.prompt[0], int) else body.prompt
    for count in (len(ids) for ids in prompts if isinstance(ids, list)):
        if body.truncate_prompt_tokens is not None:
            check_token_count(services, count, "prompt")
        elif count > services.max_model_len:
            fit(services, Prompt([0] * count, None), body, wanted, names)
