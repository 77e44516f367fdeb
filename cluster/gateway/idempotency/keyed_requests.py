"""Requests with an Idempotency-Key. Sent again while it is answered, one waits; afterwards it gets the same bytes.

What was begun is made to its end, whether its client is there or not, and the answer is stored before its last bytes
are sent: a client that has not got the end can ask for it again. What fails is forgotten, so that it may be tried
again. An answer that is longer than what is kept runs again, with the same id and the same seeds, and is on the bill
once.
"""

import asyncio
import hashlib
import logging
import random
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tandem.cluster.gateway.generation.delivery import disconnected
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.body import printable, read_body
from tandem.cluster.gateway.idempotency.key_store import MAX_ANSWER_BYTES, Claim, KeyStore, StoredAnswer
from tandem.cluster.gateway.schemas.reading import invalid
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.workers.messages.errors import RequestRefused

log = logging.getLogger("tandem.gateway")
HEADER = "idempotency-key"
MAX_KEY_CHARS = 255
LOOK_S = 0.25
"""Pause between two looks of a request that waits for the one before it."""
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
        found = await self._claimed(self._store, principal.tenant, key, digest, request)
        if isinstance(found, StoredAnswer):
            return _replayed(found)
        own = _with_services(handler, self._text, found)
        return KeyedAnswer(self._context, self._store, found, own, request, principal, body)

    async def _claimed(
        self, store: KeyStore, tenant: str, key: str, digest: bytes, request: Request
    ) -> Claim | StoredAnswer:
        """The right to answer, or the answer, once nobody else answers."""
        left: asyncio.Future[None] | None = None
        try:
            while (found := await store.claim(tenant, key, digest)) == "wait":
                self._context.draining.check()
                left = left or asyncio.ensure_future(disconnected(request.receive))
                await asyncio.wait({left}, timeout=LOOK_S)
                if left.done():
                    raise RequestRefused("The client left.", code="invalid_value")
        finally:
            if left is not None:
                left.cancel()
        if found == "other":
            text = f"The Idempotency-Key {printable(key)} was used with another request."
            raise RequestRefused(text, code="idempotency_key_reused", status=409, param="Idempotency-Key")
        return found


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
        self._has_client = True
        self._is_over = asyncio.Event()
        self._status = 0
        self._sent_headers: list[tuple[bytes, bytes]] = []
        self._kept = bytearray()
        self._is_whole = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer as it is made. Its making is a task of its own, which goes on without the client."""
        self._context.draining.enter()
        made = self._context.tasks.start(self._make(scope, send), f"keyed request {self._claim.nonce}")
        try:
            await asyncio.shield(made)
        finally:
            self._has_client = False

    async def _make(self, scope: Scope, send: Send) -> None:
        renewing = asyncio.create_task(self._renew(), name=f"key of {self._claim.nonce}")
        try:
            request = Request(scope, receive := self._client())
            response = await self._handler(request, self._principal)
            await response(scope, receive, partial(self._send, scope, send))
        finally:
            self._is_over.set()
            if not self._is_whole:
                await self._kept_or_not(self._store.forget(self._claim))
            self._context.draining.leave()
            await asyncio.wait({renewing})

    def _client(self) -> Receive:
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

    async def _send(self, scope: Scope, send: Send, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._sent_headers = message["status"], list(message.get("headers", ()))
        else:
            await self._keep(message["body"], is_last=not message.get("more_body", False), has_failed=_failed(scope))
        if self._has_client:
            await send(message)

    async def _keep(self, body: bytes, *, is_last: bool, has_failed: bool) -> None:
        """Gathers the answer; before its end is sent it is stored."""
        if len(self._kept) <= MAX_ANSWER_BYTES:
            self._kept += body
        is_long = len(self._kept) > MAX_ANSWER_BYTES
        if is_long and not self._has_client:
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
            if not self._is_over.is_set():
                with suppress(RedisUnavailable):
                    await self._store.renew(self._claim)


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
