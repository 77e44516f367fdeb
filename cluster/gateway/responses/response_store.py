"""Stored responses, for previous_response_id: in Redis, each for a while, a tenant's within bytes and a number.

A value has all items of its conversation, so that none depends on an earlier one. Beyond a cap a tenant's oldest go
first. Keys are by tenant: another tenant's id is unknown. Without Redis answers go on, and are not stored.
"""

import asyncio
import logging
import re
import zlib
from collections.abc import Callable

import msgspec

from tandem.cluster.gateway.http.tasks import TaskOwner
from tandem.cluster.gateway.responses.events.event_batch import Batch, Seen
from tandem.cluster.gateway.responses.response_items import Item
from tandem.cluster.gateway.schemas.reading import unsupported
from tandem.cluster.state import keys
from tandem.cluster.state.lua import load_lua
from tandem.cluster.state.redis_client import Commands, RedisUnavailable
from tandem.workers.messages.errors import RequestRefused

log = logging.getLogger("tandem.gateway")
RUNNING = ("queued", "in_progress")
"""The states of a response of the background that is not over."""
MAX_RESPONSES = 4096
"""Responses of one tenant."""
WAIT_S = 0.25
"""Time that the end of an answer waits for its storing, so that the next request finds it through any gateway."""
PREFIX = "resp_"
_ID = re.compile(r"resp_[0-9a-f]{32}")
PUT_SCRIPT = load_lua(__file__, "response_drop.lua", "response_put.lua")
BEGIN_SCRIPT = load_lua(__file__, "response_drop.lua", "response_put.lua", "response_begin.lua")
SETTLE_SCRIPT = load_lua(__file__, "response_drop.lua", "response_running.lua", "response_put.lua")
APPEND_SCRIPT = load_lua(__file__, "response_drop.lua", "response_running.lua", "response_append.lua")
STATE_SCRIPT = load_lua(__file__, "response_state.lua", "response_wish.lua")
EVENTS_SCRIPT = load_lua(__file__, "response_state.lua", "response_events.lua")
DELETE_SCRIPT = load_lua(__file__, "response_drop.lua", "response_delete.lua")


class StoredResponse(msgspec.Struct, frozen=True, array_like=True):
    """response: the answer's JSON. items: of its conversation, its own output included. is_over False: it is made
    in the background, and its state says how far it is (background.py)."""

    response: bytes
    items: list[Item]
    is_over: bool = True


class ResponseStore:
    """The responses of all tenants. ttl_s: their lifetime. max_bytes: of one tenant, compressed. tasks: own the writes,
    which go on when their request has ended. count: is told what became of each write: stored, too_large or failed."""

    def __init__(
        self,
        redis: Commands,
        tasks: TaskOwner,
        *,
        ttl_s: int,
        max_bytes: int,
        max_responses: int = MAX_RESPONSES,
        count: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._redis = redis
        self._tasks = tasks
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._count = count
        self._is_trusted = True
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(StoredResponse).decode

    async def keep(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Begins to store a response, and waits a moment for it, unless the last one was not stored either."""
        writing = self._tasks.start(self._put(tenant, response_id, stored), "store a response")
        if self._is_trusted:
            await asyncio.wait({writing}, timeout=WAIT_S)

    async def get(self, tenant: str, response_id: str, param: str | None = None) -> StoredResponse:
        """A response of this tenant. RequestRefused 404 when there is none, 503 when Redis is not there. param: the
        field that names it."""
        found = None
        if _ID.fullmatch(response_id):
            try:
                found = await self._redis.command("GET", keys.response(tenant, response_id))
            except RedisUnavailable as error:
                raise unavailable(READ % error.state) from None
        if not isinstance(found, bytes):
            raise not_found(response_id, param)
        try:
            return await asyncio.to_thread(lambda: self._decode(zlib.decompress(found)))
        except (zlib.error, msgspec.DecodeError):  # of another version of the service
            raise not_found(response_id, param) from None

    async def delete(self, tenant: str, response_id: str) -> None:
        """Deletes a response of this tenant. RequestRefused as in get()."""
        if not _ID.fullmatch(response_id):
            raise not_found(response_id, None)
        try:
            # not what the script found: where its reply is lost it runs twice, and finds nothing then
            if not await self._redis.command("EXISTS", keys.response(tenant, response_id)):
                raise not_found(response_id, None)
            await self._script(DELETE_SCRIPT, tenant, response_id)
        except RedisUnavailable as error:
            raise unavailable(READ % error.state) from None

    async def begin(
        self, tenant: str, response_id: str, value: bytes, lease_ms: int, first: Batch | None = None
    ) -> None:
        """Stores a response that is made from now on. value: of packed(). first: of its events; None: they are not
        kept. RequestRefused where it has no room. Raises RedisUnavailable."""
        size = len(value) + (0 if first is None else len(first.packed))
        if size > self._max_bytes:
            text = f"The conversation takes {size} bytes of the store, more than a tenant has; it cannot be made in"
            raise RequestRefused(f"{text} the background.", code="content_too_large", status=413)
        events = () if first is None else (first.packed, first.number)
        await self._script(BEGIN_SCRIPT, tenant, response_id, value, *self._limits, lease_ms, *events)

    async def append(self, tenant: str, response_id: str, batch: Batch) -> str | None:
        """Keeps more events of a response of the background. Returns why it is over, None where it is not. Raises
        RedisUnavailable."""
        more = (batch.packed, batch.number, self._max_bytes)
        return self._counted(await self._script(APPEND_SCRIPT, tenant, response_id, *more))

    async def events(self, tenant: str, response_id: str, number: int) -> Seen:
        """The batches of a response from this number on. Raises RedisUnavailable."""
        places = keys.response_state(tenant, response_id), keys.response_events(tenant, response_id)
        found = await self._redis.command("EVAL", EVENTS_SCRIPT, len(places), *places, f"{number}-0")
        assert isinstance(found, list)
        state, last, *more = found
        batches = [Batch(_number(name), packed) for name, packed in zip(more[::2], more[1::2], strict=True)]
        return Seen(state is not None and state.decode() in RUNNING, _number(last), batches)

    async def settle(self, tenant: str, response_id: str, value: bytes) -> None:
        """Stores a response of the background that has ended, unless it was cancelled, lost or deleted before. value:
        of packed(). One that has no room ends as "too_large". Raises RedisUnavailable."""
        if len(value) > self._max_bytes:
            await self.state(tenant, response_id, "too_large")
            self._count("too_large")
        elif self._counted(await self._script(SETTLE_SCRIPT, tenant, response_id, value, *self._limits)) is None:
            self._count("stored")

    async def state(self, tenant: str, response_id: str, wish: str, lease_ms: int = 0) -> str | None:
        """State of a response of the background after a wish (response_state.lua). Raises RedisUnavailable."""
        place = keys.response_state(tenant, response_id)
        found = await self._redis.command("EVAL", STATE_SCRIPT, 1, place, wish, lease_ms)
        return found.decode() if isinstance(found, bytes) else None

    def _counted(self, outcome: object) -> str | None:
        """The state in which a script has left a response, None where it did its work."""
        state = outcome.decode() if isinstance(outcome, bytes) else None
        if state == "too_large":
            self._count(state)
        return state

    @property
    def _limits(self) -> tuple[int, int, int]:
        return self._ttl_s, self._max_bytes, self._max_responses

    async def packed(self, stored: StoredResponse) -> bytes:
        """The bytes that are kept in Redis for a response."""
        return await asyncio.to_thread(lambda: zlib.compress(self._encode(stored), 1))

    async def _put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        value = await self.packed(stored)
        if len(value) > self._max_bytes:
            self._count("too_large")
            log.warning("response %s is not stored: it has %d bytes, above the limit", response_id, len(value))
            return
        try:
            await self._script(PUT_SCRIPT, tenant, response_id, value, *self._limits)
            self._is_trusted = True
            self._count("stored")
        except RedisUnavailable as error:
            self._is_trusted = False
            self._count("failed")
            log.warning("response %s is not stored: %s", response_id, error)

    async def _script(self, script: str, tenant: str, response_id: str, *more: str | bytes | int) -> object:
        """Runs a script, which may run twice where a reply is lost."""
        places = (keys.responses(tenant), keys.response_sizes(tenant))
        prefix = keys.response(tenant, "")
        return await self._redis.command(
            "EVAL", script, len(places), *places, prefix, keys.RESPONSES_TOTAL, response_id, *more
        )


def _number(name: bytes) -> int:
    """The number of a batch by its name in Redis."""
    return int(name.partition(b"-")[0])


Store = ResponseStore | None
"""None where there is no Redis, or nothing is to be stored."""
NO_STORE = "this service keeps no responses (--response-store-ttl 0, or no Redis)."


def checked(store: Store, param: str | None) -> ResponseStore:
    """The store. RequestRefused where there is none."""
    if store is None:
        name = param or "response_id"
        raise unsupported(name, f"{name} is not supported: {NO_STORE}")
    return store


def not_found(response_id: str, param: str | None) -> RequestRefused:
    """The refusal of an id: the same words for one that never was, has expired or is another tenant's."""
    message = f"There is no response {response_id[:128]!r}: it has expired, or never was one of yours."
    code = "response_not_found" if param is None else "previous_response_not_found"
    return RequestRefused(message, code=code, status=404, param=param)


READ = "Stored responses cannot be read now, because Redis %s; try again, or send the whole conversation."


def unavailable(message: str) -> RequestRefused:
    """The refusal while Redis is of no use."""
    return RequestRefused(message, code="service_unavailable", status=503)
