"""Every error answer of the gateway: one body shape, the statuses and codes of the contract, retry headers.

Used by the routes, the envelope (exceptions nobody caught) and sse.py (errors after the first byte). Never shows a
traceback, a path or another tenant's words.
"""

import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cluster.tenants.admission import OverLimit
from workers.errors import GroupLost, RequestRefused, TandemError

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
MAX_RETRY_AFTER_S = 60


class ErrorDetail(msgspec.Struct, frozen=True):
    """What the contract promises under "error"."""

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
    if isinstance(error, HTTPException):
        return _routing_refusal(error.status_code)
    del error
    return RequestRefused("The server failed to process the request.", code="internal_error", status=500)


def error_json(refusal: RequestRefused) -> bytes:
    """The contract's body."""
    status = refusal.status
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if refusal.code == "insufficient_quota":
        kind = "insufficient_quota"
    detail = ErrorDetail(str(refusal), kind, refusal.param, refusal.code)
    return msgspec.json.encode(ErrorBody(detail))


def error_response(error: Exception, jitter: int = 0) -> Response:
    """The HTTP answer to an exception. `jitter` spreads Retry-After (any non-negative number)."""
    refusal = as_refusal(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(refusal, OverLimit):
        headers |= _limit_headers(refusal)
    elif refusal.code == "insufficient_quota":
        headers["x-should-retry"] = "false"
    elif refusal.status in (429, 503):
        headers["retry-after"] = str(1 + jitter % 5)
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_json(refusal), refusal.status, headers, media_type="application/json")


def _limit_headers(refusal: OverLimit) -> dict[str, str]:
    """When to come back, which the quota has spread; OpenAI's clients heed x-should-retry."""
    if refusal.retry_after_s is None:
        return {"x-should-retry": "false"}
    return {"retry-after": str(min(MAX_RETRY_AFTER_S, math.ceil(refusal.retry_after_s)))}


async def on_tandem_error(_: Request, error: Exception) -> Response:
    """Exception handler of the app for TandemError and HTTPException."""
    assert isinstance(error, (TandemError, HTTPException))
    return error_response(error, jitter=id(error) >> 4)


def model_not_found(name: str) -> RequestRefused:
    """The same words for unknown models and for those of other tenants."""
    return RequestRefused(
        f"The model {name[:128]!r} does not exist or is not yours.", code="model_not_found", status=404, param="model"
    )


def _routing_refusal(status: int) -> RequestRefused:
    if status == 404:
        return RequestRefused("There is no such route.", code="not_found", status=404)
    if status == 405:
        return RequestRefused("This route does not allow this method.", code="method_not_allowed", status=405)
    if 400 <= status < 500:
        return RequestRefused("The request is malformed.", code="invalid_value", status=status)
    return RequestRefused("The server failed to process the request.", code="internal_error", status=status)
