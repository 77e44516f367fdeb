"""POST /reset_prefix_cache: an order to all groups."""

from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.reading import unsupported
from tandem.cluster.gateway.serving.answer import json_response
from tandem.workers.messages.errors import RequestRefused


async def reset_prefix_cache(context: GatewayContext, request: Request, _: Principal) -> Response:
    """Has every group forget the KV of its tiers that no running request uses."""
    for name in request.query_params:
        raise unsupported(name, f"The query parameter {printable(name)} is not supported.")
    if left := await context.dispatch.reset_prefix_caches():
        message = f"The order was given, but {len(left)} groups have not confirmed it yet: {', '.join(sorted(left))}."
        raise RequestRefused(message, code="service_unavailable", status=503)
    return json_response({"status": "ok"})
