"""GET /v1/responses/{id}/input_items and POST /v1/responses/input_tokens: the input of a response, as items and as a
number of tokens."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.conversation.chat_prompt import chat_prompt
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.responses.items_to_chat import chat_of, placed_items
from tandem.cluster.gateway.responses.response_items import Item
from tandem.cluster.gateway.responses.response_store import Store, StoredResponse, checked
from tandem.cluster.gateway.responses.responses import conversation_before, kept_output
from tandem.cluster.gateway.responses.responses_body import ResponsesBody, read_query, read_responses
from tandem.cluster.gateway.schemas.reading import invalid
from tandem.cluster.gateway.services.model_lookup import served_model
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import json_response
from tandem.cluster.gateway.serving.received import begin_ignored, ignored_fields, received

MOST = 100
PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


async def input_items(text: TextServices, store: Store, request: Request, principal: Principal) -> Response:
    """The items that a stored response answers, those of the conversation before included."""
    known, ignored = ("limit", "order", "after"), begin_ignored(text, request)
    query = _checked(read_query(request.query_params.multi_items(), known, ignored))
    response_id = request.path_params["response_id"]
    stored = await checked(store, None).get(principal.tenant, response_id)
    return await asyncio.to_thread(_page, stored, response_id, query)  # a conversation may be long


def _page(stored: StoredResponse, response_id: str, query: Mapping[str, str]) -> Response:
    shown = _shown(stored, response_id.removeprefix("resp_"))
    if query.get("order", "desc") == "desc":
        shown.reverse()
    if (after := query.get("after")) is not None:
        at = next((i for i, item in enumerate(shown) if item["id"] == after), None)
        if at is None:
            raise invalid("after", f"after: the response has no input item {printable(after)}.")
        shown = shown[at + 1 :]
    data = shown[: int(query.get("limit", "20"))]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return json_response({"object": "list", "data": data, **ends, "has_more": len(shown) > len(data)})


async def count_input_tokens(
    text: TextServices, context: GatewayContext, store: Store, request: Request, principal: Principal
) -> Response:
    """The number of tokens of a response's prompt."""
    body, size = await received(text, request, principal, read_responses)
    served_model(text.model_names, context.adapters, body.model, principal)
    before, more = await conversation_before(body, store, principal)
    count = await text.workers.run(principal.tenant, size + more, _count, text, body, before, request)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


def _count(text: TextServices, body: ResponsesBody, before: Sequence[Item], request: Request) -> int:
    ignored = ignored_fields(request)
    chat, names = chat_of(body, placed_items(body, before), text.settings, ignored)
    with names.in_refusals():
        return len(chat_prompt(text, chat, ignored.named(names.of)).token_ids)


def _checked(query: dict[str, str]) -> dict[str, str]:
    """The query, whose values are right. RequestRefused for others."""
    for name, value in query.items():
        if name == "limit" and not (value.isascii() and value.isdecimal() and 1 <= int(value[:9]) <= MOST):
            raise invalid("limit", f"limit must be a number from 1 to {MOST}.")
        if name == "order" and value not in ("asc", "desc"):
            raise invalid("order", 'order must be one of "asc", "desc".')
    return query


def _shown(stored: StoredResponse, number: str) -> list[dict[str, Any]]:
    """The input items, oldest first, each with an id and its texts as parts."""
    count = len(stored.items) - len(kept_output(msgspec.json.decode(stored.response)["output"]))
    shown = []
    for i, item in enumerate(stored.items[:count]):
        plain = msgspec.to_builtins(item)
        plain.setdefault("id", f"{PREFIXES[plain['type']]}_{number}{i}")
        plain.setdefault("status", "completed")
        if plain["type"] == "message" and isinstance(plain["content"], str):
            kind = "output_text" if plain["role"] == "assistant" else "input_text"
            plain["content"] = [{"type": kind, "text": plain["content"]}]
        for part in plain.get("content", ()):
            if part["type"] == "output_text":
                part.update(annotations=[], logprobs=[])
        if plain["type"] == "reasoning":
            plain.setdefault("summary", [])
        shown.append(plain)
    return shown
