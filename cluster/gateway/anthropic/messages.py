"""POST /v1/messages and /v1/messages/count_tokens."""

from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.anthropic.messages_answer import MessagesFormat
from tandem.cluster.gateway.anthropic.messages_body import read_count_tokens, read_messages
from tandem.cluster.gateway.anthropic.messages_to_chat import chat_of
from tandem.cluster.gateway.conversation.blocks import blocks_of
from tandem.cluster.gateway.conversation.chat_prompt import chat_prompt
from tandem.cluster.gateway.conversation.conversation import PreparedChat, conversation_of
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.services.model_lookup import served_model
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import json_response
from tandem.cluster.gateway.serving.received import Posted, ignored_fields, received
from tandem.workers.messages.request import Usage

PREFIX = "msg_"


async def create_message(
    text: TextServices, context: GatewayContext, request: Request, principal: Principal
) -> Response:
    """One answer to a conversation, in Anthropic's API."""
    began_s = context.clock()
    (body, names), size = await received(
        text, request, principal, lambda fields, ignored: chat_of(read_messages(fields, ignored), text, ignored)
    )
    posted = Posted(request, principal, body, size, began_s)
    async with conversation_of(text, context, posted, names, PREFIX) as chat:
        head = chat.head
        return chat.answer(MessagesFormat(head.id, head.model, blocks_of(chat.output), lambda: _counted(chat)))


async def count_tokens(text: TextServices, context: GatewayContext, request: Request, principal: Principal) -> Response:
    """The number of tokens of a conversation's prompt, in Anthropic's API."""
    (chat, names), size = await received(
        text, request, principal, lambda fields, ignored: chat_of(read_count_tokens(fields, ignored), text, ignored)
    )
    served_model(text.model_names, context.adapters, chat.model, principal)
    with names.in_refusals():
        ignored = ignored_fields(request).named(names.of)
        prompt = await text.workers.run(principal.tenant, size, chat_prompt, text, chat, ignored)
    return json_response({"input_tokens": len(prompt.token_ids)})


def _counted(chat: PreparedChat) -> Usage:
    """The bill of a stream that begins."""
    return Usage(
        prompt_tokens=len(chat.prompt.token_ids),
        completion_tokens=0,
        cached_tokens=chat.parts[0].cached_tokens or 0,
    )
