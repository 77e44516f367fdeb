"""PreparedChat: a checked chat body, ready to be generated. Chat completions use it, and APIs that are worded as
conversations too.

Everything that can be refused is refused here, before the request reaches a group: the prompt by chat_prompt.py, the
reading of the answer by chat_output.py, its grammar by held_grammar.py. Next: serving/answer.py.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec

from tandem.cluster.gateway.conversation.chat_output import ChatOutput, chat_output
from tandem.cluster.gateway.conversation.chat_prompt import chat_prompt
from tandem.cluster.gateway.conversation.field_names import FieldNames
from tandem.cluster.gateway.conversation.held_grammar import held_grammar
from tandem.cluster.gateway.conversation.one_call_choice import OneCallChoice
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.generation.part import Choice
from tandem.cluster.gateway.schemas.chat_body import ChatBody
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.reading import unsupported
from tandem.cluster.gateway.services.model_lookup import held_model
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import Prepared, answer_head
from tandem.cluster.gateway.serving.grammar_fields import (
    OFF_LOOP_BYTES,
    grammar_size,
    requested_grammar,
    structured_field,
)
from tandem.cluster.gateway.serving.parts import PromptWork, prompt_sampling, request_parts, text_choices
from tandem.cluster.gateway.serving.prompts import LimitNames, Prompt, fit
from tandem.cluster.gateway.serving.received import PARSED_FASTER, Posted, ignored_fields
from tandem.cluster.gateway.serving.sampling_fields import bad_words_size
from tandem.workers.messages.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class PreparedChat(Prepared):
    """A conversation that is ready to be generated. parts: one, with a choice for each answer. logprobs: how many were
    asked for. output: how the choices' texts are read."""

    prompt: Prompt
    logprobs: int | None
    output: ChatOutput


@asynccontextmanager
async def conversation_of(
    text: TextServices, context: GatewayContext, posted: Posted[ChatBody], names: FieldNames, id_prefix: str
) -> AsyncIterator[PreparedChat]:
    """Renders and tokenizes the messages and prepares their generation; what that holds is given back at the end of the
    context, unless the answer was made. names: the client's, for refusals. id_prefix: of the answer's id."""
    with ExitStack() as held:
        with names.in_refusals():
            chat = await _prepared(text, context, posted, names, id_prefix, held)
        yield chat


async def _prepared(
    text: TextServices,
    context: GatewayContext,
    posted: Posted[ChatBody],
    names: FieldNames,
    id_prefix: str,
    held: ExitStack,
) -> PreparedChat:
    body, tenant = posted.body, posted.principal.tenant
    model = held_model(text, context, body.model, posted.principal, held)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    ignored = ignored_fields(posted.request).named(names.of)
    rendered, output = await text.workers.run(tenant, posted.size, _rendered, text, body, ignored)
    prompt, max_tokens = fit(text, rendered, body, wanted, LimitNames(names.prompt, names.limit))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = await text.workers.run(
        tenant, _params_size(posted, output), _params, text, body, output, max_tokens, logprobs
    )
    head = answer_head(text, context, id_prefix, model.name)
    work = PromptWork(prompt.token_ids, params, _choices(text, body, prompt, params, output))
    parts = request_parts(text, context, posted, model, head.id, [work], is_open_ended=wanted is None)
    asks = "tool_choice" if output.is_forced else structured_field(body)
    return PreparedChat(
        text=text,
        context=context,
        posted=posted,
        head=head,
        parts=parts,
        held=held,
        prompt_field=names.prompt,
        grammar_field=None if asks is None else names.of(asks),
        prompt=prompt,
        logprobs=logprobs,
        output=output,
    )


def _params_size(posted: Posted[ChatBody], output: ChatOutput) -> int:
    """The size of the work that the sampling parameters are."""
    held = OFF_LOOP_BYTES if output.is_forced else grammar_size(posted.body)
    return bad_words_size(posted.body) + (held + posted.size // PARSED_FASTER if held else 0)


def _params(
    text: TextServices, body: ChatBody, output: ChatOutput, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    if output.is_forced and body.use_beam_search:
        raise unsupported("tool_choice", "With use_beam_search a tool call cannot be forced.")
    grammar = held_grammar(output, text, requested_grammar(text.settings, body))
    params = prompt_sampling(text, body, max_tokens, logprobs, grammar)
    if body.thinking_token_budget is None or output.thinking is None:
        return params
    return msgspec.structs.replace(params, thinking_budget=output.thinking)


def _rendered(text: TextServices, body: ChatBody, ignored: IgnoredFields) -> tuple[Prompt, ChatOutput]:
    prompt = chat_prompt(text, body, ignored)
    return prompt, chat_output(text, body, prompt.text or "", ignored)


def _choices(
    text: TextServices, body: ChatBody, prompt: Prompt, params: SamplingParams, output: ChatOutput
) -> Sequence[Choice]:
    """Makes a choice for each answer; the gateway ends it behind its first call where the grammar does not."""
    choices = text_choices(text, body, prompt, params, shows_special_tokens=output.shows_special_tokens)
    if not output.ends_early:
        return choices
    return [OneCallChoice(choice, output.make_one_call()) for choice in choices]
