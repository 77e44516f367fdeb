"""POST /v1/chat/completions. Next: serving/received.py, which reads the body."""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.conversation.conversation import PreparedChat, conversation_of
from tandem.cluster.gateway.conversation.field_names import FieldNames
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.openai.answer_usage import chunk_counts, draft_metrics
from tandem.cluster.gateway.openai.answers import ChatFormat
from tandem.cluster.gateway.openai.parsed_answers import ParsedChatFormat
from tandem.cluster.gateway.schemas.chat_body import ChatBody, read_chat
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import includes_usage
from tandem.cluster.gateway.serving.received import Posted, received
from tandem.cluster.gateway.serving.sampling_fields import checked_beams


async def chat_completions(
    text: TextServices, context: GatewayContext, request: Request, principal: Principal
) -> Response:
    """One conversation, n choices."""
    began_s = context.clock()
    body, size = await received(text, request, principal, partial(_chat_body, text))
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    names = FieldNames({}, "messages", limit, messages=None, parts=())
    posted = Posted(request, principal, body, size, began_s)
    async with conversation_of(text, context, posted, names, "chatcmpl-") as chat:
        return chat.answer(_format(text, body, chat), with_logprobs=chat.logprobs is not None)


def _format(text: TextServices, body: ChatBody, chat: PreparedChat) -> ChatFormat:
    make = ChatFormat if chat.output.is_plain else partial(ParsedChatFormat, chat.output)
    return make(
        text.detokenizers,
        chat.head,
        with_usage=includes_usage(body),
        counts=chunk_counts(body, chat.parts),
        prompt_ids=chat.prompt.token_ids if body.return_token_ids else None,
        with_prompt_logprobs=body.prompt_logprobs is not None,
        metrics=draft_metrics(text, body, chat.parts),
    )


def _chat_body(text: TextServices, fields: dict[str, Any], ignored: IgnoredFields) -> ChatBody:
    return checked_beams(read_chat(fields, text.settings, ignored), text.settings.max_logprobs, text.batching_policy)
