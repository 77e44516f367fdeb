"""EventStream: the events of one background response as an HTTP answer, read from Redis in any gateway.

First-hand and read again later they are the same bytes: a reader sees nothing that is not kept.
"""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.cluster.gateway.generation.delivery import ClientLeft, disconnected
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.draining import shutting_down
from tandem.cluster.gateway.http.sse import EventWriter
from tandem.cluster.gateway.http.tasks import Aside
from tandem.cluster.gateway.responses.events.event_batch import Seen, closing_event, error_event, events_from
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.workers.messages.errors import RequestRefused

AWAY_S = 60.0
"""Time that a reader waits for Redis."""
TURN_S = 0.5
"""Time between two looks at what else may end a stream, while Redis is silent."""


class EventStream(Response):
    """Streams the events of a response from the sequence number `first` on.

    ask: for what is kept from a number on. final: returns the response's object once it is over. is_made_here: while
    this gateway makes the response.
    """

    _leaving: Aside[None]

    def __init__(
        self,
        context: GatewayContext,
        ask: "Callable[[int], asyncio.Future[Seen]]",
        final: Callable[[], Awaitable[bytes]],
        is_made_here: Callable[[], bool],
        first: int,
    ) -> None:
        super().__init__(b"")
        self._context = context
        self._ask = ask
        self._final = final
        self._is_made_here = is_made_here
        self._next = first
        self._news = asyncio.Event()
        self._seen_s = context.clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events. Returns early when the client leaves or stops reading."""
        writer = EventWriter(send, self._context.clock)
        self._leaving = Aside(disconnected(receive), self._news.set)
        self._seen_s = self._context.clock()
        try:
            await self._in_time(writer.start())
            try:
                last = await self._write_kept(writer)
                closing = closing_event(await self._final(), last) if last >= self._next else b""
            except RequestRefused as error:
                closing = error_event(error, self._next)
            await self._in_time(writer.finish(closing))
        except (ClientLeft, TimeoutError):
            pass
        finally:
            self._leaving.close()

    async def _write_kept(self, writer: EventWriter) -> int:
        """Writes events until the response is over; returns how many it has without its last one. RequestRefused where
        the stream cannot go on."""
        while True:
            seen = await self._look(writer)
            for batch in seen.batches:
                await self._in_time(writer.write(await events_from(batch, self._next)))
                self._next = batch.number
            if not seen.is_running and (not seen.batches or self._next >= seen.number):
                break
        if not seen.number:
            raise RequestRefused("The response was deleted.", code="response_not_found", status=404)
        return seen.number

    async def _look(self, writer: EventWriter) -> Seen:
        """Waits for the events that are next, or for the end of the response."""
        while True:
            is_here = self._is_made_here()
            answer = self._ask(self._next + 1)
            answer.add_done_callback(lambda _: self._news.set())
            try:
                while not answer.done():
                    await self._wait(writer)
                seen = answer.result()
            except RedisUnavailable:
                is_here = False
            else:
                self._seen_s = self._context.clock()
                if not seen.is_running or seen.batches:
                    return seen
            finally:
                answer.cancel()
            self._check_cut_off(is_here)
            await self._attend(writer)

    async def _wait(self, writer: EventWriter) -> None:
        self._news.clear()
        await self._attend(writer)
        try:
            async with asyncio.timeout(TURN_S):
                await self._news.wait()
        except TimeoutError:
            self._check_cut_off(is_here=False)

    def _check_cut_off(self, is_here: bool) -> None:
        """RequestRefused when this gateway ends, unless it may still store how the response has ended."""
        if self._context.draining.is_cut_off and not is_here:
            raise shutting_down()

    async def _attend(self, writer: EventWriter) -> None:
        """Ends the stream where there is a reason to; else sends a comment if it was silent for a while."""
        self._leaving.advance()
        if self._leaving.is_over:
            raise ClientLeft
        if self._context.clock() - self._seen_s > AWAY_S:
            text = "The events cannot be read now, because Redis does not answer; go on with starting_after."
            raise RequestRefused(text, code="service_unavailable", status=503)
        await self._in_time(writer.keep_alive(self._context.times.keep_alive_s))

    async def _in_time(self, writing: Awaitable[None]) -> None:
        """Waits for a client that does not read, for a while."""
        async with asyncio.timeout(self._context.times.stuck_send_s):
            await writing
