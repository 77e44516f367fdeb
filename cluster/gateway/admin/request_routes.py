"""GET /admin/requests/{id}: the record of a request that has ended. `tandem explain` words it."""

from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.http.middleware import MAX_ID_CHARS
from tandem.cluster.gateway.records.request_record import named
from tandem.cluster.gateway.serving.answer import json_response
from tandem.workers.messages.errors import RequestRefused


async def show_request(context: GatewayContext, request: Request, _: Principal) -> Response:
    """Times and counts of a request that has ended lately, by its x-request-id, whichever gateway it went through.
    `tenant` in the query: whose request, where several have used the id."""
    request_id, tenant = request.path_params["request_id"], request.query_params.get("tenant", "")
    is_short = max(len(request_id), len(tenant)) <= MAX_ID_CHARS
    record = await context.records.find(request_id, tenant) if is_short else None
    if record is None:
        of_whom = f" of tenant {printable(tenant, MAX_ID_CHARS)}" if tenant else ""
        shown = f"request {printable(request_id, MAX_ID_CHARS)}{of_whom}"
        message = f"No gateway remembers a {shown}: it has not ended yet, or too long ago."
        raise RequestRefused(message, code="not_found", status=404)
    return json_response(named(record))
