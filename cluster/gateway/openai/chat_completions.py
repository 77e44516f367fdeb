"""POST /v1/chat/completions."""

from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.conversation.conversation import Conversation, Received, prepare_chat
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.openai.answer_usage import chunk_counts, draft_metrics
from tandem.cluster.gateway.openai.answers import ChatFormat
from tandem.cluster.gateway.openai.parsed_answers import ParsedChatFormat
from tandem.cluster.gateway.schemas.chat_body import ChatBody, read_chat
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import includes_usage, text_answer
from tandem.cluster.gateway.serving.prompts import Asked
from tandem.cluster.gateway.serving.received import received
from tandem.cluster.gateway.serving.sampling_fields import checked_beams


async def chat_completions(
    text: TextServices, context: GatewayContext, request: Request, principal: Principal
) -> Response:
    """One conversation, n choices."""
    began_s = context.clock()
    body, size = await received(text, request, principal, lambda fields: _chat_body(text, fields))
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    posted = Received(
        request=request,
        principal=principal,
        body=body,
        size=size,
        began_s=began_s,
        id_prefix="chatcmpl-",
        names=Asked("messages", limit),
    )
    with ExitStack() as held:
        conversation = await prepare_chat(text, context, posted, held)
        style = _style(text, body, conversation)
        with_logprobs = conversation.logprobs is not None
        return text_answer(context, conversation.generation, style, body, held, with_logprobs=with_logprobs)


def _style(text: TextServices, body: ChatBody, conversation: Conversation) -> ChatFormat:
    make = ChatFormat if conversation.output.is_plain else partial(ParsedChatFormat, conversation.output)
    return make(
        text.detokenizers,
        conversation.head,
        with_usage=includes_usage(body),
        counts=chunk_counts(body, conversation.parts),
        prompt_ids=conversation.prompt.token_ids if body.return_token_ids else None,
        with_prompt_logprobs=body.prompt_logprobs is not None,
        metrics=draft_metrics(text, body, conversation.parts),
    )


def _chat_body(text: TextServices, fields: dict[str, Any]) -> ChatBody:
    return checked_beams(read_chat(fields, text.settings), text.settings.max_logprobs, text.batching_policy)
