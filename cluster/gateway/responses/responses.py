"""POST /v1/responses, and GET and DELETE of a stored one."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
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
from tandem.cluster.gateway.openai.token_formatter import TokenFormatter
from tandem.cluster.gateway.responses.background import BackgroundResponses, BackgroundRun
from tandem.cluster.gateway.responses.events.event_log import EventLog
from tandem.cluster.gateway.responses.items_to_chat import Placed, chat_of, given_items, placed_items
from tandem.cluster.gateway.responses.response_items import FunctionCallItem, Item, answered_items
from tandem.cluster.gateway.responses.response_store import (
    NO_STORE,
    PREFIX,
    ResponseStore,
    Store,
    StoredResponse,
    checked,
)
from tandem.cluster.gateway.responses.response_tools import custom_names, held_text
from tandem.cluster.gateway.responses.responses_answer import Additions, ResponsesFormat
from tandem.cluster.gateway.responses.responses_body import THINKING, ResponsesBody, read_query, read_responses
from tandem.cluster.gateway.responses.truncation import TOO_LONG, shortened
from tandem.cluster.gateway.schemas.reading import invalid
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import json_response
from tandem.cluster.gateway.serving.received import PARSED_FASTER, Posted, begin_ignored, ignored_fields, received
from tandem.workers.messages.errors import RequestRefused

DIGITS = 15
"""Digits of a sequence number that count: no event has as many."""


async def create_response(
    text: TextServices,
    context: GatewayContext,
    store: Store,
    background: BackgroundResponses,
    request: Request,
    principal: Principal,
) -> Response:
    """One answer to a conversation of items, which may go on from a stored response."""
    began_s = context.clock()
    body, size = await received(text, request, principal, read_responses)
    if body.background:
        checked(store, "background")
    if body.store and store is None:
        ignored_fields(request).note("store", f"store may only be false: {NO_STORE}")
    before, more = await conversation_before(body, store, principal)
    posted = Posted(request, principal, body, size + more, began_s)
    async with AsyncExitStack() as held:
        chat = await _prepared(text, context, posted, before, held)
        keeper = store if body.store is not False else None
        fields = object_fields(body, chat, stores=keeper is not None)
        called = held_text(body.tools, body.tool_choice)
        blocks = blocks_of(chat.output, None if called is None else called.name)
        style = ResponsesFormat(fields, blocks, context.wall_clock, _additions(text, body, chat))
        with_logprobs = chat.logprobs is not None
        if keeper is None:
            return chat.answer(style, with_logprobs=with_logprobs)
        keeping = Keeping(keeper, principal.tenant, style, [*before, *given_items(body)])
        if body.background:
            events = EventLog(style.announcement()) if body.stream else None
            run = BackgroundRun(principal.tenant, style, keeping.stored_of, events)
            await background.begin(run)
            return background.start(run, chat.answer(style, with_logprobs=with_logprobs))
        return chat.answer(style, with_logprobs=with_logprobs, before_end=keeping.keep)


async def conversation_before(body: ResponsesBody, store: Store, principal: Principal) -> tuple[list[Item], int]:
    """The items of the conversation that goes on, and its size in bytes."""
    if body.previous_response_id is None:
        return [], 0
    known = checked(store, "previous_response_id")
    stored = await known.get(principal.tenant, body.previous_response_id, "previous_response_id")
    if not stored.is_over:
        text = f"The response {printable(body.previous_response_id)} has not ended, or was cancelled."
        raise invalid("previous_response_id", text)
    return stored.items, len(stored.response)


async def _prepared(
    text: TextServices,
    context: GatewayContext,
    posted: Posted[ResponsesBody],
    before: Sequence[Item],
    held: AsyncExitStack,
) -> PreparedChat:
    """The conversation, shortened if it is too long and may be."""
    body, tenant, ignored = posted.body, posted.principal.tenant, ignored_fields(posted.request)
    items = placed_items(body, before)

    async def prepare(items: Sequence[Placed]) -> PreparedChat:
        work = posted.size // PARSED_FASTER
        chat_body, names = await text.workers.run(tenant, work, chat_of, body, items, text.settings, ignored)
        asked = Posted(posted.request, posted.principal, chat_body, posted.size, posted.began_s)
        return await held.enter_async_context(conversation_of(text, context, asked, names, PREFIX))

    try:
        return await prepare(items)
    except RequestRefused as error:
        if body.truncation != "auto" or error.code not in TOO_LONG:
            raise
        return await prepare(await text.workers.run(tenant, posted.size, shortened, text, body, items))


def _additions(text: TextServices, body: ResponsesBody, chat: PreparedChat) -> Additions:
    return Additions(
        formatter=None if chat.logprobs is None else TokenFormatter(text.detokenizers),
        seals=THINKING in (body.include or ()),
        customs=custom_names(body.tools),
    )


async def show_response(
    text: TextServices, background: BackgroundResponses, request: Request, principal: Principal
) -> Response:
    """A stored response, or how far one of the background is, or its events."""
    key = principal.tenant, request.path_params["response_id"]
    query = read_query(request.query_params.multi_items(), ("stream", "starting_after"), begin_ignored(text, request))
    if (first := _first_event(query)) is not None:
        return await background.stream(*key, first)
    stored = await background.current(*key)
    return Response(stored.response, media_type="application/json")


async def delete_response(
    text: TextServices, store: Store, background: BackgroundResponses, request: Request, principal: Principal
) -> Response:
    """Deletes a stored response; others that went on from it stay, and one of the background ends."""
    read_query(request.query_params.multi_items(), (), begin_ignored(text, request))
    response_id = request.path_params["response_id"]
    await checked(store, None).delete(principal.tenant, response_id)
    background.end(principal.tenant, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


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
        await self.store.keep(self.tenant, final["id"], self.stored_of(final))

    def stored_of(self, final: dict[str, Any]) -> StoredResponse:
        """Returns what is stored of an object."""
        return StoredResponse(msgspec.json.encode(final), [*self.items, *kept_output(final["output"])])


def kept_output(output: Sequence[dict[str, Any]]) -> list[Item]:
    """The items of an answer that the next request goes on from."""
    return [item for item in answered_items(output) if not _is_cut_call(item)]


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
    tools = [_shown_tool(tool) for tool in _plain(body.tools or [])]
    text = {"format": {"type": "text"}, "verbosity": "medium", **(_plain(body.text) or {})}
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "completed_at": None,
        "model": head.model,
        "background": body.background is True,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
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
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    absent = ("description", "parameters", "strict") if tool["type"] == "function" else ("description", "format")
    return {**dict.fromkeys(absent), **tool}


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _first_event(query: Mapping[str, str]) -> int | None:
    """The sequence number of the first event that the query asks for; None where it asks for none."""
    stream, after = (query.get(name) for name in ("stream", "starting_after"))
    if stream not in (None, "true", "false"):
        raise invalid("stream", f"stream must be true or false, not {printable(stream)}.")
    if after is None:
        return 0 if stream == "true" else None
    if stream != "true":
        raise invalid("starting_after", "starting_after needs stream=true.")
    if not (after.isascii() and after.isdecimal()):
        raise invalid("starting_after", f"starting_after must be an integer from 0 on, not {printable(after)}.")
    return int(after.lstrip("0")[:DIGITS] or 0) + 1
