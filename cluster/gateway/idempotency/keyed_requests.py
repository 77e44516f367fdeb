"""Requests with an Idempotency-Key. Sent again while it is answered, one waits; afterwards it gets the same bytes.

What was begun is made to its end, whether its client is there, reads or not, and the answer is stored before its last
bytes are sent: a client that has not got the end can ask for it again. What fails is forgotten, so that it may be tried
again. An answer that is longer than what is kept runs again, with the same id and the same seeds, and is on the bill
once. Next: client_side.py.
"""

import asyncio
import hashlib
import logging
import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tandem.cluster.gateway.generation.delivery import disconnected
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import printable, read_body
from tandem.cluster.gateway.idempotency.again_limits import AgainLimits
from tandem.cluster.gateway.idempotency.client_side import ClientSide
from tandem.cluster.gateway.idempotency.key_store import (
    MAX_ANSWER_BYTES,
    Claim,
    KeyPlace,
    KeyStore,
    StoredAnswer,
    key_place,
)
from tandem.cluster.gateway.schemas.reading import invalid
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.workers.messages.errors import RequestRefused

log = logging.getLogger("tandem.gateway")
HEADER = "idempotency-key"
MAX_KEY_CHARS = 255
LOOK_S, MOST_LOOK_S = 0.25, 2.0
"""Pauses between two looks of a request that waits for the one before it: each is twice the last, up to the most."""
RENEW_S = 2.0
STORE_S = 5.0
"""Time for the answer to be stored, before its last bytes are sent in any case."""
ATTEMPTS = 1000
"""Attempts of one run: a later one has higher numbers, as groups may still have the earlier one's."""
_KEY = re.compile(rf"[\x20-\x7e]{{1,{MAX_KEY_CHARS}}}")
_OF_CONNECTION = {b"connection", b"x-request-id"}
_REPLAYED = (b"idempotent-replayed", b"true")
Handler = partial[Any]


class KeyedRequests:
    """The requests with a key of one gateway. store: None where none are kept."""

    def __init__(self, text: TextServices, context: GatewayContext, store: KeyStore | None) -> None:
        self._text = text
        self._context = context
        self._store = store
        self._again = AgainLimits(context.tenancy.limits, context.clock)

    async def answer(self, handler: Handler, request: Request, principal: Principal) -> Response:
        """The answer to a request with a key. RequestRefused 409 for a key that was used with another request."""
        if self._store is None:
            text = "Idempotency-Key is not supported: this service keeps no keys (--idempotency-ttl 0, or no Redis)."
            raise RequestRefused(text, code="unsupported_parameter", param="Idempotency-Key")
        key = request.headers[HEADER]
        if not _KEY.fullmatch(key):
            raise invalid("Idempotency-Key", f"Idempotency-Key must be 1 to {MAX_KEY_CHARS} characters of ASCII.")
        body = await read_body(request, self._text.settings.max_body_bytes)
        digest = hashlib.sha256(b"\0".join((request.scope["tandem.route"].encode(), body))).hexdigest().encode()
        try:
            found = await self._found(self._store, key_place(principal.tenant, key), digest, request)
        except RedisUnavailable as error:
            text = f"An Idempotency-Key cannot be honoured now, because Redis {error.state}; try again."
            raise RequestRefused(text, code="service_unavailable", status=503) from None
        if found == "other":
            text = f"The Idempotency-Key {printable(key)} was used with another request."
            raise RequestRefused(text, code="idempotency_key_reused", status=409, param="Idempotency-Key")
        if isinstance(found, StoredAnswer):
            return _replayed(found)
        own = _with_services(handler, self._text, found)
        return KeyedAnswer(self._context, self._store, found, own, request, principal, body)

    async def _found(
        self, store: KeyStore, place: KeyPlace, digest: bytes, request: Request
    ) -> Claim | StoredAnswer | Literal["other"]:
        """The right to answer, or the answer, once nobody else answers. Raises RedisUnavailable."""
        found = await store.claim(place, digest)
        if found == "wait" or found == "answer":
            self._again.count(place.tenant)
        while True:
            if found == "wait":
                found = await self._waited(store, place, digest, request)
            if found != "answer":
                return found
            if (stored := await store.answer(place)) is not None:
                return stored
            found = await store.claim(place, digest)  # its life was over just now

    async def _waited(
        self, store: KeyStore, place: KeyPlace, digest: bytes, request: Request
    ) -> Claim | Literal["other", "answer"]:
        """Returns what becomes of it once nobody answers it any more. RequestRefused when the client leaves, or the
        gateway does."""
        left = asyncio.ensure_future(disconnected(request.receive))
        try:
            with self._again.waiting(place.tenant):
                pauses_s = look_pauses_s()
                while True:
                    self._context.draining.check()
                    await asyncio.wait({left}, timeout=next(pauses_s))
                    if left.done():
                        raise RequestRefused("The client left.", code="invalid_value")
                    if (found := await store.claim(place, digest)) != "wait":
                        return found
        finally:
            left.cancel()


class KeyedAnswer(Response):
    """The answer to a request that this gateway runs."""

    def __init__(
        self,
        context: GatewayContext,
        store: KeyStore,
        claim: Claim,
        handler: Handler,
        request: Request,
        principal: Principal,
        body: bytes,
    ) -> None:
        super().__init__(b"")
        self._context, self._store, self._claim = context, store, claim
        self._handler, self._request, self._principal = handler, request, principal
        self._posted = body
        self._given_up = asyncio.Event()
        self._client = ClientSide(MAX_ANSWER_BYTES, context.times.stuck_send_s)
        self._is_over = asyncio.Event()
        self._status = 0
        self._sent_headers: list[tuple[bytes, bytes]] = []
        self._kept = bytearray()
        self._is_whole = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer as it is made. Its making is a task of its own, which goes on without the client."""
        self._context.draining.enter()
        made = self._context.tasks.start(self._make(scope), f"keyed request {self._claim.nonce}")
        if await self._client.serve(receive, send):
            await asyncio.shield(made)

    async def _make(self, scope: Scope) -> None:
        renewing = asyncio.create_task(self._renew(), name=f"key of {self._claim.nonce}")
        try:
            request = Request(scope, receive := self._patient_client())
            response = await self._handler(request, self._principal)
            await response(scope, receive, partial(self._send, scope))
        finally:
            self._is_over.set()
            self._client.end()
            if not self._is_whole:
                await self._kept_or_not(self._store.forget(self._claim))
            self._context.draining.leave()
            await asyncio.wait({renewing})

    def _patient_client(self) -> Receive:
        """A client that has sent its body, and stays until nobody can get the answer."""
        is_sent = False

        async def receive() -> Message:
            nonlocal is_sent
            if not is_sent:
                is_sent = True
                return {"type": "http.request", "body": self._posted, "more_body": False}
            await self._given_up.wait()
            return {"type": "http.disconnect"}

        return receive

    async def _send(self, scope: Scope, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._sent_headers = message["status"], list(message.get("headers", ()))
        else:
            await self._keep(message["body"], is_last=not message.get("more_body", False), has_failed=_failed(scope))
        await self._client.put(message)

    async def _keep(self, body: bytes, *, is_last: bool, has_failed: bool) -> None:
        """Gathers the answer; before its end is sent it is stored."""
        if len(self._kept) <= MAX_ANSWER_BYTES:
            self._kept += body
        is_long = len(self._kept) > MAX_ANSWER_BYTES
        if is_long and not self._client.is_there:
            self._given_up.set()  # nobody can get it any more
        if not is_last or self._status != 200 or has_failed:
            return
        self._is_whole = True
        if is_long:
            await self._kept_or_not(self._store.run_again(self._claim))
            return
        headers = [(name.decode(), value.decode()) for name, value in self._sent_headers if name not in _OF_CONNECTION]
        await self._kept_or_not(self._store.store(self._claim, StoredAnswer(headers, bytes(self._kept))))

    async def _kept_or_not(self, call: Any) -> None:
        try:
            async with asyncio.timeout(STORE_S):
                await call
        except (RedisUnavailable, TimeoutError) as error:
            log.warning("an Idempotency-Key is not kept: %s", error)

    async def _renew(self) -> None:
        while not self._is_over.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._is_over.wait()
            if self._is_over.is_set():
                return
            with suppress(RedisUnavailable):
                is_held = await self._store.renew(self._claim)
                if not (is_held or self._is_whole or self._is_over.is_set()):
                    log.warning("an Idempotency-Key is not held any more: sent again, its request may run anew")
                    return


def look_pauses_s() -> Iterator[float]:
    """Seconds between the looks of a request that waits, without an end."""
    pause_s = LOOK_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, MOST_LOOK_S)


def _failed(scope: Scope) -> bool:
    """True for a stream that ends with an error (Delivery notes it)."""
    return bool(scope.get("tandem.failed"))


def _with_services(handler: Handler, text: TextServices, claim: Claim) -> Handler:
    """The handler with services whose ids and seeds come from the claim's nonce."""
    chance = random.Random(claim.nonce)
    own = replace(
        text,
        random_seed=lambda: chance.getrandbits(63),
        random_ids=_ids(claim.nonce),
        first_attempt=(claim.run - 1) * ATTEMPTS,
    )
    return partial(handler.func, *(own if one is text else one for one in handler.args), **handler.keywords)


def _ids(nonce: str) -> Callable[[], str]:
    """Ids of 32 hexadecimal digits, the same ones for the same nonce."""
    more = random.Random(f"ids of {nonce}")
    first: Iterable[str] = iter([nonce])
    return lambda: next(iter(first), None) or f"{more.getrandbits(128):032x}"


def _replayed(answer: StoredAnswer) -> Response:
    response = Response(answer.body)
    headers = [(name.encode(), value.encode()) for name, value in answer.headers]
    response.raw_headers = [*headers, _REPLAYED]
    return response
