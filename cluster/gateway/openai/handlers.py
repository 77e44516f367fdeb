"""POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize: from a checked body to an answer.

Everything that can be refused is refused here, before the request reaches a group.
"""

import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.generation.delivery import GenerationResponse
from tandem.cluster.gateway.generation.generation import Generation
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.generation.response_format import ResponseFormat
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import parse_object, read_body
from tandem.cluster.gateway.openai.answers import AnswerHead, ChatFormat, CompletionFormat
from tandem.cluster.gateway.openai.model_lookup import Served, served_model
from tandem.cluster.gateway.openai.prompts import Asked, Prompt, chat_prompt, completion_prompts, fit
from tandem.cluster.gateway.openai.sampling_fields import sampling_params
from tandem.cluster.gateway.openai.schemas import (
    CommonBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    invalid,
    read,
    read_chat,
    read_completion,
)
from tandem.cluster.gateway.services import GatewayState
from tandem.cluster.tenants.tenant import salted
from tandem.workers.messages.request import GenerationRequest, SamplingParams
from tandem.workers.text.choice_text import ChoiceText
from tandem.workers.text.tokenizer import check_token_ids

DEFAULT_COMPLETION_TOKENS = 16


async def chat_completions(state: GatewayState, request: Request, principal: Principal) -> Response:
    """One conversation, n choices."""
    began_s = state.clock()
    body = read_chat(await read_fields(state, request), state.settings)
    with ExitStack() as held:
        model = _held_model(state, body, principal, held)
        wanted, names = body.max_tokens, Asked("messages", "max_tokens")
        if body.max_completion_tokens is not None:
            wanted, names = body.max_completion_tokens, Asked("messages", "max_completion_tokens")
        prompt, max_tokens = fit(state, await chat_prompt(state, body), body, wanted, names)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = _params(state, body, max_tokens, logprobs)
        head = _head(state, "chatcmpl", model.name)
        work = [(prompt, params)]
        generation = _generation(
            state, request, principal, head, model, body, work, began_s, "messages", is_open_ended=wanted is None
        )
        style = ChatFormat(
            state,
            head,
            with_usage=_include_usage(body),
            prompt_ids=prompt.token_ids if body.return_token_ids else None,
        )
        return _answer(state, generation, style, body, held, with_logprobs=logprobs is not None)


async def completions(state: GatewayState, request: Request, principal: Principal) -> Response:
    """One or several prompts, n choices each."""
    began_s = state.clock()
    body = read_completion(await read_fields(state, request), state.settings)
    with ExitStack() as held:
        model = _held_model(state, body, principal, held)
        wanted = body.max_tokens if body.max_tokens is not None else DEFAULT_COMPLETION_TOKENS
        work: list[tuple[Prompt, SamplingParams]] = []
        for item in await completion_prompts(state, body):
            prompt, max_tokens = fit(state, item, body, wanted, Asked("prompt", "max_tokens"))
            work.append((prompt, _params(state, body, max_tokens, body.logprobs)))
        if len(work) * (body.best_of or body.n or 1) > state.settings.max_messages:
            raise invalid("n", f"Prompts times n exceed the limit of {state.settings.max_messages} choices.")
        head = _head(state, "cmpl", model.name)
        generation = _generation(state, request, principal, head, model, body, work, began_s, "prompt")
        shown = body.n or 1
        prompts = [prompt for prompt, _ in work for _ in range(shown)]
        style = CompletionFormat(
            state,
            head,
            with_usage=_include_usage(body),
            prompt_ids=[prompt.token_ids for prompt in prompts] if body.return_token_ids else None,
            echo=[_echo_text(state, prompt, body) for prompt in prompts] if body.echo else None,
        )
        return _answer(state, generation, style, body, held, with_logprobs=body.logprobs is not None)


async def tokenize(state: GatewayState, request: Request, principal: Principal) -> Response:
    """Token ids of a text or of a rendered conversation."""
    body = read(await read_fields(state, request), TokenizeBody)
    served_model(state, body.model, principal)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Send either prompt or messages.")
    if body.messages is not None:
        ids = (await chat_prompt(state, body)).token_ids
    else:
        text = body.prompt or ""
        special = body.add_special_tokens is not False
        ids = await state.text.run(len(text), state.tokenizer.encode, text, add_special_tokens=special)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": state.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [state.tokenizer.piece(i) for i in ids]
    return json_response(answer)


async def detokenize(state: GatewayState, request: Request, principal: Principal) -> Response:
    """The text of token ids, special tokens included."""
    body = read(await read_fields(state, request), DetokenizeBody)
    served_model(state, body.model, principal)
    check_token_ids(body.tokens, state.vocab_size, "tokens")
    decode = state.tokenizer.decode
    return json_response(
        {"prompt": await state.text.run(len(body.tokens) * 4, decode, body.tokens, skip_special_tokens=False)}
    )


async def read_fields(state: GatewayState, request: Request) -> dict[str, Any]:
    """The body's JSON object."""
    body = await read_body(request, state.settings.max_body_bytes)
    return await state.text.run(len(body) // 16, parse_object, body, state.settings.max_json_depth)


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _held_model(state: GatewayState, body: CommonBody, principal: Principal, held: ExitStack) -> Served:
    """The model, whose adapter is in use from now on."""
    model = served_model(state, body.model, principal)
    held.enter_context(state.running_adapters.request(model.adapter))
    return model


def _params(state: GatewayState, body: CommonBody, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Sampling parameters; best_of above n samples more and needs log probabilities to choose."""
    count = body.best_of or body.n or 1
    if count > (body.n or 1) and logprobs is None:
        logprobs = 0
    return sampling_params(state, body, max_tokens=max_tokens, n=count, logprobs=logprobs)


def _head(state: GatewayState, prefix: str, model: str) -> AnswerHead:
    return AnswerHead(f"{prefix}-{uuid.uuid4().hex}", int(state.wall_clock()), model, state.fingerprint)


def _include_usage(body: CommonBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _echo_text(state: GatewayState, prompt: Prompt, body: CompletionBody) -> str:
    if prompt.text is not None and body.truncate_prompt_tokens is None:
        return prompt.text
    return state.tokenizer.decode(prompt.token_ids, skip_special_tokens=body.skip_special_tokens is not False)


def _generation(
    state: GatewayState,
    request: Request,
    principal: Principal,
    head: AnswerHead,
    model: Served,
    body: CommonBody,
    work: Sequence[tuple[Prompt, SamplingParams]],
    began_s: float,
    prompt_field: str,
    *,
    is_open_ended: bool = False,
) -> Generation:
    """All prompts of one HTTP request; request ids are unique even when x-request-id is not."""
    parts = []
    for number, (prompt, params) in enumerate(work):
        asked = GenerationRequest(
            request_id=head.id if len(work) == 1 else f"{head.id}-{number}",
            prompt_token_ids=prompt.token_ids,
            sampling=params,
            adapter=model.adapter,
            tenant=principal.tenant,
            priority=body.priority if body.priority is not None else state.tenancy.limits(principal.tenant).priority,
            deadline_s=state.settings.queue_timeout_s,
            cache_salt=salted(principal.tenant, body.cache_salt),
            trace_ids={"x-request-id": request.scope.get("tandem.request_id", "")},
        )
        choices = [_choice(state, body, prompt, params) for _ in range(params.n)]
        first = number * params.n
        part = RequestPart(request=asked, choices=choices, first_choice=first, is_open_ended=is_open_ended)
        parts.append(part)
    return Generation(
        state.generations,
        parts,
        tenant=principal.tenant,
        model=head.model,
        began_s=began_s,
        prompt_field=prompt_field,
    )


def _choice(state: GatewayState, body: CommonBody, prompt: Prompt, params: SamplingParams) -> ChoiceText:
    return ChoiceText(
        state.detokenizers.make(prompt.token_ids, skip_special_tokens=body.skip_special_tokens is not False),
        params,
        include_stop=bool(body.include_stop_str_in_output),
        eos_token_ids=state.tokenizer.eos_token_ids,
    )


def _answer(
    state: GatewayState,
    generation: Generation,
    style: ResponseFormat,
    body: CommonBody,
    held: ExitStack,
    *,
    with_logprobs: bool,
) -> GenerationResponse:
    """The answer to be; what is held passes to the generation."""
    generation.held = held.pop_all()
    return GenerationResponse(
        state.generations,
        generation,
        style,
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        shown=body.n or 1,
        with_logprobs=with_logprobs,
    )
