"""A checked chat body becomes a generation. Chat completions use it, and APIs that are worded as conversations too.

Everything that can be refused is refused here, before the request reaches a group.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from tandem.cluster.gateway.conversation.chat_output import ChatOutput, chat_output
from tandem.cluster.gateway.conversation.chat_prompt import chat_prompt
from tandem.cluster.gateway.conversation.held_grammar import held_grammar
from tandem.cluster.gateway.conversation.one_call_choice import OneCallChoice
from tandem.cluster.gateway.conversation.parser_wraps import OneCall
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.generation.generation import Generation
from tandem.cluster.gateway.generation.part import Choice, RequestPart
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.schemas.chat_body import ChatBody
from tandem.cluster.gateway.schemas.reading import unsupported
from tandem.cluster.gateway.services.model_lookup import held_model
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import AnswerHead, answer_head, make_generation
from tandem.cluster.gateway.serving.grammar_fields import (
    OFF_LOOP_BYTES,
    grammar_size,
    requested_grammar,
    structured_field,
)
from tandem.cluster.gateway.serving.parts import prompt_sampling, request_parts
from tandem.cluster.gateway.serving.prompts import Asked, Prompt, fit
from tandem.cluster.gateway.serving.received import PARSED_FASTER, Posted
from tandem.cluster.gateway.serving.sampling_fields import bad_words_size
from tandem.workers.messages.request import SamplingParams
from tandem.workers.text.choice_text import ChoiceText
from tandem.workers.text.output.events import MakeParser


@dataclass(frozen=True, kw_only=True)
class Received:
    """One HTTP request with a conversation. body: a chat body, which other APIs translate theirs to. size: bytes of
    the client's body. began_s: of the gateway's clock. id_prefix: of the answer's id. names: the fields of the client's
    body that hold the prompt and the limit of new tokens, for refusals. field_of: the client's name of a field of the
    chat body."""

    request: Request
    principal: Principal
    body: ChatBody
    size: int
    began_s: float
    id_prefix: str
    names: Asked
    field_of: Callable[[str], str] = str


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation that is ready to be generated. parts: one, with a choice for each answer. logprobs: how many were
    asked for. output: how the choices' texts are read."""

    generation: Generation
    parts: list[RequestPart]
    head: AnswerHead
    prompt: Prompt
    logprobs: int | None
    output: ChatOutput

    @property
    def make_parser(self) -> MakeParser:
        """Makes a parser for each choice, which sorts its text into thinking, content and calls."""
        return self.output.make_parser


async def prepare_chat(
    text: TextServices, context: GatewayContext, received: Received, held: ExitStack
) -> Conversation:
    """Renders and tokenizes the messages and makes the generation, which is not started. held: what is in use until
    the generation ends."""
    body, principal = received.body, received.principal
    model = held_model(text, context, body.model, principal, held)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    rendered, output = await text.workers.run(principal.tenant, received.size, _rendered, text, body)
    prompt, max_tokens = fit(text, rendered, body, wanted, received.names)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = await text.workers.run(
        principal.tenant, _params_size(received, output), _params, text, body, output, max_tokens, logprobs
    )
    head = answer_head(text, context, received.id_prefix, model.name)
    asked = Posted(received.request, principal, model, head.id, body)
    parts = request_parts(
        text,
        context,
        asked,
        [(prompt, params)],
        is_open_ended=wanted is None,
        shows_special_tokens=output.shows_special_tokens,
    )
    if output.ends_early:
        parts[0].choices = [_one_call(choice, output) for choice in parts[0].choices]
    asks = "tool_choice" if output.is_forced else structured_field(body)
    generation = make_generation(
        text,
        context,
        asked,
        parts,
        received.began_s,
        received.names.prompt,
        grammar_field=None if asks is None else received.field_of(asks),
    )
    return Conversation(
        generation=generation,
        parts=parts,
        head=head,
        prompt=prompt,
        logprobs=logprobs,
        output=output,
    )


def _params_size(received: Received, output: ChatOutput) -> int:
    """The size of the work that the sampling parameters are."""
    held = OFF_LOOP_BYTES if output.is_forced else grammar_size(received.body)
    return bad_words_size(received.body) + (held + received.size // PARSED_FASTER if held else 0)


def _params(
    text: TextServices, body: ChatBody, output: ChatOutput, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    if output.is_forced and body.use_beam_search:
        raise unsupported("tool_choice", "With use_beam_search a tool call cannot be forced.")
    grammar = held_grammar(output, text, requested_grammar(text.settings, body))
    params = prompt_sampling(text, body, max_tokens, logprobs, grammar)
    if body.thinking_token_budget is None:
        return params
    return msgspec.structs.replace(params, thinking_budget=output.thinking)


def _rendered(text: TextServices, body: ChatBody) -> tuple[Prompt, ChatOutput]:
    prompt = chat_prompt(text, body)
    return prompt, chat_output(text, body, prompt.text or "")


def _one_call(choice: Choice, output: ChatOutput) -> Choice:
    parser = output.make_call_parser()
    assert isinstance(choice, ChoiceText) and isinstance(parser, OneCall)
    return OneCallChoice(choice, parser)
