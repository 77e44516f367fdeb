"""Wishes of a request to the router: the session that it belongs to, and to be told why it goes where it goes.

A session is named by the header `x-session-id`, else by the field `prompt_cache_key`. `x-tandem-route: explain`, with
an admin key, has the answer say in the same header which group the request went to and why (http/middleware.py).
"""

from starlette.requests import Request

from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.routing.route_hint import session_key
from tandem.cluster.routing.route_table import RouteNote
from tandem.workers.messages.errors import RequestRefused

SESSION_HEADER, SESSION_FIELD = "x-session-id", "prompt_cache_key"
ROUTE_HEADER, EXPLAIN = "x-tandem-route", "explain"


def route_session(request: Request, principal: Principal) -> str:
    """Names the request's session; "" without one."""
    hints: IgnoredFields | None = request.scope.get("tandem.ignored_fields")
    named = request.headers.get(SESSION_HEADER) or (hints.kept.get(SESSION_FIELD, "") if hints is not None else "")
    return session_key(principal.tenant, named)


def asked_note(request: Request, principal: Principal) -> RouteNote | None:
    """Returns where the router writes why it has chosen a group; None if nobody asks. RequestRefused for another value
    of the header (400), and without an admin key (403)."""
    asked = request.headers.get(ROUTE_HEADER)
    if asked is None:
        return None
    if asked.strip().lower() != EXPLAIN:
        message = f"The header {ROUTE_HEADER} may say {EXPLAIN} only, not {printable(asked)}."
        raise RequestRefused(message, code="invalid_value", status=400, param=ROUTE_HEADER)
    if not principal.is_admin:
        message = f"{ROUTE_HEADER}: {EXPLAIN} needs an admin key (--admin-api-key)."
        raise RequestRefused(message, code="permission_denied", status=403)
    note: RouteNote = request.scope.setdefault("tandem.route_note", RouteNote())
    return note
