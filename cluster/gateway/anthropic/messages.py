"""POST /v1/messages and /v1/messages/count_tokens."""

from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.anthropic.messages_answer import MessagesFormat
from tandem.cluster.gateway.anthropic.messages_body import read_count_tokens, read_messages
from tandem.cluster.gateway.anthropic.messages_to_chat import chat_of
from tandem.cluster.gateway.conversation.blocks import blocks_of
from tandem.cluster.gateway.conversation.chat_prompt import chat_prompt
from tandem.cluster.gateway.conversation.conversation import Conversation, Received, prepare_chat
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.services.model_lookup import served_model
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import json_response, text_answer
from tandem.cluster.gateway.serving.prompts import Asked
from tandem.cluster.gateway.serving.received import received
from tandem.workers.messages.request import Usage

NAMES = Asked("messages", "max_tokens")
PREFIX = "msg_"


async def create_message(
    text: TextServices, context: GatewayContext, request: Request, principal: Principal
) -> Response:
    """One answer to a conversation, in Anthropic's API."""
    began_s = context.clock()
    (chat, names), size = await received(text, request, principal, lambda fields: chat_of(read_messages(fields), text))
    posted = Received(
        request=request,
        principal=principal,
        body=chat,
        size=size,
        began_s=began_s,
        id_prefix=PREFIX,
        names=NAMES,
        field_of=names.of,
    )
    with ExitStack() as held:
        with names.in_refusals():
            conversation = await prepare_chat(text, context, posted, held)
        head = conversation.head
        style = MessagesFormat(head.id, head.model, blocks_of(conversation.output), lambda: _counted(conversation))
        return text_answer(context, conversation.generation, style, chat, held, with_logprobs=False)


async def count_tokens(text: TextServices, context: GatewayContext, request: Request, principal: Principal) -> Response:
    """The number of tokens of a conversation's prompt, in Anthropic's API."""
    (chat, names), size = await received(
        text, request, principal, lambda fields: chat_of(read_count_tokens(fields), text)
    )
    served_model(text.model_names, context.adapters, chat.model, principal)
    with names.in_refusals():
        prompt = await text.workers.run(principal.tenant, size, chat_prompt, text, chat)
    return json_response({"input_tokens": len(prompt.token_ids)})


def _counted(conversation: Conversation) -> Usage:
    """The bill of a stream that begins."""
    return Usage(
        prompt_tokens=len(conversation.prompt.token_ids),
        completion_tokens=0,
        cached_tokens=conversation.parts[0].cached_tokens or 0,
    )
