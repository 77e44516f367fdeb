"""The HTTP server of a gateway that opens the port itself: uvicorn, with bounds on what one connection may cost.

uvicorn's parser takes any number of header bytes and waits for ever for the rest of a request. LimitedProtocol adds: at
most `head_bytes` of request line and headers (431), the same for chunk framing and trailers between two pieces of a
body, a deadline for a whole head, and two for a body. A request that comes in one read costs no timer. Next:
middleware.py, then app/routes.py.
"""

import asyncio
import contextlib
import socket
import ssl
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tandem.cluster.gateway.http.error_answers import error_json
from tandem.cluster.gateway.http.middleware import MAX_HEADER_BYTES, headers_too_large
from tandem.workers.messages.errors import RequestRefused

FILES_PATH = "/v1/files"
"""The route whose bodies may be larger than one that a gateway holds."""
OTHER_FILES = 512
"""Files that a gateway has open beside its clients' connections: links to groups and to Redis, Ray's, logs."""


@dataclass(frozen=True)
class HttpLimits:
    """head_s: from a connection's start, or a request's first byte, to the end of its headers; also for a TLS
    handshake. body_s: between two reads of a body; body_total_s: for all of it, file_total_s: of one that is a file.
    linger_*: what a refused client may still send while it reads why. connections: that are open at a time."""

    head_bytes: int = MAX_HEADER_BYTES
    head_s: float = 10.0
    body_s: float = 60.0
    body_total_s: float = 600.0
    file_total_s: float = 3600.0
    linger_s: float = 2.0
    linger_bytes: int = 2**20
    connections: int = 8192

    def within(self, open_files: int) -> "HttpLimits":
        """Return limits whose connections leave room for what else a gateway opens. open_files: the process's limit."""
        return replace(self, connections=max(1, min(self.connections, open_files - OTHER_FILES)))


class QuietServer(uvicorn.Server):
    """A server inside a process that has its own signal handling. It wakes once a second, for the headers' date, and
    when `should_exit` is set; uvicorn's looks ten times a second. Made and used on one event loop."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None, handshake_s: float) -> None:
        self._exits = asyncio.Event()
        self._tls = tls
        self._handshake_s = handshake_s
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        return self._exits.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exits.set()
        else:
            self._exits.clear()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's for given sockets, with our TLS context and deadline for handshakes."""
        loop, config = asyncio.get_running_loop(), self.config
        timeout_s = self._handshake_s if self._tls is not None else None

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(config=config, server_state=self.server_state, app_state={})  # type: ignore[call-arg]

        self.servers = [
            await loop.create_server(
                protocol, sock=listener, ssl=self._tls, ssl_handshake_timeout=timeout_s, backlog=config.backlog
            )
            for listener in sockets or ()
        ]
        self.started = True

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._exits.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LimitedProtocol(HttpToolsProtocol):
    """One connection. `_unframed` counts bytes since the last progress (headers complete, body data, message complete),
    but for those that came in one piece with it: what the parser holds is at most twice `head_bytes`."""

    limits = HttpLimits()
    _in_head = True
    _refused = False
    _unframed = 0
    _phase_began_s = 0.0
    _last_read_s = 0.0
    _timer: asyncio.TimerHandle | None = None

    # ---- asyncio's side ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(too_many_connections(self.limits.connections))
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser no more at a time than may be held, so that it never holds more."""
        if self._refused:
            self._linger(len(data))
            return
        self._last_read_s = self.loop.time()
        while data and not self._done():
            room = self.limits.head_bytes - self._unframed
            piece, data = data[:room], data[room:]
            self._unframed += len(piece)
            super().data_received(piece)
            if self._unframed >= self.limits.head_bytes:
                self._refuse(headers_too_large(self.limits.head_bytes))
        if self._timer is None and (self._unframed or not self._in_head) and not self._done():
            self._start_timer()

    # ---- the parser's side ----

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._progress(in_head=False)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unframed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progress(in_head=True)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is not HTTP, in the contract's shape."""
        self._refuse(RequestRefused(msg, code="invalid_value"))

    # ---- inside ----

    def _progress(self, *, in_head: bool) -> None:
        self._in_head = in_head
        self._unframed = 0
        self._stop_timer()

    def _start_timer(self) -> None:
        self._phase_began_s = self._last_read_s = self.loop.time()
        delay_s = self.limits.head_s if self._in_head else min(self.limits.body_s, self.limits.body_total_s)
        self._timer = self.loop.call_later(delay_s, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        """Closes a connection that is late; one whose answer is under way, or that we do not read, gets more time."""
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused or (self._in_head and self._answering()):
            self._start_timer()
            return
        limits = self.limits
        total_s = limits.file_total_s if self._takes_file() else limits.body_total_s
        due_s = min(self._last_read_s + limits.body_s, self._phase_began_s + total_s)
        if self._in_head or self.loop.time() >= due_s:
            self.transport.close()
        else:
            self._timer = self.loop.call_at(due_s, self._on_timer)

    def _takes_file(self) -> bool:
        return not self._in_head and self.scope["path"] == FILES_PATH

    def _done(self) -> bool:
        return self._refused or self.transport.is_closing()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _can_answer(self) -> bool:
        """True if the next bytes on the wire are the start of the answer to the request at fault."""
        if self._in_head:
            return not self._answering()
        return not self.pipeline and not self.cycle.response_started

    def _refuse(self, refusal: RequestRefused) -> None:
        """Answers if no other answer is under way, and closes once the client had a moment to read it."""
        self._refused = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        can_answer = self._can_answer()
        if self._answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not can_answer:
            self.transport.close()
            return
        body = error_json(refusal)
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %s\r\nconnection: close\r\n\r\n"
            % (len(body), uuid.uuid4().hex.encode("ascii"))
        )
        self.transport.write(STATUS_LINE[refusal.status] + head + body)
        self._unframed = 0
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(self.limits.linger_s, self.transport.abort)

    def _linger(self, num_bytes: int) -> None:
        """Reads on for a while: closing with unread bytes resets the connection, and the client would not see why."""
        self._unframed += num_bytes
        if self._unframed > self.limits.linger_bytes:
            self.transport.abort()


def too_many_connections(limit: int) -> RequestRefused:
    """The refusal of a connection beyond the limit."""
    message = f"This gateway has {limit} connections open, which is its limit; try again."
    return RequestRefused(message, code="service_unavailable", status=503)


def make_server(
    app: ASGIApp, *, shutdown_timeout_s: float, limits: HttpLimits | None = None, tls: ssl.SSLContext | None = None
) -> QuietServer:
    """A server for `app` on the running loop; call serve(sockets=[...]). tls: None for plain HTTP."""
    protocol: type[LimitedProtocol] = LimitedProtocol
    if limits is not None:
        protocol = type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})
    config = uvicorn.Config(
        app,
        access_log=False,
        lifespan="off",  # Serve runs it
        log_config=None,
        loop="none",
        http=protocol,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=max(1, int(shutdown_timeout_s)),
    )
    return QuietServer(config, tls, protocol.limits.head_s)
