"""Web pages that may use the service: CORS for --allowed-origins, and what guards a service that is open.

Without keys, only the browser stands between any web page and an open service. While it is open, Host must name the
loopback, or a page whose name was made to point here (DNS rebinding) would be of the same origin. Origin, which
browsers send with every POST, must be the service's own or allowed.
"""

from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.workers.messages.errors import RequestRefused

ANY = "*"
EXPOSED = (
    b"x-request-id, x-tandem-ignored, retry-after, x-should-retry, x-ratelimit-limit-requests, "
    b"x-ratelimit-remaining-requests"
)
METHODS = "GET, POST, PATCH, DELETE"
MAX_AGE_S = 600


class Origins:
    """An ASGI layer that checks Host and Origin, answers preflights, and names allowed origins in answers. allowed:
    origins, or ("*",). is_open: True while requests need no key. Raises RequestRefused 403."""

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...], is_open: Callable[[], bool]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        origin, host = _text(headers.get(b"origin")), _text(headers.get(b"host"))
        may_read = origin is not None and (ANY in self._allowed or origin in self._allowed)
        if self._is_open():
            _check_host(host)
            if origin is not None and not may_read and origin != f"{scope['scheme']}://{host}":
                raise _refused(f"Web pages of {origin[:128]} may not use this service; --allowed-origins names those.")
        if origin is None or not may_read:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await _preflight(self._named(origin), headers)(scope, receive, send)
        else:
            await self._app(scope, receive, self._naming(origin, send))

    def _named(self, origin: str) -> str:
        return ANY if ANY in self._allowed else origin

    def _naming(self, origin: str, send: Send) -> Send:
        own = [
            (b"access-control-allow-origin", self._named(origin).encode("latin-1")),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"origin"),
        ]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        return send_named


def _preflight(origin: str, headers: dict[bytes, bytes]) -> Response:
    answer = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": METHODS,
        "access-control-max-age": str(MAX_AGE_S),
        "vary": "origin, access-control-request-headers",
    }
    if (asked := _text(headers.get(b"access-control-request-headers"))) is not None:
        answer["access-control-allow-headers"] = asked
    return Response(status_code=204, headers=answer)


def _check_host(host: str | None) -> None:
    """Passes names of the loopback, and no Host at all, which no browser sends."""
    if host is not None and not is_loopback(host):
        message = f"A service without keys answers to names of the loopback only, not to the Host {host[:128]}: "
        raise _refused(f"{message}ask 127.0.0.1, or give it a key (--api-key, or `tandem tenants add NAME`).")


def is_loopback(host: str) -> bool:
    """True for `localhost` and loopback addresses, with or without a port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _refused(message: str) -> RequestRefused:
    return RequestRefused(message, code="permission_denied", status=403)
