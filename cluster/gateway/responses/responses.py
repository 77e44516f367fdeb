"""POST /v1/responses, and GET and DELETE of a stored one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.conversation.blocks import blocks_of
from tandem.cluster.gateway.conversation.conversation import PreparedChat, conversation_of
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.responses.items_to_chat import chat_of, given_items
from tandem.cluster.gateway.responses.response_store import PREFIX, ResponseStore, StoredResponse
from tandem.cluster.gateway.responses.responses_answer import ResponsesFormat
from tandem.cluster.gateway.responses.responses_body import FunctionCallItem, Item, ResponsesBody, read_responses
from tandem.cluster.gateway.schemas.reading import unsupported
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import json_response
from tandem.cluster.gateway.serving.received import PARSED_FASTER, Posted, ignored_fields, received

Store = ResponseStore | None
"""None where there is no Redis, or nothing is to be stored."""


async def create_response(
    text: TextServices, context: GatewayContext, store: Store, request: Request, principal: Principal
) -> Response:
    """One answer to a conversation of items, which may go on from a stored response."""
    began_s = context.clock()
    body, size = await received(text, request, principal, lambda fields, _: read_responses(fields))
    before: list[Item] = []
    if body.store and store is None:
        raise unsupported("store", f"store may only be false: {NO_STORE}")
    if body.previous_response_id is not None:
        known = checked(store, "previous_response_id")
        stored = await known.get(principal.tenant, body.previous_response_id, "previous_response_id")
        before, size = stored.items, size + len(stored.response)
    chat_body, names = await text.workers.run(
        principal.tenant, size // PARSED_FASTER, chat_of, body, before, text.settings, ignored_fields(request)
    )
    posted = Posted(request, principal, chat_body, size, began_s)
    async with conversation_of(text, context, posted, names, PREFIX) as chat:
        keeper = store if body.store is not False else None
        fields = object_fields(body, chat, stores=keeper is not None)
        style = ResponsesFormat(fields, blocks_of(chat.output), context.wall_clock)
        if keeper is None:
            return chat.answer(style)
        return chat.answer(
            style, before_end=Keeping(keeper, principal.tenant, style, [*before, *given_items(body)]).keep
        )


async def show_response(store: Store, request: Request, principal: Principal) -> Response:
    """A stored response."""
    _check_query(request)
    stored = await checked(store, None).get(principal.tenant, request.path_params["response_id"])
    return Response(stored.response, media_type="application/json")


async def delete_response(store: Store, request: Request, principal: Principal) -> Response:
    """Deletes a stored response; others that went on from it stay."""
    _check_query(request)
    response_id = request.path_params["response_id"]
    await checked(store, None).delete(principal.tenant, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


NO_STORE = "this service keeps no responses (--response-store-ttl 0, or no Redis)."


def checked(store: Store, param: str | None) -> ResponseStore:
    """The store. RequestRefused where there is none."""
    if store is None:
        name = param or "response_id"
        raise unsupported(name, f"{name} is not supported: {NO_STORE}")
    return store


@dataclass(frozen=True)
class Keeping:
    """A response that is to be stored once it is complete. items: of its conversation so far."""

    store: ResponseStore
    tenant: str
    style: ResponsesFormat
    items: Sequence[Item]

    async def keep(self) -> None:
        """Stores it."""
        final = self.style.final
        assert final is not None, "it is complete"
        output = [item for item in msgspec.convert(final["output"], list[Item]) if not _is_cut_call(item)]
        stored = StoredResponse(msgspec.json.encode(final), [*self.items, *output])
        await self.store.keep(self.tenant, final["id"], stored)


def _is_cut_call(item: Item) -> bool:
    """Returns whether a call's arguments ended in the middle: no template can render it, so the next request would be
    refused for it."""
    if not isinstance(item, FunctionCallItem):
        return False
    try:
        msgspec.json.decode(item.arguments or "{}")
    except msgspec.DecodeError:
        return True
    return False


def object_fields(body: ResponsesBody, chat: PreparedChat, *, stores: bool) -> dict[str, Any]:
    """The fields of the response object that are known before the answer."""
    head, sampling = chat.head, chat.parts[0].request.sampling
    tools = [{"description": None, "parameters": None, "strict": None, **tool} for tool in _plain(body.tools or [])]
    text = {"format": {"type": "text"}, "verbosity": "medium", **(_plain(body.text) or {})}
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "completed_at": None,
        "model": head.model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **(_plain(body.reasoning) or {})},
        "service_tier": "default",
        "store": stores,
        "temperature": sampling.temperature,
        "text": text,
        "tool_choice": _plain(body.tool_choice) or "auto",
        "tools": tools,
        "top_logprobs": 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _check_query(request: Request) -> None:
    for name in request.query_params:
        raise unsupported(name, f"The query parameter {printable(name)} is not supported.")
