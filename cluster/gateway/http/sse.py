"""Server-sent events over raw ASGI: framing, keep-alive comments, errors after the first byte, a cut that stays a cut.

One write per step and stream. Never buffers and never swallows a failure: a stream that cannot go on ends without the
final empty body, so the client sees a broken transfer unless the API's last event was sent.
"""

from collections.abc import Callable

from starlette.types import Send

from tandem.cluster.gateway.http.error_answers import as_refusal, error_json

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventWriter:
    """Writes one answer's events. Times are on `clock`. Used by one task."""

    def __init__(self, send: Send, clock: Callable[[], float]) -> None:
        self._send = send
        self._clock = clock
        self._last_write_s = clock()
        self.began_write_s: float | None = None
        self.started = False

    async def start(self) -> None:
        """Status 200 and the headers: after this, errors travel as events."""
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def write(self, events: bytes) -> None:
        """Sends framed events. Waits while the client does not read."""
        self.began_write_s = self._last_write_s = self._clock()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self.began_write_s = None

    async def keep_alive(self, silence_s: float) -> None:
        """A comment, when nothing was written for silence_s."""
        if self.started and self.silent_for_s() >= silence_s:
            await self.write(KEEP_ALIVE)

    async def keep_alive_early(self, silence_s: float) -> None:
        """The same for a stream that has not begun, which begins with it: status and headers are sent before."""
        if not self.started and self.silent_for_s() >= silence_s:
            await self.start()
        await self.keep_alive(silence_s)

    def silent_for_s(self) -> float:
        """Returns the time since the last write began, or since the request came."""
        return self._clock() - self._last_write_s

    def stuck_for_s(self) -> float:
        """Returns how long the write under way has waited for the client."""
        return 0.0 if self.began_write_s is None else self._clock() - self.began_write_s

    async def finish(self, events: bytes) -> None:
        """The last events of the API, and the end of the body. Waits while the client does not read."""
        self.began_write_s = self._clock()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})
        self.began_write_s = None


def openai_end(error: Exception | None) -> bytes:
    """OpenAI's last events: an error event if there was an error, and `[DONE]`."""
    return DONE if error is None else b"data: " + error_json(as_refusal(error)) + b"\n\n" + DONE
