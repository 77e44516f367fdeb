"""Every error answer of the gateway: one body shape, the statuses and codes of the contract, retry headers.

Used by the routes, middleware.py (exceptions nobody caught) and sse.py (errors after the first byte). Never shows a
traceback, a path or another tenant's words.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from tandem.cluster.gateway.http.body import printable
from tandem.cluster.tenants.tenant_admission import OverLimit
from tandem.workers.messages.errors import GroupLost, RequestRefused, TandemError

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
MAX_RETRY_AFTER_S = 60
MAX_PATH_CHARS = 128
ROUTE_LIST = "/openapi.json"
_TOOL = re.compile(r"tools\[([0-9]+)\]")


ErrorForm = Callable[[RequestRefused, int | None], bytes]
"""Words a refusal as a body. Takes the seconds after which the client may come back, None where that is not known."""


class OtherApi(NamedTuple):
    """An API with error answers of its own. path: of its routes, and of all below it. id_header: the name under which
    its clients look for the request's id, besides x-request-id."""

    path: str
    error_form: ErrorForm
    id_header: bytes

    def has(self, path: str) -> bool:
        """True if a request to this path is one of this API."""
        return path == self.path or path.startswith(f"{self.path}/")


class ErrorDetail(msgspec.Struct, frozen=True):
    """The fields of the contract under "error"."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The whole body of an error answer."""

    error: ErrorDetail


def as_refusal(error: Exception) -> RequestRefused:
    """Any exception as the refusal that the client sees."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, GroupLost):
        return RequestRefused("The worker group was lost; try again.", code="service_unavailable", status=503)
    del error
    return RequestRefused("The server failed to process the request.", code="internal_error", status=500)


def error_json(refusal: RequestRefused, wait_s: int | None = None) -> bytes:
    """The contract's body. wait_s: seconds after which the client may come back, appended to the message."""
    status = refusal.status
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if refusal.code == "insufficient_quota":
        kind = "insufficient_quota"
    message = str(refusal)
    if wait_s is not None:
        message = f"{message.rstrip('.')}. Try again in {wait_s} s."
    detail = ErrorDetail(message, kind, refusal.param, refusal.code)
    return msgspec.json.encode(ErrorBody(detail))


def error_form(scope: Scope) -> ErrorForm:
    """The form of error answers that the API of a request has (middleware.py notes it)."""
    api: OtherApi | None = scope.get("tandem.api")
    return error_json if api is None else api.error_form


def error_response(
    error: Exception, form: ErrorForm = error_json, *, jitter: int = 0, own_headers: Mapping[str, str] | None = None
) -> Response:
    """The HTTP answer to an exception. `jitter` spreads Retry-After (any non-negative number). own_headers: to send
    too."""
    refusal = as_refusal(error)
    headers = dict(own_headers or {})
    wait_s = _retry_after_s(refusal, jitter)
    if wait_s is not None:
        headers["retry-after"] = str(wait_s)
    elif refusal.status == 429 or refusal.code == "request_poisoned":
        headers["x-should-retry"] = "false"  # OpenAI's clients heed it
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    said_s = wait_s if refusal.status == 429 else None
    return Response(form(refusal, said_s), refusal.status, headers, media_type="application/json")


def _retry_after_s(refusal: RequestRefused, jitter: int) -> int | None:
    """Returns when to come back, which quotas have spread already; None where that is no use, or not known."""
    if isinstance(refusal, OverLimit):
        wait_s = refusal.retry_after_s
        return None if wait_s is None else min(MAX_RETRY_AFTER_S, math.ceil(wait_s))
    if refusal.status not in (429, 503) or refusal.code == "insufficient_quota":
        return None
    return 1 + jitter % 5


async def on_tandem_error(request: Request, error: Exception) -> Response:
    """Exception handler of the app for TandemError and HTTPException."""
    form = error_form(request.scope)
    if isinstance(error, HTTPException):
        has_list = any(getattr(route, "path", None) == ROUTE_LIST for route in request.app.router.routes)
        listed = f" GET {ROUTE_LIST} lists the routes and their methods." if has_list else ""
        refusal = _routing_refusal(error.status_code, request.method, request.scope["path"], listed)
        request.scope["tandem.code"] = refusal.code
        headers = {"allow": _methods(request)} if error.status_code == 405 else error.headers
        return error_response(refusal, form, jitter=id(error) >> 4, own_headers=headers)
    assert isinstance(error, TandemError)
    request.scope["tandem.code"] = as_refusal(error).code
    if isinstance(error, RequestRefused):
        _name_own_tool(error, request.scope.get("tandem.left_out", ()))
    return error_response(error, form, jitter=id(error) >> 4)


def _name_own_tool(refusal: RequestRefused, left_out: Sequence[int]) -> None:
    """Words the refusal of a tool with its number in the client's body. left_out: the numbers of those that were left
    out there, ascending."""
    if not left_out or refusal.param is None or (found := _TOOL.match(refusal.param)) is None:
        return
    number = int(found[1])
    for at in left_out:
        number += at <= number
    own = f"tools[{number}]"
    refusal.args = (str(refusal).replace(found[0], own),)
    refusal.param = own + refusal.param[found.end() :]


def _methods(request: Request) -> str:
    """The methods of a path; Starlette names those of one route, a path may have several."""
    routes = [route for route in request.app.router.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods}))


def model_not_found(name: str) -> RequestRefused:
    """The refusal of a model name: the same text for unknown models and for those of other tenants."""
    return RequestRefused(
        f"The model {name[:128]!r} does not exist or is not yours. GET /v1/models lists the models that you may use.",
        code="model_not_found",
        status=404,
        param="model",
    )


def _routing_refusal(status: int, method: str, path: str, listed: str) -> RequestRefused:
    """The refusal of a request that no route takes, or that Starlette refuses otherwise. listed: where routes are."""
    route = printable(path, MAX_PATH_CHARS)
    if status == 404:
        hint = " Routes do not end with a slash." if len(path) > 1 and path.endswith("/") else ""
        message = f"There is no route {method} {route}.{hint}{listed}"
        return RequestRefused(message, code="not_found", status=404)
    if status == 405:
        message = f"The route {route} does not allow {method}.{listed}"
        return RequestRefused(message, code="method_not_allowed", status=405)
    if 400 <= status < 500:
        return RequestRefused("The request is malformed.", code="invalid_value", status=status)
    return RequestRefused("The server failed to process the request.", code="internal_error", status=status)
