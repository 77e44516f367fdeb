"""The route table and the app. Every route names its auth level here, and nowhere else.

`build_gateway_app` is called by the gateway deployment, by `tandem run-batch` and by tests. The table binds each
handler to the services that it takes; a call adds the request and its principal. Errors of every kind leave in the
contract's shape. Next, for a chat: openai/chat_completions.py.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache, partial
from typing import Any, NamedTuple

from fastapi import FastAPI
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.cluster.gateway.admin import (
    adapter_routes,
    drain_routes,
    group_routes,
    request_routes,
    route_explain,
    tenant_routes,
)
from tandem.cluster.gateway.anthropic import messages
from tandem.cluster.gateway.anthropic.anthropic_errors import ANTHROPIC_API, AnthropicErrorBody
from tandem.cluster.gateway.anthropic.messages_body import CountTokensBody, MessagesBody
from tandem.cluster.gateway.app import probes
from tandem.cluster.gateway.app.openapi import openapi_document
from tandem.cluster.gateway.batches import batch_routes
from tandem.cluster.gateway.batches.batch_lines import ENDPOINTS
from tandem.cluster.gateway.batches.batch_records import BatchBody
from tandem.cluster.gateway.batches.batch_routes import Batches
from tandem.cluster.gateway.batches.line_calls import LineHandler
from tandem.cluster.gateway.files import file_routes
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Authenticator, AuthLevel, Principal, check_level, sent_authorization
from tandem.cluster.gateway.http.error_answers import ROUTE_LIST, on_tandem_error
from tandem.cluster.gateway.http.gateway_metrics import Scrapes
from tandem.cluster.gateway.http.middleware import RequestMiddleware
from tandem.cluster.gateway.http.origins import Origins
from tandem.cluster.gateway.idempotency.key_store import KeyStore
from tandem.cluster.gateway.idempotency.keyed_requests import HEADER, KeyedRequests
from tandem.cluster.gateway.openai.chat_completions import chat_completions
from tandem.cluster.gateway.openai.completions import completions
from tandem.cluster.gateway.openai.embeddings import embeddings
from tandem.cluster.gateway.openai.models import model, models
from tandem.cluster.gateway.openai.tokenize import detokenize, tokenize, tokenizer_info
from tandem.cluster.gateway.responses import background, input_items, responses
from tandem.cluster.gateway.responses.background import BackgroundResponses
from tandem.cluster.gateway.responses.response_store import ResponseStore
from tandem.cluster.gateway.responses.responses_body import ResponsesBody
from tandem.cluster.gateway.scoring import score_routes
from tandem.cluster.gateway.scoring.scoring_body import RerankBody, ScoreBody
from tandem.cluster.gateway.services.accounts import Accounts
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.answer import json_response
from tandem.cluster.gateway.ui import pages
from tandem.workers.messages.errors import TandemError

Handler = partial[Coroutine[Any, Any, Response]]
"""Is called with a request and its principal."""
SCORE = ("/v1/score", "/score")
RERANK = ("/v1/rerank", "/v2/rerank", "/rerank")
"""Paths of one route each, as in vLLM."""
GENERATING = {
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
    *(*SCORE, *RERANK),
}
"""Paths whose POST is a request to the groups, with a request line when it has ended."""
KEYED = (*ENDPOINTS, *SCORE, *RERANK, "/v1/messages", "/v1/batches")
"""Paths whose POST heeds an Idempotency-Key."""
SHUTDOWN_S = 10.0
NO_BATCHES = Batches(None, None)
"""Stands for those of a gateway that keeps no files."""
BODIES: dict[str, type[Struct]] = {
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": ResponsesBody,
    "/v1/batches": BatchBody,
    "/v1/messages": MessagesBody,
    **dict.fromkeys(SCORE, ScoreBody),
    **dict.fromkeys(RERANK, RerankBody),
    "/v1/messages/count_tokens": CountTokensBody,
}
ERRORS = {path: AnthropicErrorBody for path in BODIES if ANTHROPIC_API.has(path)}
"""Bodies and errors of the routes of newer APIs, for the OpenAPI document."""


class RouteSpec(NamedTuple):
    """One route: method, path, the key it requires, and its handler."""

    method: str
    path: str
    level: AuthLevel
    handler: Handler

    @property
    def description(self) -> str:
        """The handler's docstring."""
        return self.handler.func.__doc__ or ""

    @property
    def summary(self) -> str:
        """Its first sentence."""
        return " ".join(self.description.split()).partition(". ")[0].removesuffix(".") + "."


def route_table(
    text: TextServices,
    accounts: Accounts,
    context: GatewayContext,
    store: ResponseStore | None = None,
    batches: Batches = NO_BATCHES,
) -> tuple[RouteSpec, ...]:
    """All routes but the OpenAPI document's, which is made of them. store: None where responses are not stored.
    batches: with the files."""
    return (
        *_text_routes(text, context, store),
        *_batch_routes(text, context, batches),
        *_admin_routes(text, accounts, context),
        *_open_routes(text, accounts, context),
    )


def _text_routes(text: TextServices, context: GatewayContext, store: ResponseStore | None) -> tuple[RouteSpec, ...]:
    """Returns those that make, read and count text."""
    key, serving, made = AuthLevel.API_KEY, (text, context), BackgroundResponses(store, context)
    return (
        RouteSpec("POST", "/v1/chat/completions", key, partial(chat_completions, *serving)),
        RouteSpec("POST", "/v1/completions", key, partial(completions, *serving)),
        RouteSpec("POST", "/v1/responses", key, partial(responses.create_response, *serving, store, made)),
        RouteSpec("POST", "/v1/responses/input_tokens", key, partial(input_items.count_input_tokens, *serving, store)),
        RouteSpec("GET", "/v1/responses/{response_id}/input_items", key, partial(input_items.input_items, text, store)),
        RouteSpec("POST", "/v1/responses/{response_id}/cancel", key, partial(background.cancel_response, made)),
        RouteSpec("GET", "/v1/responses/{response_id}", key, partial(responses.show_response, text, made)),
        RouteSpec("DELETE", "/v1/responses/{response_id}", key, partial(responses.delete_response, text, store, made)),
        RouteSpec("POST", "/v1/messages", key, partial(messages.create_message, *serving)),
        RouteSpec("POST", "/v1/messages/count_tokens", key, partial(messages.count_tokens, *serving)),
        RouteSpec("POST", "/v1/embeddings", key, partial(embeddings, *serving)),
        RouteSpec("GET", "/v1/models", key, partial(models, *serving)),
        RouteSpec("GET", "/v1/models/{model:path}", key, partial(model, *serving)),
        *(RouteSpec("POST", path, key, partial(score_routes.score, *serving)) for path in SCORE),
        *(RouteSpec("POST", path, key, partial(score_routes.rerank, *serving)) for path in RERANK),
        RouteSpec("GET", "/tokenizer_info", key, partial(tokenizer_info, text)),
        RouteSpec("POST", "/tokenize", key, partial(tokenize, *serving)),
        RouteSpec("POST", "/detokenize", key, partial(detokenize, *serving)),
    )


def _batch_routes(text: TextServices, context: GatewayContext, batches: Batches) -> tuple[RouteSpec, ...]:
    """Returns those of files and batches."""
    key, serving, files = AuthLevel.API_KEY, (text, context), batches.files
    return (
        RouteSpec("POST", "/v1/files", key, partial(file_routes.upload_file, files, context)),
        RouteSpec("GET", "/v1/files", key, partial(file_routes.list_files, files)),
        RouteSpec("GET", "/v1/files/{file_id}", key, partial(file_routes.show_file, files)),
        RouteSpec("DELETE", "/v1/files/{file_id}", key, partial(file_routes.delete_file, files)),
        RouteSpec("GET", "/v1/files/{file_id}/content", key, partial(file_routes.file_content, files)),
        RouteSpec("POST", "/v1/batches", key, partial(batch_routes.create_batch, *serving, batches)),
        RouteSpec("GET", "/v1/batches", key, partial(batch_routes.list_batches, batches)),
        RouteSpec("GET", "/v1/batches/{batch_id}", key, partial(batch_routes.show_batch, batches)),
        RouteSpec("POST", "/v1/batches/{batch_id}/cancel", key, partial(batch_routes.cancel_batch, batches, context)),
    )


def _admin_routes(text: TextServices, accounts: Accounts, context: GatewayContext) -> tuple[RouteSpec, ...]:
    """Returns those that ask for the admin key."""
    admin, serving, tenants = AuthLevel.ADMIN, (text, context), (text, accounts)
    return (
        RouteSpec("POST", "/reset_prefix_cache", admin, partial(group_routes.reset_prefix_cache, context)),
        RouteSpec("GET", "/admin/groups", admin, partial(group_routes.list_groups, context)),
        RouteSpec("POST", "/admin/routes/explain", admin, partial(route_explain.explain, *tenants, context)),
        RouteSpec("POST", "/admin/groups/{group}/record", admin, partial(group_routes.record_group, context)),
        RouteSpec("POST", "/admin/drain", admin, partial(drain_routes.drain, *serving)),
        RouteSpec("GET", "/admin/tenants", admin, partial(tenant_routes.list_tenants, accounts)),
        RouteSpec("POST", "/admin/tenants", admin, partial(tenant_routes.add_tenant, *tenants)),
        RouteSpec("GET", "/admin/tenants/{name}", admin, partial(tenant_routes.show_tenant, accounts)),
        RouteSpec("PATCH", "/admin/tenants/{name}", admin, partial(tenant_routes.change_tenant, *tenants)),
        RouteSpec("DELETE", "/admin/tenants/{name}", admin, partial(tenant_routes.remove_tenant, accounts)),
        RouteSpec("POST", "/admin/tenants/{name}/rotate-key", admin, partial(tenant_routes.rotate_key, *tenants)),
        RouteSpec("GET", "/admin/requests/{request_id:path}", admin, partial(request_routes.show_request, context)),
        RouteSpec("POST", "/v1/load_lora_adapter", admin, partial(adapter_routes.load_adapter, *serving)),
        RouteSpec("POST", "/v1/unload_lora_adapter", admin, partial(adapter_routes.unload_adapter, *serving)),
    )


def _open_routes(text: TextServices, accounts: Accounts, context: GatewayContext) -> tuple[RouteSpec, ...]:
    """Returns probes, metrics and pages for a browser."""
    metrics, none = AuthLevel.METRICS, AuthLevel.OPEN
    return (
        RouteSpec("GET", "/livez", none, partial(probes.live)),
        RouteSpec("GET", "/ping", none, partial(probes.live)),
        RouteSpec("POST", "/ping", none, partial(probes.live)),
        RouteSpec("GET", "/health", none, partial(probes.ready, context)),
        RouteSpec("GET", "/readyz", none, partial(probes.ready, context)),
        RouteSpec("GET", "/version", none, partial(probes.show_version)),
        RouteSpec("GET", "/load", none, partial(probes.load, context)),
        RouteSpec("GET", "/metrics", metrics, partial(probes.metrics, accounts, context, Scrapes())),
        *(RouteSpec("GET", path, none, partial(page)) for path, page in pages.served(text.settings).items()),
    )


def line_handlers(specs: Iterable[RouteSpec]) -> dict[str, LineHandler]:
    """The handlers of the routes that lines of batches may ask for, by path."""
    return {spec.path: spec.handler for spec in specs if spec.method == "POST" and spec.path in ENDPOINTS}


def build_gateway_app(
    text: TextServices,
    accounts: Accounts,
    context: GatewayContext,
    store: ResponseStore | None = None,
    batches: Batches = NO_BATCHES,
    keys: KeyStore | None = None,
) -> FastAPI:
    """The ASGI app over the services. Its lifespan ends their tasks and threads. store, batches: as in route_table().
    keys: None where no Idempotency-Key is taken. Its state has line_handlers, for who runs batches."""
    lifespan = _lifespan(text, context)
    app = FastAPI(title="Tandem", openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.add_exception_handler(TandemError, on_tandem_error)
    app.add_exception_handler(HTTPException, on_tandem_error)
    app.add_middleware(Origins, allowed=text.settings.allowed_origins, is_open=lambda: accounts.auth.is_open)
    app.add_middleware(
        RequestMiddleware,
        metrics=context.metrics,
        draining=context.draining,
        tenancy=accounts.tenancy,
        max_bodies_bytes=text.settings.max_bodies_bytes,
        apis=(ANTHROPIC_API,),
        access_log=context.access_log,
        on_record=context.records.add,
    )
    specs = route_table(text, accounts, context, store, batches)
    keyed = KeyedRequests(text, context, keys)
    app.state.line_handlers = line_handlers(specs)
    document = RouteSpec("GET", ROUTE_LIST, AuthLevel.OPEN, _document_handler(specs))
    for spec in specs if text.settings.disable_fastapi_docs else (*specs, document):
        endpoint = _endpoint(spec, accounts.auth, context, keyed)
        app.router.routes.append(Route(spec.path, endpoint, methods=[spec.method]))
    return app


def _lifespan(text: TextServices, context: GatewayContext) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await context.tasks.close(SHUTDOWN_S)
        text.workers.close()
        if context.adapters is not None:
            context.adapters.close()

    return lifespan


def _endpoint(
    spec: RouteSpec, auth: Authenticator, context: GatewayContext, keyed: KeyedRequests
) -> Callable[[Request], Awaitable[Response]]:
    """The route's ASGI endpoint, which authenticates before the body is read."""
    takes_keys = spec.method == "POST" and spec.path in KEYED
    is_to_generate = spec.method == "POST" and spec.path in GENERATING

    async def endpoint(request: Request) -> Response:
        if request.scope["path"].endswith("/") and spec.path != "/":
            raise HTTPException(404)  # of a path with a name that may have slashes; no other route ends with one
        request.scope["tandem.route"] = spec.path
        if is_to_generate:
            request.scope["tandem.is_to_generate"] = True
            if context.tracing is not None:
                request.scope["tandem.trace"] = context.tracing.begin(request.headers)
        principal = check_level(spec.level, auth, sent_authorization(request.headers))
        if spec.level in (AuthLevel.API_KEY, AuthLevel.ADMIN):
            request.scope["tandem.tenant"] = principal.tenant
        if spec.method == "POST" and spec.level is not AuthLevel.OPEN:
            context.draining.check()
        if takes_keys and HEADER in request.headers:
            return await keyed.answer(spec.handler, request, principal)
        return await spec.handler(request, principal)

    endpoint.__doc__ = spec.description
    endpoint.__dict__["auth_level"] = spec.level
    return endpoint


def _document_handler(specs: Sequence[RouteSpec]) -> Handler:
    """Serves the OpenAPI document."""
    own = (ROUTE_LIST, "GET", AuthLevel.OPEN, str(_document.__doc__))
    return partial(_document, (*((s.path, s.method, s.level, s.summary) for s in specs), own))


async def _document(routes: Sequence[tuple[str, str, AuthLevel, str]], _: Request, __: Principal) -> Response:
    """This document."""
    return _document_of(routes)


@cache
def _document_of(routes: Sequence[tuple[str, str, AuthLevel, str]]) -> Response:
    return json_response(openapi_document(routes, BODIES, ERRORS))
