"""Requests with an Idempotency-Key, in Redis, for a while: who answers each, and the answer once it is whole.

Keys are by tenant. The gateway that answers one holds a lease, which it renews; when it dies, whoever gets the same
request again runs it again, with the same nonce: from that come the id of the answer, so that there is one bill, and
its seeds. A tenant's keys and the bytes of their answers are counted: an answer that has no room is not kept.
"""

import asyncio
import hashlib
import uuid
import zlib
from typing import Literal, NamedTuple

import msgspec

from tandem.cluster.state import keys
from tandem.cluster.state.lua import load_lua
from tandem.cluster.state.redis_client import Commands
from tandem.workers.messages.errors import RequestRefused

LEASE_MS = 10_000
MAX_ANSWER_BYTES = 2**20
MAX_BYTES = 64 * 2**20
KEY_BYTES = 512
"""Roughly what a key without an answer takes in Redis: a tenant has no more keys than would fill the bytes of answers
once more."""
BEGIN_SCRIPT = load_lua(__file__, "key_count.lua", "key_begin.lua")
END_SCRIPT = load_lua(__file__, "key_count.lua", "key_end.lua")


class KeyPlace(NamedTuple):
    """A key of a tenant. id: its SHA-256."""

    tenant: str
    id: str


class StoredAnswer(NamedTuple):
    """An answer with status 200 as it was sent: its headers but those of the connection, and its bytes."""

    headers: list[tuple[str, str]]
    body: bytes


class Claim(NamedTuple):
    """The right to answer a request. holder: names this run. run: its number, from 1."""

    place: KeyPlace
    holder: str
    nonce: str
    run: int


class KeyStore:
    """The keys of all tenants. ttl_s: their lifetime from the last sign of the gateway that answers them; it is longer
    than a lease. max_bytes: of the stored answers of one tenant, compressed."""

    def __init__(self, redis: Commands, ttl_s: int, max_bytes: int = MAX_BYTES) -> None:
        self._redis = redis
        self._ttl_ms = ttl_s * 1000
        self._max_bytes = max_bytes

    async def claim(self, place: KeyPlace, request: bytes) -> Claim | Literal["other", "wait", "answer"]:
        """Returns what becomes of a request now. request: its digest. RequestRefused 429 where the tenant has too many
        keys. Raises RedisUnavailable."""
        holder, nonce, most = uuid.uuid4().hex, uuid.uuid4().hex, self._max_bytes // KEY_BYTES
        found = await self._script(BEGIN_SCRIPT, place, request, holder, nonce, LEASE_MS, self._ttl_ms, most)
        assert isinstance(found, list)
        said = found[0].decode()
        if said == "many":
            text = f"You have {most} Idempotency-Keys, the most that are known at a time; try again, or send none."
            raise RequestRefused(text, code="rate_limit_exceeded", status=429)
        if said == "mine":
            return Claim(place, holder, found[1].decode(), int(found[2]))
        return "other" if said == "other" else "answer" if said == "answer" else "wait"

    async def answer(self, place: KeyPlace) -> StoredAnswer | None:
        """The answer that is stored; None where it is none any more. Raises RedisUnavailable."""
        found = await self._redis.command("HMGET", keys.idempotency(*place), "head", "body")
        assert isinstance(found, list)
        head, packed = found
        if head is None:
            return None
        body = await asyncio.to_thread(zlib.decompress, packed)
        return StoredAnswer(msgspec.msgpack.decode(head, type=list[tuple[str, str]]), body)

    async def renew(self, claim: Claim) -> bool:
        """Says that it is still answered. False: another answers it, or Redis has lost it. Raises RedisUnavailable."""
        return await self._end(claim, "renew", LEASE_MS) == 1

    async def store(self, claim: Claim, answer: StoredAnswer) -> None:
        """Stores the answer, whole, unless its tenant's have too many bytes: then as run_again(). Raises
        RedisUnavailable."""
        packed = await asyncio.to_thread(zlib.compress, answer.body, 1)
        await self._end(claim, "store", msgspec.msgpack.encode(answer.headers), packed, self._max_bytes)

    async def run_again(self, claim: Claim) -> None:
        """The answer is not stored; sent again, the request runs again as the same. Raises RedisUnavailable."""
        await self._end(claim, "again")

    async def forget(self, claim: Claim) -> None:
        """The request has failed: sent again, it is a new one. Raises RedisUnavailable."""
        await self._end(claim, "forget")

    async def _end(self, claim: Claim, what: str, *more: int | bytes) -> object:
        return await self._script(END_SCRIPT, claim.place, claim.holder, what, self._ttl_ms, *more)

    async def _script(self, text: str, place: KeyPlace, *asked: str | int | bytes) -> object:
        names = keys.idempotency(*place), keys.idempotency_keys(place.tenant), keys.idempotency_sizes(place.tenant)
        return await self._redis.command("EVAL", text, len(names), *names, place.id, *asked)


def key_place(tenant: str, key: str) -> KeyPlace:
    """The place of a tenant's key, as its client wrote it."""
    return KeyPlace(tenant, hashlib.sha256(key.encode()).hexdigest())
