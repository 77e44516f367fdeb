"""GET routes beside the APIs: liveness, readiness, version, load, metrics. Cheap, and none of them changes anything."""

import asyncio
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPEN_METRICS
from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal, may_see_tenants
from tandem.cluster.gateway.http.gateway_metrics import Scrapes, as_open_metrics
from tandem.cluster.gateway.services.accounts import Accounts
from tandem.cluster.gateway.serving.answer import json_response
from tandem.workers.messages.errors import RequestRefused

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


async def live(_: Request, __: Principal) -> Response:
    """This process answers."""
    return json_response({"status": "ok"})


async def ready(context: GatewayContext, _: Request, __: Principal) -> Response:
    """200 while a group takes requests and makes progress, or there need be none as the next request brings one, and
    the service is not on its way out; else 503."""
    context.draining.check()
    if not context.dispatch.ready():
        raise RequestRefused("No worker group is ready.", code="service_unavailable", status=503)
    return json_response({"status": "ok"} | ({"asleep": True} if context.dispatch.is_asleep else {}))


async def show_version(_: Request, __: Principal) -> Response:
    """The installed version."""
    try:
        return json_response({"version": version("tandem-serve")})
    except PackageNotFoundError:
        return json_response({"version": "unknown"})


async def load(context: GatewayContext, _: Request, __: Principal) -> Response:
    """Requests running and waiting in the groups, and HTTP requests in flight in the gateways, this one left out."""
    in_flight = context.draining.in_flight - 1 + context.peers.in_flight()
    return json_response(dict(context.dispatch.load()) | {"http_requests_in_hand": in_flight})


async def metrics(
    accounts: Accounts, context: GatewayContext, scrapes: Scrapes, request: Request, _: Principal
) -> Response:
    """Metrics of the groups, then of the gateways, in the form of OpenMetrics for who accepts it. Families that name
    tenants are for admins, unless there is neither key nor tenant. Scrapes at the same time get the same text."""
    with_tenants = may_see_tenants(accounts.auth, request.headers.get("authorization"))
    text = await scrapes.text(with_tenants, lambda: _metrics(context, with_tenants=with_tenants))
    if "application/openmetrics-text" in request.headers.get("accept", ""):
        return Response(await asyncio.to_thread(as_open_metrics, text), headers={"content-type": OPEN_METRICS})
    return Response(text, headers={"content-type": PROMETHEUS_TEXT})


async def _metrics(context: GatewayContext, *, with_tenants: bool) -> bytes:
    """Renders on threads: with many tenants that takes longer than streams should wait."""
    text = await context.dispatch.metrics(with_tenants=with_tenants)
    if text and not text.endswith("\n"):
        text += "\n"
    own = await asyncio.to_thread(generate_latest, context.metrics.registry)
    of_tenants = await asyncio.to_thread(generate_latest, context.metrics.tenants) if with_tenants else b""
    return text.encode() + await context.peers.merge(own, of_tenants)
