"""One line of a batch, answered by the handler of its route in this process: the checks, the answer, the quota and the
bill are those of a request, only no connection is taken."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope

from tandem.cluster.gateway.batches.batch_lines import BatchLine, LineAnswer
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.error_answers import error_response, on_tandem_error
from tandem.workers.messages.errors import TandemError
from tandem.workers.messages.request import IDLE_PRIORITY

log = logging.getLogger("tandem.gateway")
LineHandler = Callable[[Request, Principal], Coroutine[Any, Any, Response]]
Keep = Callable[[LineAnswer], Awaitable[None]]


class TryAgain(Exception):
    """A line that could not be answered now. after_s: when it may be worth trying again."""

    def __init__(self, after_s: float) -> None:
        super().__init__(f"again in {after_s:g} s")
        self.after_s = after_s


def on_idle_rows(url: str) -> Callable[[dict[str, Any]], tuple[str, ...]]:
    """Returns what makes a body one of a batch (Change): it has the last priority, and is not stored unless it says
    so."""

    def change(body: dict[str, Any]) -> tuple[str, ...]:
        given = body.get("priority")
        body["priority"] = IDLE_PRIORITY
        if url == "/v1/responses":
            body.setdefault("store", False)
        return () if given is None else ("priority",)

    return change


async def answer_line(
    handler: LineHandler, tenant: str, line: BatchLine, request_id: str, left: asyncio.Event, keep: Keep
) -> None:
    """Answers a line. keep: stores the answer, before the end of which the line is not billed: where a gateway dies, no
    line is billed that has to run again. left: nobody wants it any more; then nothing is kept. Raises TryAgain where a
    limit or a lost group is in the way, and what keep raises."""
    scope = _scope(line, tenant, request_id)
    request = Request(scope, receive := _client(line.body, left))
    sent = _Sent(scope, request_id, keep)
    try:
        response = await handler(request, Principal(tenant, is_admin=False))
        await response(scope, receive, sent.send)
        return
    except TandemError as error:
        refusal = await on_tandem_error(request, error)
    except Exception as error:
        if sent.is_over:
            raise
        log.exception("request %s failed", request_id)
        refusal = error_response(error)
    if not left.is_set():
        await refusal(scope, receive, sent.send)


class _Sent:
    """An answer of a handler, gathered until it is whole."""

    def __init__(self, scope: Scope, request_id: str, keep: Keep) -> None:
        self.is_over = False
        self._scope = scope
        self._request_id = request_id
        self._keep = keep
        self._status = 0
        self._headers: Mapping[bytes, bytes] = {}
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message.get("headers", ()))
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        self.is_over = True
        if (after_s := self._again_after_s()) is not None:
            raise TryAgain(after_s)
        ignored = tuple(self._scope.get("tandem.ignored", ()))
        await self._keep(LineAnswer(self._status, self._request_id, bytes(self._body), ignored))

    def _again_after_s(self) -> float | None:
        """Seconds after which a line is tried again that met a limit, or no group; None for other answers."""
        after = self._headers.get(b"retry-after")
        return float(after) if self._status in (408, 429, 503) and after is not None else None


def _scope(line: BatchLine, tenant: str, request_id: str) -> Scope:
    length = str(len(line.body)).encode()
    return {
        "type": "http",
        "method": "POST",
        "path": line.url,
        "headers": [(b"content-type", b"application/json"), (b"content-length", length)],
        "query_string": b"",
        "tandem.request_id": request_id,
        "tandem.route": line.url,
        "tandem.tenant": tenant,
    }


def _client(body: bytes, left: asyncio.Event) -> Receive:
    """A client that sends a body, and stays until it has left."""
    is_sent = False

    async def receive() -> Message:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    return receive
