"""Files of all tenants: in Redis, in compressed pieces, each for a while, a tenant's within bytes and a number.

Redis is where any gateway of any node finds them, whichever has taken them. A file is written piece by piece and is
there once it is whole; one that nobody goes on writing goes after an hour. Keys are by tenant: another tenant's id is
unknown.
"""

import asyncio
import re
import uuid
import zlib
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import msgspec

from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.reading import unsupported
from tandem.cluster.state import keys
from tandem.cluster.state.lease import LeaseLost
from tandem.cluster.state.lua import load_lua
from tandem.cluster.state.redis_client import Commands, RedisRefused, RedisUnavailable
from tandem.workers.messages.errors import RequestRefused

PIECE_BYTES = 512 * 1024
"""Bytes of a piece before compression."""
MAX_FILES = 10_000
"""Files of one tenant."""
UNFINISHED_MS = 3600_000
PREFIX = "file-"
_ID = re.compile(r"file-[0-9a-f]{32}")
BEGIN_SCRIPT = load_lua(__file__, "file_drop.lua", "file_begin.lua")
APPEND_SCRIPT = load_lua(__file__, "file_drop.lua", "file_append.lua")
FINISH_SCRIPT = load_lua(__file__, "file_drop.lua", "file_finish.lua")
DELETE_SCRIPT = load_lua(__file__, "file_drop.lua", "file_delete.lua")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is whole. Times are seconds of the wall clock. pieces: how many there are."""

    id: str
    bytes: int
    pieces: int
    created_s: int
    expires_s: int
    filename: str
    purpose: str

    def shown(self) -> dict[str, object]:
        """The file as the API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileGone(Exception):
    """The file is not there any more."""


class WriteRight(NamedTuple):
    """The right to write the output of a batch, at which each script looks. batch, lease: their keys."""

    batch: str
    lease: str
    holder: str


class FileStore:
    """The files of all tenants. ttl_s: the longest life of one. max_bytes: of one tenant, not compressed."""

    def __init__(self, redis: Commands, *, ttl_s: int, max_file_bytes: int, max_bytes: int) -> None:
        self.ttl_s = ttl_s
        self.max_file_bytes = max_file_bytes
        self.max_bytes = max_bytes
        self._redis = redis
        self._decode = msgspec.msgpack.Decoder(FileRecord).decode

    async def get(self, tenant: str, file_id: str, param: str | None = None) -> FileRecord:
        """A file of this tenant. RequestRefused 404 where there is none, 503 while Redis is away. param: the field that
        names it."""
        found = None
        if _ID.fullmatch(file_id):
            try:
                found = await self._redis.command("GET", keys.file_record(tenant, file_id))
            except RedisUnavailable as error:
                raise unavailable(error) from None
        if not isinstance(found, bytes):
            raise not_found(file_id, param)
        return self._decode(found)

    async def all_of(self, tenant: str) -> list[FileRecord]:
        """The files of a tenant, oldest first. RequestRefused 503 while Redis is away."""
        try:
            ids = await self._redis.command("ZRANGE", keys.files(tenant), 0, -1)
            assert isinstance(ids, list)
            names = [keys.file_record(tenant, file_id.decode()) for file_id in ids]
            values = await self._redis.command("MGET", *names) if names else []
        except RedisUnavailable as error:
            raise unavailable(error) from None
        assert isinstance(values, list)
        found = [self._decode(value) for value in values if isinstance(value, bytes)]
        return sorted(found, key=lambda record: (record.created_s, record.id))

    async def held_bytes(self, tenant: str) -> int:
        """Bytes of all files of a tenant, those that are written included. Raises RedisUnavailable."""
        found = await self._redis.command("HGET", keys.file_sizes(tenant), keys.FILES_TOTAL)
        return int(found) if isinstance(found, bytes) else 0

    async def delete(self, tenant: str, file_id: str) -> None:
        """Deletes a file of this tenant. RequestRefused as in get()."""
        await self.get(tenant, file_id)
        try:
            await self.script(DELETE_SCRIPT, tenant, file_id)
        except RedisUnavailable as error:
            raise unavailable(error) from None

    async def pieces(self, tenant: str, record: FileRecord) -> AsyncIterator[bytes]:
        """Yields the bytes of a file. Raises FileGone where it has gone meanwhile, and RedisUnavailable."""
        for number in range(record.pieces):
            yield await self.piece(tenant, record, number)

    async def piece(self, tenant: str, record: FileRecord, number: int) -> bytes:
        """One piece of a file. Raises as pieces()."""
        packed = await self._redis.command("HGET", keys.file_data(tenant, record.id), number)
        if not isinstance(packed, bytes):
            raise FileGone(record.id)
        return await asyncio.to_thread(zlib.decompress, packed)

    async def script(
        self, script: str, tenant: str, file_id: str, *more: str | bytes | int, right: WriteRight | None = None
    ) -> object:
        """Runs a script over the tenant's files, which may run twice where a reply is lost. right: to write an output;
        LeaseLost without it. Raises RedisUnavailable."""
        places = (keys.files(tenant), keys.file_sizes(tenant), *(right or ())[:2])
        asked = (f"{keys.files(tenant)}:", file_id, *more, *(right or ())[2:])
        outcome = await self._redis.command("EVAL", script, len(places), *places, *asked)
        if outcome == b"lost":
            raise LeaseLost
        return outcome


class FileWriter:
    """One file that is written: begin(), write() as often as there are bytes, then finish(), or drop(). right: to write
    the output of a batch, which may exceed the tenant's bytes and the number of files; without it each call raises
    LeaseLost."""

    def __init__(self, store: FileStore, tenant: str, file_id: str, right: WriteRight | None = None) -> None:
        self.bytes = 0
        self._store = store
        self._tenant = tenant
        self._id = file_id
        self._right = right
        self._held = bytearray()
        self._pieces = 0

    async def begin(self) -> None:
        """Takes a place among the tenant's files. RequestRefused 400 where it has too many."""
        most = MAX_FILES if self._right is None else 2 * MAX_FILES
        if await self._script(BEGIN_SCRIPT, UNFINISHED_MS, most) == b"many":
            raise too_many_files()

    async def write(self, data: bytes) -> None:
        """Adds bytes. RequestRefused 413 above the limits of a file and of its tenant."""
        self.hold(data)
        await self.flush()

    def hold(self, data: bytes) -> None:
        """Adds bytes, which flush() writes. RequestRefused 413 above the limit of a file."""
        self.bytes += len(data)
        if self._right is None and self.bytes > self._store.max_file_bytes:
            raise too_large(self._store.max_file_bytes)
        self._held += data

    async def flush(self) -> None:
        """Writes the pieces that are whole. Where it fails it may be called again, as begin() and finish() may."""
        while len(self._held) >= PIECE_BYTES:
            await self._append(bytes(self._held[:PIECE_BYTES]))
            del self._held[:PIECE_BYTES]

    async def finish(self, filename: str, purpose: str, created_s: int, life_s: int) -> FileRecord:
        """Writes what is left. From now on the file is there."""
        await self.flush()
        if self._held:
            await self._append(bytes(self._held))
            self._held.clear()
        record = FileRecord(
            id=self._id,
            bytes=self.bytes,
            pieces=self._pieces,
            created_s=created_s,
            expires_s=created_s + life_s,
            filename=filename,
            purpose=purpose,
        )
        self._check(await self._script(FINISH_SCRIPT, msgspec.msgpack.encode(record), life_s * 1000))
        return record

    async def drop(self) -> None:
        """Drops what was written, and its place. Raises RedisUnavailable; it may be called again."""
        await self._script(DELETE_SCRIPT)

    async def _append(self, piece: bytes) -> None:
        packed = await asyncio.to_thread(zlib.compress, piece, 1)
        most = self._store.max_bytes if self._right is None else 0
        self._check(await self._script(APPEND_SCRIPT, self._pieces, packed, len(piece), most, UNFINISHED_MS))
        self._pieces += 1

    def _check(self, outcome: object) -> None:
        if outcome == b"gone":
            raise FileGone(self._id)
        if outcome == b"full":
            text = f"Your files would have more than {self._store.max_bytes} bytes (--files-bytes); delete some."
            raise RequestRefused(text, code="content_too_large", status=413, param="file")

    async def _script(self, script: str, *more: str | bytes | int) -> object:
        return await self._store.script(script, self._tenant, self._id, *more, right=self._right)


Files = FileStore | None
"""None where there is no Redis, or no files are to be kept."""
NO_FILES = "this service keeps no files and runs no batches (--files-ttl 0, or no Redis)."


def checked_files(store: Files) -> FileStore:
    """The store. RequestRefused where there is none."""
    if store is None:
        raise unsupported("file", f"Files are not supported: {NO_FILES}")
    return store


def new_file_id(ids: Callable[[], str] = lambda: uuid.uuid4().hex) -> str:
    return PREFIX + ids()


def too_large(limit: int) -> RequestRefused:
    """The refusal of a file beyond the limit of one."""
    text = f"The file has more than {limit} bytes, the most that one may have (--max-file-bytes)."
    return RequestRefused(text, code="content_too_large", status=413, param="file")


def too_many_files() -> RequestRefused:
    """The refusal of a file, or of a batch, which will have one, to a tenant that has as many as there may be."""
    return RequestRefused(f"There are {MAX_FILES} files, the most that may be kept.", code="invalid_value")


def not_found(file_id: str, param: str | None) -> RequestRefused:
    """The refusal of an id: the same words for one that never was, has expired or is another tenant's."""
    text = f"There is no file {printable(file_id, 128)}: it has expired, or never was one of yours."
    return RequestRefused(text, code="file_not_found", status=404, param=param)


def unavailable(error: RedisUnavailable) -> RequestRefused:
    """The refusal while Redis is away, late, or refuses."""
    why = "refuses to keep more" if isinstance(error, RedisRefused) else error.state
    text = f"Files and batches cannot be read or kept now, because Redis {why}; try again."
    return RequestRefused(text, code="service_unavailable", status=503)
