"""GET routes: models, liveness, readiness, version, load, metrics. Cheap, and none of them changes anything."""

import asyncio
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.responses import Response

from tandem.cluster.gateway.http.auth import Principal, may_see_tenants
from tandem.cluster.gateway.openai.handlers import json_response
from tandem.cluster.gateway.openai.model_lookup import all_shown, model_object, shown_model
from tandem.cluster.gateway.services import GatewayState
from tandem.workers.messages.errors import RequestRefused

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


async def models(state: GatewayState, _: Request, principal: Principal) -> Response:
    """All names that `model` may take: the base's, public adapters and the tenant's own; for an admin all adapters."""
    data = [model_object(state, served, principal) for served in all_shown(state, principal)]
    return json_response({"object": "list", "data": data})


async def model(state: GatewayState, request: Request, principal: Principal) -> Response:
    """One model; 404 in the words of an unknown one."""
    served = shown_model(state, request.path_params["model"], principal)
    return json_response(model_object(state, served, principal))


async def live(_: GatewayState, __: Request, ___: Principal) -> Response:
    """This process answers."""
    return json_response({"status": "ok"})


async def ready(state: GatewayState, _: Request, __: Principal) -> Response:
    """200 while a group takes requests and makes progress and the service is not on its way out, else 503."""
    state.draining.check()
    if not state.dispatch.ready():
        raise RequestRefused("No worker group is ready.", code="service_unavailable", status=503)
    return json_response({"status": "ok"})


async def show_version(_: GatewayState, __: Request, ___: Principal) -> Response:
    """The installed version."""
    try:
        return json_response({"version": version("tandem-serve")})
    except PackageNotFoundError:
        return json_response({"version": "unknown"})


async def load(state: GatewayState, _: Request, __: Principal) -> Response:
    """Requests running and waiting in the groups, and HTTP requests in flight in the gateways, this one left out."""
    in_flight = state.draining.in_flight - 1 + state.peers.in_flight()
    return json_response(dict(state.dispatch.load()) | {"http_requests_in_hand": in_flight})


async def metrics(state: GatewayState, request: Request, _: Principal) -> Response:
    """Metrics of the groups, then of the gateways. Families that name tenants are for admins, unless there is neither
    key nor tenant. Scrapes at the same time get the same text."""
    with_tenants = may_see_tenants(state.auth, request.headers.get("authorization"))
    text = await state.scrapes.text(with_tenants, lambda: _metrics(state, with_tenants=with_tenants))
    return Response(text, headers={"content-type": PROMETHEUS_TEXT})


async def _metrics(state: GatewayState, *, with_tenants: bool) -> bytes:
    """Renders on threads: with many tenants that takes longer than streams should wait."""
    text = await state.dispatch.metrics(with_tenants=with_tenants)
    if text and not text.endswith("\n"):
        text += "\n"
    own = await asyncio.to_thread(generate_latest, state.registry)
    of_tenants = await asyncio.to_thread(generate_latest, state.metrics.tenants) if with_tenants else b""
    return text.encode() + await state.peers.merge(own, of_tenants)
