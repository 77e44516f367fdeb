"""The adapters that a service should serve: durable in Redis, a whole copy in every process that uses it.

Gateways and `tandem adapters` change it by compare-and-set; gateways and coordinators look at its version counter when
a change is announced, and now and then besides, and read the list when that moved. Without Redis the last copy is
served and nothing can be changed; a Redis that lost its data, or is as it was some changes ago, gets the copy back. One
event loop; no request waits on this file.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from tandem.cluster.adapters.entries import AdapterEntry, BaseFacts
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import ANNOUNCE, Announcements, NoAnnouncements, announcement
from tandem.cluster.state.redis_client import Commands, Part, RedisUnavailable

log = logging.getLogger("tandem.adapters")
POLL_S = 0.5
SUBSCRIBED_POLL_S = 2.0
"""While changes are announced; no less than without."""

COMPARE_AND_SET: Final = f"""
local now = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if now ~= ARGV[2] and now ~= ARGV[3] then return 0 end
if now == ARGV[3] then return tonumber(redis.call('HGET', KEYS[1], ARGV[4]) or '1') end
if ARGV[5] and (redis.call('HGET', KEYS[1], ARGV[4]) or '') ~= ARGV[5] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
local version = redis.call('HINCRBY', KEYS[1], ARGV[4], 1)
{ANNOUNCE}
return version
"""
"""Field, value expected ('' none), value wanted ('' none), field of the counter, the counter expected if that matters.
The counter by now, also where it is as wanted already: the client may send it twice. 0: nothing was changed."""

SEED: Final = f"""
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 0 end
for i = 2, #ARGV, 2 do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) end
local version = redis.call('HINCRBY', KEYS[1], ARGV[1], 1)
{ANNOUNCE}
return version
"""
"""Field of the counter, then fields and values: written where no list ever was."""

RESTORE: Final = f"""
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
if (redis.call('HGET', KEYS[1], ARGV[2]) or '') ~= ARGV[3] then return 0 end
for _, name in ipairs(cjson.decode(ARGV[5]).gone) do redis.call('HDEL', KEYS[1], name) end
for i = 6, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])
{ANNOUNCE}
return 1
"""
"""The sentinel, field of the counter, the counter expected and its next value, names to remove, fields and values."""
JUMP: Final = 2**20
"""Who restores the list at the same moment as another, from another copy, must not write the same counter."""


class _Held(NamedTuple):
    entry: AdapterEntry
    raw: bytes


class AdapterList:
    """The list of one base model. redis None: this process has it to itself."""

    def __init__(self, redis: Commands | None, base: str) -> None:
        self.model = base
        self._redis = redis
        self._key = keys.adapters(base)
        self._held: dict[str, _Held] = {}
        self._seen: tuple[bytes, bytes] | None = None
        self._version = 0
        self._earlier: Mapping[str, _Held] = {}
        self._sentinel: bytes | None = None
        self._base: BaseFacts | None = None
        self._base_unsaved = False
        self._unsaved: dict[str, AdapterEntry] = {}
        self._lock = asyncio.Lock()
        self.entries: Mapping[str, AdapterEntry] = MappingProxyType({})
        self.is_known = False
        """`entries` are more than nothing read yet."""

    def adopt(self, entries: Iterable[AdapterEntry]) -> None:
        """Takes entries of an earlier life of the service: served until Redis was read, and written to a Redis in
        which there was never a list of this model. Before the first refresh."""
        self._earlier = {entry.name: _Held(entry, msgspec.msgpack.encode(entry)) for entry in entries}
        self.is_known = True
        self._take(dict(self._earlier))

    async def refresh(self) -> bool:
        """Takes over what has changed; whether anything had. RedisUnavailable: the copy stays as it is."""
        if self._redis is None:
            return False
        async with self._lock:
            return await self._refresh(self._redis)

    async def replace(
        self,
        before: AdapterEntry | None,
        after: AdapterEntry | None,
        name: str,
        check: Callable[[], None] | None = None,
    ) -> bool:
        """Lists `after` under the name where `before` was (None: nothing). False: it was not, somebody was faster; then
        the copy is fresh. RedisUnavailable: nothing is known to have changed. check: raises when `entries` as they are
        do not allow it; then it happens only while the whole list is as it was checked."""
        async with self._lock:
            held = self._held.get(name)
            if (held.entry if held is not None else None) != before:
                return False
            if check is not None:
                check()
            raw = msgspec.msgpack.encode(after) if after is not None else b""
            version = None if check is None else self._seen[1] if self._seen is not None else b""
            if self._redis is not None:
                written = await self._compare_and_set(self._redis, name, held, raw, version)
                if not written:
                    self._seen = None
                    await self._refresh(self._redis)
                    return False
                self._version = max(self._version, written)
            changed = {key: value for key, value in self._held.items() if key != name}
            self._take(changed | ({name: _Held(after, raw)} if after is not None else {}))
            return True

    def keep(self, entry: AdapterEntry) -> None:
        """Lists it here at once, and in Redis when that answers again: what the service's own settings ask for."""
        self._unsaved[entry.name] = entry
        self._take(self._held | {entry.name: _Held(entry, msgspec.msgpack.encode(entry))})

    def announce(self, base: BaseFacts) -> None:
        """Writes to Redis, as soon as that answers, what the list belongs to: for readers that have only Redis."""
        self._base, self._base_unsaved = base, True

    async def base(self) -> BaseFacts | None:
        """What was announced; None when no service ever did. RedisUnavailable."""
        if self._redis is None:
            return self._base
        value = await self._redis.command("HGET", self._key, keys.ADAPTERS_BASE)
        return msgspec.msgpack.decode(value, type=BaseFacts) if isinstance(value, bytes) else None

    async def reseed(self) -> None:
        """Writes the copy into a Redis that lost its data; what others have written since stays. RedisUnavailable."""
        if self._redis is None or (not self._held and self._base is None):
            return
        # an entry that is already there was written after the loss
        commands: list[list[Part]] = [["HSETNX", self._key, name, held.raw] for name, held in self._held.items()]
        if self._base is not None:
            commands.append(["HSETNX", self._key, keys.ADAPTERS_BASE, msgspec.msgpack.encode(self._base)])
            commands.append(["SADD", keys.ADAPTER_MODELS, self.model])
        await self._write(self._redis, commands)

    async def modules_are_listed(self, service: str) -> bool:
        """Has a gateway of this life of the service listed --lora-modules? Not known, so no, while Redis is
        unavailable."""
        if self._redis is None:
            return False
        try:
            return await self._redis.command("EXISTS", keys.modules_listed(service)) == 1
        except RedisUnavailable:
            return False

    async def note_modules_listed(self, service: str) -> None:
        """So that a gateway that comes later leaves them as they are by then."""
        if self._redis is not None:
            with suppress(RedisUnavailable):
                await self._redis.command("SET", keys.modules_listed(service), 1, "EX", keys.MODULES_LISTED_TTL_S)

    async def run(
        self,
        on_change: Callable[[], None],
        period_s: float = POLL_S,
        changes: Announcements = NoAnnouncements(),
    ) -> None:
        """Refreshes until it is cancelled: when a change is announced, and each period, which may be longer then."""
        unavailable = False
        while True:
            is_trusting = False
            try:
                if await self.refresh():
                    on_change()
                unavailable, is_trusting = False, changes.is_subscribed
            except RedisUnavailable as error:
                if not unavailable:
                    log.warning("Redis is unavailable (%s): going on with the adapters known", error)
                unavailable = True
            except Exception:
                log.exception("the list of adapters was not read: going on with the last one")
            await changes.wait(self._key, max(period_s, SUBSCRIBED_POLL_S) if is_trusting else period_s)

    # ---- inside --------------------------------------------------------------------------------------------------

    async def _refresh(self, redis: Commands) -> bool:
        sentinel, version = await redis.pipeline([["GET", keys.SENTINEL], ["HGET", self._key, keys.ADAPTERS_VERSION]])
        if not isinstance(sentinel, bytes):
            raise RedisUnavailable("its data is gone")
        if self._sentinel not in (None, sentinel):  # all was lost, and the sentinel written again by somebody else
            await self.reseed()
            version, self._version = None, 0
        elif self._base is not None and sentinel == self._sentinel and _number(version) < self._version:
            await self._restore(redis, sentinel, version)
            version = None
        if self._earlier:
            await self._seed(redis)
            version = None
        if self._unsaved or self._base_unsaved:
            await self._save(redis)
            version = None
        seen = (sentinel, version) if isinstance(version, bytes) else None
        if seen is not None and seen == self._seen:
            return False
        found = await redis.command("HGETALL", self._key)
        assert isinstance(found, dict), found
        self._sentinel, self._seen, self.is_known = sentinel, seen, True
        self._version = _number(version) if seen is not None else self._version
        return self._take({_text(name): held for name, raw in found.items() if (held := _decoded(name, raw))})

    async def _seed(self, redis: Commands) -> None:
        """Writes what an earlier life has left, where nothing is; whatever is there is later than that."""
        pairs: list[Part] = [part for name, held in self._earlier.items() for part in (name, held.raw)]
        if await redis.command("EVAL", SEED, 1, self._key, keys.ADAPTERS_VERSION, *pairs):
            log.info("%d adapters of an earlier life are listed again", len(self._earlier))
        self._earlier = {}

    async def _restore(self, redis: Commands, sentinel: bytes, version: object) -> None:
        """Redis is an older copy of itself: makes the list what it is here. Entries that cannot be read stay."""
        assert self._base is not None, "only a process that serves the model may replace its list"
        found = await redis.command("HGETALL", self._key)
        assert isinstance(found, dict), found
        older = {_text(name) for name, raw in found.items() if _decoded(name, raw) is not None}
        gone = msgspec.json.encode({"gone": sorted(older - self._held.keys())})
        fresh = self._version + 1 + secrets.randbelow(JUMP)
        pairs: list[Part] = [part for name, held in self._held.items() for part in (name, held.raw)]
        pairs += [keys.ADAPTERS_BASE, msgspec.msgpack.encode(self._base)]
        expected = version if isinstance(version, bytes) else b""
        await redis.command("SADD", keys.ADAPTER_MODELS, self.model)
        state: list[Part] = [sentinel, keys.ADAPTERS_VERSION, expected, fresh, gone, *pairs]
        if await redis.command("EVAL", RESTORE, 2, self._key, keys.SENTINEL, *state):
            log.warning("Redis was an older copy of itself: %d adapters were written again", len(self._held))

    async def _save(self, redis: Commands) -> None:
        writes = [(name, msgspec.msgpack.encode(entry)) for name, entry in self._unsaved.items()]
        if self._base is not None:
            writes.append((keys.ADAPTERS_BASE, msgspec.msgpack.encode(self._base)))
        commands: list[list[Part]] = [["HSET", self._key, name, value] for name, value in writes]
        commands.append(["SADD", keys.ADAPTER_MODELS, self.model])
        await self._write(redis, commands)
        self._unsaved, self._base_unsaved = {}, False

    async def _write(self, redis: Commands, commands: list[list[Part]]) -> None:
        counted: list[Part] = ["HINCRBY", self._key, keys.ADAPTERS_VERSION, 1]
        await redis.pipeline([*commands, counted, announcement(self._key)])

    async def _compare_and_set(
        self, redis: Commands, name: str, held: _Held | None, raw: bytes, version: bytes | None
    ) -> int:
        before = held.raw if held is not None else b""
        parts: list[Part] = [name, before, raw, keys.ADAPTERS_VERSION, *([] if version is None else [version])]
        written = await redis.command("EVAL", COMPARE_AND_SET, 1, self._key, *parts)
        assert isinstance(written, int), written
        return written

    def _take(self, held: dict[str, _Held]) -> bool:
        changed = held != self._held
        self._held = held
        self.entries = MappingProxyType({name: one.entry for name, one in sorted(held.items())})
        return changed


def _decoded(name: object, raw: object) -> _Held | None:
    """None for the fields that are no entry, and for one of another version."""
    if _text(name).startswith("@") or not isinstance(raw, bytes):
        return None
    try:
        return _Held(msgspec.msgpack.decode(raw, type=AdapterEntry), raw)
    except msgspec.DecodeError as error:
        log.warning("the entry of adapter %s cannot be read: %s", _text(name), error)
        return None


def _number(version: object) -> int:
    """0: there is no counter."""
    return int(version) if isinstance(version, bytes) else 0


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
