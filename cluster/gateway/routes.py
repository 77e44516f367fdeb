"""The route table and the app. Every route names its auth level here, and nowhere else.

`build_gateway_app` is called by the gateway deployment, by `tandem run-batch` and by tests. Handlers get the state and
the principal; errors of every kind leave in the contract's shape.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.cluster.gateway.http.auth import AuthLevel, Principal, check_level
from tandem.cluster.gateway.http.error_answers import on_tandem_error
from tandem.cluster.gateway.http.middleware import Envelope
from tandem.cluster.gateway.http.origins import Origins
from tandem.cluster.gateway.openai import adapter_routes, handlers, probes, tenant_routes
from tandem.cluster.gateway.openai.openapi import openapi_document
from tandem.cluster.gateway.services import GatewayState
from tandem.workers.messages.errors import TandemError

Handler = Callable[[GatewayState, Request, Principal], Awaitable[Response]]
OPENAPI_PATH = "/openapi.json"
SHUTDOWN_S = 10.0


class RouteSpec(NamedTuple):
    """One route: method, path, the key it requires, and its handler."""

    method: str
    path: str
    level: AuthLevel
    handler: Handler


ROUTES: tuple[RouteSpec, ...] = (
    RouteSpec("POST", "/v1/chat/completions", AuthLevel.API_KEY, handlers.chat_completions),
    RouteSpec("POST", "/v1/completions", AuthLevel.API_KEY, handlers.completions),
    RouteSpec("GET", "/v1/models", AuthLevel.API_KEY, probes.models),
    RouteSpec("GET", "/v1/models/{model:path}", AuthLevel.API_KEY, probes.model),
    RouteSpec("POST", "/tokenize", AuthLevel.API_KEY, handlers.tokenize),
    RouteSpec("POST", "/detokenize", AuthLevel.API_KEY, handlers.detokenize),
    RouteSpec("GET", "/admin/tenants", AuthLevel.ADMIN, tenant_routes.list_tenants),
    RouteSpec("POST", "/admin/tenants", AuthLevel.ADMIN, tenant_routes.add_tenant),
    RouteSpec("GET", "/admin/tenants/{name}", AuthLevel.ADMIN, tenant_routes.show_tenant),
    RouteSpec("PATCH", "/admin/tenants/{name}", AuthLevel.ADMIN, tenant_routes.change_tenant),
    RouteSpec("DELETE", "/admin/tenants/{name}", AuthLevel.ADMIN, tenant_routes.remove_tenant),
    RouteSpec("POST", "/admin/tenants/{name}/rotate-key", AuthLevel.ADMIN, tenant_routes.rotate_key),
    RouteSpec("POST", "/v1/load_lora_adapter", AuthLevel.ADMIN, adapter_routes.load_adapter),
    RouteSpec("POST", "/v1/unload_lora_adapter", AuthLevel.ADMIN, adapter_routes.unload_adapter),
    RouteSpec("GET", "/livez", AuthLevel.OPEN, probes.live),
    RouteSpec("GET", "/ping", AuthLevel.OPEN, probes.live),
    RouteSpec("GET", "/health", AuthLevel.OPEN, probes.ready),
    RouteSpec("GET", "/readyz", AuthLevel.OPEN, probes.ready),
    RouteSpec("GET", "/version", AuthLevel.OPEN, probes.show_version),
    RouteSpec("GET", "/load", AuthLevel.OPEN, probes.load),
    RouteSpec("GET", "/metrics", AuthLevel.METRICS, probes.metrics),
)


def build_gateway_app(state: GatewayState) -> FastAPI:
    """The ASGI app over a state. Its lifespan ends the state's tasks and threads."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await state.tasks.close(SHUTDOWN_S)
        state.text.close()
        if state.adapters is not None:
            state.adapters.close()

    app = FastAPI(title="Tandem", openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.add_exception_handler(TandemError, on_tandem_error)
    app.add_exception_handler(HTTPException, on_tandem_error)
    app.add_middleware(Origins, allowed=state.settings.allowed_origins, is_open=lambda: state.auth.is_open)
    app.add_middleware(
        Envelope,
        metrics=state.metrics,
        draining=state.draining,
        tenancy=state.tenancy,
        max_bodies_bytes=state.settings.max_bodies_bytes,
    )
    specs = [*ROUTES, RouteSpec("GET", OPENAPI_PATH, AuthLevel.OPEN, _document_handler())]
    for spec in specs:
        app.router.routes.append(Route(spec.path, _endpoint(state, spec), methods=[spec.method]))
    return app


def _endpoint(state: GatewayState, spec: RouteSpec) -> Callable[[Request], Awaitable[Response]]:
    """The route's ASGI endpoint, which authenticates before the body is read."""

    async def endpoint(request: Request) -> Response:
        request.scope["tandem.route"] = spec.path
        principal = check_level(spec.level, state.auth, request.headers.get("authorization"))
        if spec.level in (AuthLevel.API_KEY, AuthLevel.ADMIN):
            request.scope["tandem.tenant"] = principal.tenant
        if spec.method == "POST":
            state.draining.check()
        return await spec.handler(state, request, principal)

    endpoint.__doc__ = spec.handler.__doc__
    endpoint.__dict__["auth_level"] = spec.level
    return endpoint


def _document_handler() -> Handler:
    """Serves the OpenAPI document, built once."""

    async def document(_: GatewayState, __: Request, ___: Principal) -> Response:
        """This document."""
        return answer

    specs = [*ROUTES, RouteSpec("GET", OPENAPI_PATH, AuthLevel.OPEN, document)]
    summaries = [(s.path, s.method, s.level, (s.handler.__doc__ or "").partition("\n")[0]) for s in specs]
    answer = handlers.json_response(openapi_document(summaries))
    return document
