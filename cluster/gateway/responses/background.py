"""Responses that are made in the background: they have no client that waits, and go on while their gateway lives.

Which of its ends a response comes to is decided in Redis, by whoever is first: it is stored whole, or cancelled through
any gateway, or found lost because its gateway has not renewed its lease. A gateway looks at its own each second, and
ends those that are over. Draining waits for them as for streams, and cuts them off as streams.

    queued --first token--> in_progress --> completed, incomplete, failed
    queued, in_progress --POST .../cancel--> cancelled;  --lease over, no room--> failed

Those that were asked with `stream` keep their events in Redis while they are made (events/); clients read them there.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from tandem.cluster.gateway.generation.delivery import Delivery
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.sse import KEEP_ALIVE
from tandem.cluster.gateway.responses.events.event_batch import Batch, Seen, batch_of
from tandem.cluster.gateway.responses.events.event_log import EventLog
from tandem.cluster.gateway.responses.events.event_stream import EventStream
from tandem.cluster.gateway.responses.events.event_watch import EventWatch, pause_s
from tandem.cluster.gateway.responses.response_store import (
    READ,
    RUNNING,
    ResponseStore,
    Store,
    StoredResponse,
    checked,
    unavailable,
)
from tandem.cluster.gateway.responses.responses_answer import ResponsesFormat
from tandem.cluster.gateway.schemas.reading import invalid
from tandem.cluster.gateway.serving.answer import json_response
from tandem.cluster.state.redis_client import RedisRefused, RedisUnavailable
from tandem.workers.messages.errors import RequestRefused

log = logging.getLogger("tandem.gateway")
MOST = 256
"""Responses of a tenant that one gateway makes at once, whatever its limits: no open connection bounds them."""
LEASE_MS = 15_000
RENEW_S = 1.0
BEGIN_S = 20.0
"""Time that the beginning of a response waits for Redis, all tries together."""
SETTLE_S = 600.0
"""Time that one which was made waits for Redis."""
NOT_BEGUN = "The response cannot be stored now, because Redis %s, so it is not made in the background; try again later."
WAITED = "The response was given up, because its events could not be stored for too long; Redis does not answer."
FAILED = {
    "lost": "The gateway that made this response has ended before it.",
    "too_large": "The response takes more bytes than a tenant may store (--response-store-bytes).",
}


@dataclass(eq=False)
class BackgroundRun:
    """One response while it is made. stored_of: its final object with the items of its conversation. events: None where
    they are not kept. wish: what its lease is renewed with. news: that is another, or it is over."""

    tenant: str
    style: ResponsesFormat
    stored_of: Callable[[dict[str, Any]], StoredResponse]
    events: EventLog | None = None
    wish: Literal["renew", "in_progress"] = "renew"
    is_over: bool = False
    told_to_end: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def response_id(self) -> str:
        """Returns the id, by which any gateway knows it."""
        return str(self.style.queued()["id"])

    def end_events(self, patience_s: float) -> None:
        """No more come. patience_s: time for keeping those that were made."""
        if self.events is not None:
            self.events.close(patience_s)

    async def client_leaves(self) -> Message:
        """Receives, for the delivery: its client leaves when the response is to end."""
        await self.told_to_end.wait()
        return {"type": "http.disconnect"}


class BackgroundResponses:
    """The responses of one gateway's background. store: None where there is none."""

    def __init__(self, store: Store, context: GatewayContext) -> None:
        self._given = store
        self._context = context
        self._watch = EventWatch(self._look, context.tasks)
        self._runs: dict[tuple[str, str], BackgroundRun] = {}

    @property
    def _store(self) -> ResponseStore:
        return checked(self._given, None)

    def _check_room(self, tenant: str) -> None:
        if sum(of == tenant for of, _ in self._runs) >= MOST:
            text = f"This gateway makes {MOST} of your responses in the background, which is its limit; try again."
            raise RequestRefused(text, code="rate_limit_exceeded", status=429)

    async def begin(self, run: BackgroundRun) -> None:
        """Stores a response as queued, and waits a while for Redis. RequestRefused where it cannot be stored, and 429
        for a tenant that has as many as it may. start() follows."""
        key = run.tenant, run.response_id
        self._check_room(run.tenant)
        self._runs[key] = run
        try:
            stored = msgspec.structs.replace(run.stored_of(run.style.queued()), is_over=False)
            first = None if run.events is None else await batch_of(run.events.first)
            value = await self._store.packed(stored)
            await _patiently(lambda: self._store.begin(*key, value, LEASE_MS, first), BEGIN_S, refusals=False)
        except BaseException as error:
            del self._runs[key]
            if isinstance(error, RedisUnavailable):
                log.warning("response %s is not begun: %s", run.response_id, error)
                raise unavailable(NOT_BEGUN % error.state) from None
            raise

    def start(self, run: BackgroundRun, delivery: Delivery) -> Response:
        """Begins to make a response that is queued, and answers with it, or with its events."""
        self._context.draining.enter()
        self._context.tasks.start(self._own(run, delivery), f"response {run.response_id}")
        if run.events is None:
            return json_response(run.style.queued())
        return self._stream(run.tenant, run.response_id, 0)

    async def current(self, tenant: str, response_id: str, wish: str = "look") -> StoredResponse:
        """A stored response as it is now, after `wish` ("cancelled": unless it has ended). RequestRefused as in
        ResponseStore.get()."""
        stored = await self._store.get(tenant, response_id)
        if stored.is_over:
            return stored
        try:
            state = await self._store.state(tenant, response_id, wish)
        except RedisUnavailable as error:
            raise unavailable(READ % error.state) from None
        if state is None:  # it has just ended; or Redis lost its state
            stored = await self._store.get(tenant, response_id)
        if state not in RUNNING:
            self.end(tenant, response_id)
        return stored if stored.is_over else _shown(stored, state or "lost")

    async def stream(self, tenant: str, response_id: str, first: int) -> Response:
        """The events of a response from the sequence number `first` on. RequestRefused as in current(), and 400 where
        they are not kept."""
        await self._store.get(tenant, response_id)
        try:
            seen = await self._look(tenant, response_id, first)
        except RedisUnavailable as error:
            raise unavailable(READ % error.state) from None
        if not seen.number:
            text = (
                "stream needs a response that was made with background and stream: the events of others are not kept."
            )
            raise invalid("stream", text)
        return self._stream(tenant, response_id, first)

    def _stream(self, tenant: str, response_id: str, first: int) -> EventStream:
        async def final() -> bytes:
            return (await self.current(tenant, response_id)).response

        key = tenant, response_id
        return EventStream(self._context, partial(self._watch.ask, *key), final, lambda: key in self._runs, first)

    async def _look(self, tenant: str, response_id: str, number: int) -> Seen:
        return await self._store.events(tenant, response_id, number)

    def end(self, tenant: str, response_id: str) -> None:
        """Ends a response, if this gateway makes it; other gateways see for themselves."""
        if (run := self._runs.get((tenant, response_id))) is not None:
            run.told_to_end.set()

    # ---- the task of one ----

    async def _own(self, run: BackgroundRun, delivery: Delivery) -> None:
        watching = asyncio.create_task(self._renew_always(run), name=f"watch {run.response_id}")
        keeping = asyncio.create_task(self._keep_events(run), name=f"events of {run.response_id}")
        try:
            await self._make(run, delivery)
            run.end_events(SETTLE_S)
            if await keeping and (final := run.style.final) is not None:
                await self._settle(run, final)
        finally:
            del self._runs[run.tenant, run.response_id]
            self._context.draining.leave()
            run.end_events(0.0)
            run.is_over = True  # no cancellation: one that meets a call to Redis may be lost
            run.news.set()
            await asyncio.wait({watching, keeping})

    async def _keep_events(self, run: BackgroundRun) -> bool:
        """Appends the events while they are made. True when all are kept, or none are to be."""
        return run.events is None or await run.events.run(partial(self._append, run), lambda: pause_s(len(self._runs)))

    async def _append(self, run: BackgroundRun, batch: Batch) -> str | None:
        if (over := await self._store.append(run.tenant, run.response_id, batch)) is not None:
            run.told_to_end.set()
        return over

    async def _make(self, run: BackgroundRun, delivery: Delivery) -> None:
        """Generates it; what it failed of becomes its final object."""

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                run.wish = "in_progress"  # which does not wait for Redis
                run.news.set()
            elif run.events is not None and run.style.final is None and message["body"] != KEEP_ALIVE:
                await run.events.write(message["body"])

        try:
            await delivery({}, run.client_leaves, send)
        except Exception as error:
            if not isinstance(error, RequestRefused):
                log.exception("response %s failed", run.response_id)
            run.style.closing(error)
        if run.style.final is None and not run.told_to_end.is_set():
            run.style.closing(unavailable(WAITED))

    async def _renew_always(self, run: BackgroundRun) -> None:
        """Renews the lease until the response is over, and at once when there is news."""
        while not run.is_over:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await run.news.wait()
            run.news.clear()
            if not run.is_over:
                await self._renew(run)

    async def _renew(self, run: BackgroundRun) -> None:
        """Says that it is still made; ends it where it is over."""
        try:
            if await self._store.state(run.tenant, run.response_id, run.wish, LEASE_MS) not in RUNNING:
                run.told_to_end.set()
        except RedisUnavailable:
            log.debug("the lease of response %s was not renewed", run.response_id)

    async def _settle(self, run: BackgroundRun, final: dict[str, Any]) -> None:
        """Stores what was made."""
        value = await self._store.packed(run.stored_of(final))
        try:
            await _patiently(lambda: self._store.settle(run.tenant, run.response_id, value), SETTLE_S)
        except RedisUnavailable as error:
            log.warning("response %s is not stored: %s", run.response_id, error)


async def _patiently(store: Callable[[], Awaitable[None]], patience_s: float, *, refusals: bool = True) -> None:
    """Stores something, however long Redis is away within a time; beyond it raises RedisUnavailable. refusals: tries
    again where Redis refuses it, too."""
    try:
        async with asyncio.timeout(patience_s) as limit:
            while True:
                try:
                    return await store()
                except RedisUnavailable as error:
                    is_final = isinstance(error, RedisRefused) and not refusals
                    if is_final or limit.expired():  # a cancellation that meets a call to Redis may be lost
                        raise
                await asyncio.sleep(RENEW_S)
    except TimeoutError:
        raise RedisUnavailable(f"no answer within {patience_s:g} s") from None


def _shown(stored: StoredResponse, state: str) -> StoredResponse:
    """A response that is not stored whole, in this state."""
    response = msgspec.json.decode(stored.response)
    if (message := FAILED.get(state)) is not None:
        response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
    else:
        response["status"] = state
    return msgspec.structs.replace(stored, response=msgspec.json.encode(response))


async def cancel_response(background: BackgroundResponses, request: Request, principal: Principal) -> Response:
    """Ends a response of the background; one that has ended stays as it is."""
    response_id = request.path_params["response_id"]
    stored = await background.current(principal.tenant, response_id, "cancelled")
    if not msgspec.json.decode(stored.response)["background"]:
        raise RequestRefused(
            "A response that is not of the background cannot be cancelled: it has ended.",
            code="invalid_value",
            param="response_id",
        )
    return Response(stored.response, media_type="application/json")
