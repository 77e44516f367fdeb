"""The outermost ASGI layer: ids, status metrics, header limits, tenants' headers, in-flight counts, exceptions.

Pure ASGI (a wrapper per request, one frame per send), so that it costs streams nothing. Every answer carries
`x-request-id`: the client's when it is printable, cut to 128 characters, else a fresh one. Next: app/routes.py.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.cluster.gateway.http.draining import Draining
from tandem.cluster.gateway.http.error_answers import OtherApi, as_refusal, error_form, error_response
from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics
from tandem.cluster.gateway.records.request_log import AccessLog
from tandem.cluster.gateway.records.request_record import RequestRecord
from tandem.cluster.gateway.records.trace_context import TraceContext
from tandem.cluster.tenants.tenant_admission import Tenancy
from tandem.workers.messages.errors import RequestRefused

log = logging.getLogger("tandem.gateway")
MAX_HEADER_BYTES = 32 * 1024
MAX_ID_CHARS = 128
SMALL_BYTES = 64 * 1024
PIECE_BYTES = 256 * 1024
"""Bytes of an answer that are given to the connection at once: it copies what the client does not take."""
OnTracedRecord = Callable[[RequestRecord, TraceContext | None], None]
CLOSE = ((b"connection", b"close"),)
_UNSAFE = re.compile(rb"[^\w.:/+=@-]", re.ASCII)


class RequestMiddleware:
    """Wraps the app. apis: those whose error answers have another form than OpenAI's. on_record: takes the records of
    requests that were refused before there was a Generation, which makes that of others."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: GatewayMetrics,
        draining: Draining,
        tenancy: Tenancy,
        max_bodies_bytes: int,
        apis: Sequence[OtherApi] = (),
        access_log: AccessLog | None = None,
        on_record: OnTracedRecord = lambda record, trace: None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._draining = draining
        self._tenancy = tenancy
        self._bodies = Bodies(max_bodies_bytes)
        self._apis = apis
        self._access_log = AccessLog() if access_log is None else access_log
        self._on_record = on_record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = choose_request_id(scope["headers"])
        scope["tandem.request_id"] = request_id.decode("ascii")
        ids = [(b"x-request-id", request_id)]
        if (api := next((api for api in self._apis if api.has(scope["path"])), None)) is not None:
            scope["tandem.api"] = api
            ids.append((api.id_header, request_id))
        status: int | None = None
        began_s = time.monotonic()
        body = scope["tandem.body"] = self._bodies.of_request()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                body.release()
                own = [*ids, *(CLOSE if self._draining.begun else ())]
                if (tenant := scope.get("tandem.tenant")) is not None:
                    own += self._tenancy.headers(tenant)
                if names := scope.get("tandem.ignored"):
                    own.append(_ignored_header(scope["tandem.request_id"], names))
                if (note := scope.get("tandem.route_note")) is not None and note.line is not None:
                    own.append((b"x-tandem-route", note.line.encode("ascii", "replace")))
                message["headers"] = [*message.get("headers", ()), *own]
                self._metrics.http_answered(scope.get("tandem.route", "unknown"), message["status"])
            elif len(message.get("body", b"")) > PIECE_BYTES:
                await _send_in_pieces(send, message)
                return
            await send(message)

        self._draining.enter()
        try:
            _check_headers(scope)
            await self._app(scope, body.counting(receive), send_with_id)
        except Exception as error:
            if status is not None:
                raise
            scope["tandem.code"] = as_refusal(error).code
            if not isinstance(error, RequestRefused):
                log.exception("request %s failed", scope["tandem.request_id"])
            await error_response(error, error_form(scope))(scope, receive, send_with_id)
        finally:
            body.release()
            self._draining.leave()
            self._tell(scope, status, time.monotonic() - began_s)

    def _tell(self, scope: Scope, status: int | None, seconds: float) -> None:
        """Tells of an answer that has ended, and of a request that was refused before it was generated."""
        self._access_log.answered(scope, status, seconds)
        if status is not None and status >= 400 and scope.get("tandem.is_to_generate"):
            self._on_record(
                RequestRecord(
                    request_id=scope["tandem.request_id"],
                    time_s=time.time() - seconds,
                    tenant=scope.get("tandem.tenant", ""),
                    outcome="error" if status == 500 else "rejected",
                    status=status,
                    code=scope.get("tandem.code"),
                    duration_s=seconds,
                ),
                scope.get("tandem.trace"),
            )


async def _send_in_pieces(send: Send, message: Message) -> None:
    """Sends a long piece of a body; between two parts of it the loop turns, and waits for the client."""
    body, more = memoryview(message["body"]), message.get("more_body", False)
    for start in range(0, len(body), PIECE_BYTES):
        piece = bytes(body[start : start + PIECE_BYTES])
        is_last = start + PIECE_BYTES >= len(body)
        await send({**message, "body": piece, "more_body": more or not is_last})
        await asyncio.sleep(0)


class Bodies:
    """The bodies that a gateway holds: of requests whose answers have not begun. limit: bytes of all together, of which
    large bodies leave an eighth to small ones."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def room_for(self, size: int) -> int:
        """Bytes that may still come for a body of which `size` bytes are known."""
        limit = self.limit if size <= SMALL_BYTES else self.limit - self.limit // 8
        return limit - self.held

    def of_request(self) -> "HeldBody":
        """The body of one more request."""
        return HeldBody(self)


class HeldBody:
    """The bytes of one request's body that have arrived."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0

    def counting(self, receive: Receive) -> Receive:
        """A `receive` that counts. It raises RequestRefused 503 when all bodies together exceed the limit."""

        async def counted() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            if size > self._bodies.room_for(self._size + size):
                text = f"This gateway holds {self._bodies.limit} bytes of requests, which is its limit; try again."
                raise RequestRefused(text, code="service_unavailable", status=503)
            self._size += size
            self._bodies.held += size
            return message

        return counted

    def release(self) -> None:
        """Gives the bytes back. Idempotent."""
        self._bodies.held -= self._size
        self._size = 0


def choose_request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The client's x-request-id made safe, or a fresh one."""
    for name, value in headers:
        if name.lower() == b"x-request-id" and (safe := _UNSAFE.sub(b"", value)[:MAX_ID_CHARS]):
            return safe
    return secrets.token_hex(16).encode("ascii")


def _ignored_header(request_id: str, names: Iterable[str]) -> tuple[bytes, bytes]:
    """Names to the client and the log what was ignored in its body (schemas/ignored_fields.py)."""
    said = ", ".join(names)
    log.debug("request %s: ignored %s", request_id, said)
    return b"x-tandem-ignored", said.encode("ascii")


def headers_too_large(max_bytes: int) -> RequestRefused:
    """The refusal of a request whose request line and headers are too long."""
    return RequestRefused(f"The request's headers exceed {max_bytes} bytes.", code="content_too_large", status=431)


def _check_headers(scope: Scope) -> None:
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    if size + len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > MAX_HEADER_BYTES:
        raise headers_too_large(MAX_HEADER_BYTES)
