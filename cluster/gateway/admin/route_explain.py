"""POST /admin/routes/explain: what each group would cost a prompt, which is not sent."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.openai.tokenize import text_prompt
from tandem.cluster.gateway.schemas.chat_body import TokenizeBody, check_parts
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.schemas.openai_hints import TOKENIZE_HINTS, take_hints
from tandem.cluster.gateway.schemas.reading import ShortText, invalid, read
from tandem.cluster.gateway.services.accounts import Accounts
from tandem.cluster.gateway.services.model_lookup import served_model
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import json_response
from tandem.cluster.gateway.serving.received import ignored_fields, received
from tandem.cluster.gateway.serving.route_wishes import SESSION_HEADER
from tandem.cluster.routing.route_hint import hint_of, session_key
from tandem.cluster.tenants.tenant import DEFAULT_TENANT, salted
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import GenerationRequest, SamplingParams


class RouteBody(TokenizeBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /admin/routes/explain: the body of /tokenize; the answer's limit (absent: the context's), whose request it
    would be, and the salt of its KV."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    tenant: ShortText | None = None
    cache_salt: ShortText | None = None


async def explain(
    text: TextServices, accounts: Accounts, context: GatewayContext, request: Request, principal: Principal
) -> Response:
    """Costs of all groups for a prompt or messages, the cheapest first; nothing is sent there.

    The header x-session-id counts."""
    body, size = await received(text, request, principal, _route_body)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Send either prompt or messages.")
    tenant = await _tenant(accounts, body, principal)
    model = served_model(text.model_names, context.adapters, body.model, Principal(tenant, is_admin=True))
    prompt = await text.workers.run(principal.tenant, size, text_prompt, text, body, ignored_fields(request))
    room = max(1, text.max_model_len - len(prompt.token_ids))
    asked = GenerationRequest(
        request_id="",
        prompt_token_ids=prompt.token_ids,
        sampling=SamplingParams(max_tokens=min(room, body.max_tokens or room)),
        adapter=model.adapter,
        tenant=tenant,
        cache_salt=salted(tenant, body.cache_salt),
    )
    session = session_key(tenant, request.headers.get(SESSION_HEADER, ""))
    overlaps = await context.find_overlaps(asked)
    table = context.dispatch.route_table(asked, hint_of(asked, session=session, overlaps=overlaps))
    return json_response({"object": "route", "prompt_tokens": len(prompt.token_ids), **msgspec.to_builtins(table)})


async def _tenant(accounts: Accounts, body: RouteBody, principal: Principal) -> str:
    """Returns whose request it would be. RequestRefused 404 for a name that is no tenant's."""
    named = body.tenant or principal.tenant
    if named not in (principal.tenant, DEFAULT_TENANT) and named not in await accounts.tenants.all():
        raise RequestRefused(f"There is no tenant {named!r}.", code="tenant_not_found", status=404, param="tenant")
    return named


def _route_body(fields: dict[str, Any], ignored: IgnoredFields) -> RouteBody:
    take_hints(fields, TOKENIZE_HINTS, ignored)
    check_parts(fields.get("messages"))
    return read(fields, RouteBody)
