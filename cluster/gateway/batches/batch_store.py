"""Batches of all tenants in Redis: any gateway shows and cancels them, one at a time runs each.

    validating -> in_progress -> finalizing -> completed, expired
    validating, in_progress -- no input --> finalizing -> failed;  -- cancel --> cancelling -> cancelled

Rows of lines that were answered are kept, each as soon as it is there, until they are written as files: whoever goes on
with a batch runs only lines without a row. The right to go on is a lease, at which every script of a runner looks; who
has lost it keeps, writes and reads nothing.
"""

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.cluster.gateway.batches.batch_records import TIMED, BatchFacts, StoredBatch
from tandem.cluster.gateway.files.file_store import MAX_FILES, WriteRight, not_found, too_many_files
from tandem.cluster.gateway.http.body import printable
from tandem.cluster.state import keys
from tandem.cluster.state.lease import LeaseLost, RedisLease
from tandem.cluster.state.lua import load_lua
from tandem.cluster.state.redis_client import Commands
from tandem.workers.messages.errors import RequestRefused

MAX_LIVE = 64
"""Batches of one tenant that are not over."""
MAX_BATCHES = 1000
"""Batches of one tenant that are kept."""
LEASE_MS = 10_000
READ_AFTER_S = 3600
"""Time for which an input is kept beyond the window, in which the lines that are left get their errors."""
PREFIX = "batch_"
SUCCEEDED, FAILED = b"1", b"0"
CREATE_SCRIPT = load_lua(__file__, "batch_create.lua")
MOVE_SCRIPT = load_lua(__file__, "batch_move.lua")
ROW_SCRIPT = load_lua(__file__, "batch_row.lua")
READ_SCRIPT = load_lua(__file__, "batch_read.lua")


class BatchPlace(msgspec.Struct, frozen=True, order=True):
    """A batch by its tenant and id."""

    tenant: str
    id: str

    @property
    def member(self) -> str:
        """Its name among the live batches; no tenant's name has a slash."""
        return f"{self.tenant}/{self.id}"


class BatchStore:
    """The batches of a base model. gateway: the name of this gateway, as a holder of leases."""

    def __init__(self, redis: Commands, model: str, gateway: str) -> None:
        self._redis = redis
        self._live = keys.live_batches(model)
        self._gateway = gateway
        self._decode = msgspec.msgpack.Decoder(BatchFacts).decode

    async def create(self, facts: BatchFacts) -> BatchFacts:
        """Stores a batch, whose status is "validating", and keeps its input until its window is over. Returns its
        facts; those of one with this id that is there already, which stays as it is. RequestRefused where its tenant
        has too many (429), or too many files, or the input has gone. Raises RedisUnavailable."""
        place = BatchPlace(facts.tenant, facts.id)
        tenant, given = facts.tenant, facts.input_file_id
        of_files = (keys.files(tenant), keys.file_sizes(tenant), keys.file_record(tenant, given))
        of_batch = (keys.batches(tenant), self._key(place), self._live)
        names = (*of_batch, *of_files, keys.file_data(tenant, given))
        member = (place.member, f"{tenant}/", MAX_LIVE, msgspec.msgpack.encode(facts), facts.created_s)
        read_s = facts.expires_s - facts.created_s + READ_AFTER_S
        more = (facts.life_s * 1000, read_s * 1000, given, facts.output_file_id)
        most = (MAX_FILES, MAX_BATCHES, keys.batch(tenant, ""))
        outcome = await self._redis.command("EVAL", CREATE_SCRIPT, len(names), *names, facts.id, *member, *more, *most)
        if outcome == b"many":
            text = f"You have {MAX_LIVE} batches that are not over, the most that there may be; try again."
            raise RequestRefused(text, code="rate_limit_exceeded", status=429)
        if outcome == b"files":
            raise too_many_files()
        if outcome == b"gone":
            raise not_found(given, "input_file_id")
        assert isinstance(outcome, bytes)
        return self._decode(outcome)

    async def get(self, place: BatchPlace) -> StoredBatch | None:
        """A batch, None where there is none. Raises RedisUnavailable."""
        (found,) = await self._redis.pipeline([["HGETALL", self._key(place)]])
        return self._stored(found)

    async def all_of(self, tenant: str) -> list[StoredBatch]:
        """The batches of a tenant, oldest first. Raises RedisUnavailable."""
        ids = await self._redis.command("ZRANGE", keys.batches(tenant), 0, -1)
        assert isinstance(ids, list)
        places = [BatchPlace(tenant, batch_id.decode()) for batch_id in ids]
        found = await self._redis.pipeline([["HGETALL", self._key(place)] for place in places]) if places else []
        batches = [stored for one in found if (stored := self._stored(one)) is not None]
        return sorted(batches, key=lambda batch: (batch.facts.created_s, batch.facts.id))

    async def live(self) -> list[BatchPlace]:
        """The batches of all tenants that are not over, oldest first. Raises RedisUnavailable."""
        members = await self._redis.command("ZRANGE", self._live, 0, -1)
        assert isinstance(members, list)
        return [BatchPlace(*member.decode().split("/", 1)) for member in members]

    async def move(self, place: BatchPlace, to: str, now_s: float, fields: dict[str, Any], *, is_owner: bool) -> str:
        """Status of a batch after a wish; "" where there is none. fields: to set with it. is_owner False: a client's
        wish. Raises LeaseLost and RedisUnavailable."""
        names = (self._key(place), self._live, keys.batch_rows(place.tenant, place.id), self._lease_key(place))
        flat = [part for pair in fields.items() for part in pair]
        holder = self._gateway if is_owner else ""
        asked = (to, int(now_s), place.member, holder, *flat)
        outcome = await self._redis.command("EVAL", MOVE_SCRIPT, len(names), *names, *asked)
        status = outcome.decode() if isinstance(outcome, bytes) else ""
        if status == "lost":
            raise LeaseLost
        return status

    # ---- of the gateway that runs it ----

    def lease(self, place: BatchPlace) -> RedisLease:
        """The lease of a batch."""
        return RedisLease(self._redis, self._lease_key(place), self._gateway, LEASE_MS)

    def right(self, place: BatchPlace) -> WriteRight:
        """The right of this gateway to write the files of a batch, as long as it has the lease."""
        return WriteRight(self._key(place), self._lease_key(place), self._gateway)

    async def holders(self, places: Sequence[BatchPlace]) -> list[tuple[BatchPlace, str]]:
        """The gateway that has the lease of each batch, "" for none. Raises RedisUnavailable."""
        found = await self._redis.command("MGET", *map(self._lease_key, places)) if places else []
        assert isinstance(found, list)
        names = [one.decode() if isinstance(one, bytes) else "" for one in found]
        return list(zip(places, names, strict=True))

    async def status(self, place: BatchPlace) -> str:
        """The status of a batch, "" where there is none. Raises RedisUnavailable."""
        found = await self._redis.command("HGET", self._key(place), "status")
        return found.decode() if isinstance(found, bytes) else ""

    async def keep_row(self, facts: BatchFacts, number: int, row: bytes, *, succeeded: bool) -> tuple[str, int]:
        """Keeps the row of a line. Returns the batch's status, and the bytes of all of its tenant's files. Raises
        LeaseLost, where its lines are over too, and RedisUnavailable."""
        place = BatchPlace(facts.tenant, facts.id)
        rows, sizes = keys.batch_rows(place.tenant, place.id), keys.file_sizes(place.tenant)
        names = (self._key(place), rows, self._lease_key(place), sizes)
        value = (SUCCEEDED if succeeded else FAILED) + await asyncio.to_thread(zlib.compress, row, 1)
        kept = (self._gateway, number, value, "completed" if succeeded else "failed", len(row) + 1)
        more = (facts.output_file_id, facts.life_s * 1000)
        found = await self._redis.command("EVAL", ROW_SCRIPT, len(names), *names, *kept, *more)
        assert isinstance(found, list)
        if found[0] == b"lost":
            raise LeaseLost
        return found[0].decode(), int(found[1])

    async def numbers(self, place: BatchPlace) -> list[int]:
        """The numbers of the lines that have a row, in order. Raises LeaseLost and RedisUnavailable."""
        return sorted(map(int, await self._read(place, "HKEYS")))

    async def rows(self, place: BatchPlace, numbers: Sequence[int]) -> list[tuple[bool, bytes]]:
        """The rows of these lines, and whether each was answered with 200. Raises LeaseLost and RedisUnavailable."""
        found = await self._read(place, "HMGET", *numbers)
        if None in found:
            raise LeaseLost  # another has written the files
        return await asyncio.to_thread(
            lambda: [(value[:1] == SUCCEEDED, zlib.decompress(value[1:])) for value in found]
        )

    # ---- inside ----

    async def _read(self, place: BatchPlace, *asked: str | int) -> list[Any]:
        names = (keys.batch_rows(place.tenant, place.id), self._lease_key(place))
        found = await self._redis.command("EVAL", READ_SCRIPT, len(names), *names, self._gateway, *asked)
        if found == b"lost":
            raise LeaseLost
        assert isinstance(found, list)
        return found

    def _key(self, place: BatchPlace) -> str:
        return keys.batch(place.tenant, place.id)

    def _lease_key(self, place: BatchPlace) -> str:
        return keys.batch_lease(place.tenant, place.id)

    def _stored(self, found: object) -> StoredBatch | None:
        fields = found if isinstance(found, dict) else {}
        if b"facts" not in fields:
            return None
        number = {name: int(fields.get(name.encode(), 0)) for name in ("total", "completed", "failed")}
        return StoredBatch(
            facts=self._decode(fields[b"facts"]),
            status=fields[b"status"].decode(),
            times={name: int(fields[key]) for name in TIMED if (key := f"{name}_at".encode()) in fields},
            ends_as=fields.get(b"ends_as", b"completed").decode(),
            has_output=fields.get(b"has_output") == b"1",
            has_errors=fields.get(b"has_errors") == b"1",
            errors=msgspec.json.decode(fields.get(b"errors", b"[]")),
            **number,
        )


def batch_not_found(batch_id: str) -> RequestRefused:
    """The refusal of an id: the same words for one that never was, has expired or is another tenant's."""
    text = f"There is no batch {printable(batch_id, 128)}: it has expired, or never was one of yours."
    return RequestRefused(text, code="batch_not_found", status=404)
