"""Requests with an Idempotency-Key, in Redis, for a while: who answers each, and the answer once it is whole.

Keys are by tenant. The gateway that answers one holds a lease, which it renews; when it dies, whoever gets the same
request again runs it again, with the same nonce: from that come the id of the answer, so that there is one bill, and
its seeds.
"""

import asyncio
import hashlib
import uuid
import zlib
from typing import Literal, NamedTuple

import msgspec

from tandem.cluster.state import keys
from tandem.cluster.state.lua import load_lua
from tandem.cluster.state.redis_client import Commands, RedisUnavailable
from tandem.workers.messages.errors import RequestRefused

LEASE_MS = 10_000
MAX_ANSWER_BYTES = 2**20
BEGIN_SCRIPT = load_lua(__file__, "key_begin.lua")
END_SCRIPT = load_lua(__file__, "key_end.lua")


class StoredAnswer(NamedTuple):
    """An answer with status 200 as it was sent: its headers but those of the connection, and its bytes."""

    headers: list[tuple[str, str]]
    body: bytes


class Claim(NamedTuple):
    """The right to answer a request. place: of its key in Redis. holder: names this run. run: its number, from 1."""

    place: str
    holder: str
    nonce: str
    run: int


class KeyStore:
    """The keys of all tenants. ttl_s: their lifetime."""

    def __init__(self, redis: Commands, ttl_s: int) -> None:
        self._redis = redis
        self._ttl_ms = ttl_s * 1000

    async def claim(self, tenant: str, key: str, request: bytes) -> Claim | StoredAnswer | Literal["other", "wait"]:
        """Returns what becomes of a request now. request: its digest. Raises RequestRefused 503 while Redis is away."""
        place = keys.idempotency(tenant, hashlib.sha256(key.encode()).hexdigest())
        holder, nonce = uuid.uuid4().hex, uuid.uuid4().hex
        try:
            found = await self._redis.command(
                "EVAL", BEGIN_SCRIPT, 1, place, request, holder, nonce, LEASE_MS, self._ttl_ms
            )
        except RedisUnavailable:
            text = "An Idempotency-Key cannot be honoured now, because Redis is away; try again."
            raise RequestRefused(text, code="service_unavailable", status=503) from None
        assert isinstance(found, list)
        said = found[0].decode()
        if said == "answer":
            body = await asyncio.to_thread(zlib.decompress, found[2])
            return StoredAnswer(msgspec.msgpack.decode(found[1], type=list[tuple[str, str]]), body)
        if said == "mine":
            return Claim(place, holder, found[1].decode(), int(found[2]))
        return "other" if said == "other" else "wait"

    async def renew(self, claim: Claim) -> None:
        """Says that it is still answered. Raises RedisUnavailable."""
        await self._end(claim, "renew", LEASE_MS)

    async def store(self, claim: Claim, answer: StoredAnswer) -> None:
        """Stores the answer, whole. Raises RedisUnavailable."""
        packed = await asyncio.to_thread(zlib.compress, answer.body, 1)
        await self._end(claim, "store", self._ttl_ms, msgspec.msgpack.encode(answer.headers), packed)

    async def run_again(self, claim: Claim) -> None:
        """The answer is not stored; sent again, the request runs again as the same. Raises RedisUnavailable."""
        await self._end(claim, "again", self._ttl_ms)

    async def forget(self, claim: Claim) -> None:
        """The request has failed: sent again, it is a new one. Raises RedisUnavailable."""
        await self._end(claim, "forget")

    async def _end(self, claim: Claim, *how: str | int | bytes) -> None:
        await self._redis.command("EVAL", END_SCRIPT, 1, claim.place, claim.holder, *how)
