"""A map of names to values that is durable in Redis: tenants, and each base model's adapters.

Every change is one compare-and-set that also raises the counter of the map's Epoch and announces it (notifications.py),
so writers never lose each other's changes. A process that still has a copy (map_copy.py) fills an emptied Redis with
`seed` and an older one with `restore`; both are compared with what is there, so two that do so at once agree.
"""

import logging
import secrets
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from tandem.cluster.state import keys
from tandem.cluster.state.epoch import Epoch
from tandem.cluster.state.lua import load_lua
from tandem.cluster.state.notifications import announcement
from tandem.cluster.state.redis_client import Commands, Part

log = logging.getLogger("tandem.state")
T = TypeVar("T", bound=msgspec.Struct)
JUMP: Final = 2**20
"""The most that a write raises the counter by. Two that write from the same state, or to an older copy of Redis, must
not arrive at the counter of another state: a reader would take them for one."""

_SCRIPTS: Final = ("map_put.lua", "map_seed.lua", "map_restore.lua")
PUT, SEED, RESTORE = (load_lua(__file__, "map_counter.lua", name) for name in _SCRIPTS)


class Held(NamedTuple, Generic[T]):
    """A value, and its bytes in Redis: those of another version of Tandem may differ from what this one would write."""

    value: T
    raw: bytes


class Reading(NamedTuple, Generic[T]):
    """All entries at one moment. unreadable: how many more there are, written by another version of Tandem."""

    epoch: Epoch
    held: dict[str, Held[T]]
    unreadable: int = 0

    @property
    def values(self) -> dict[str, T]:
        return {name: one.value for name, one in self.held.items()}


class Seeded(NamedTuple):
    """The epoch after a seed. is_written: it was this one that wrote, no other before."""

    epoch: Epoch
    is_written: bool


class DurableMap(Generic[T]):
    """One map. codec: msgspec.json or msgspec.msgpack. what: its entries in the plural, for the log. Every method
    raises RedisUnavailable."""

    def __init__(self, redis: Commands, place: keys.MapKeys, kind: type[T], codec: ModuleType, what: str) -> None:
        self.redis = redis
        self.place = place
        self.what = what
        self._kind = kind
        self._codec = codec
        self._field = "" if place.counter is not None else keys.COUNTER_FIELD
        counter = place.counter or place.entries
        self._keys: list[Part] = [place.entries, place.id, counter, keys.absorbed(place.entries)]
        read: list[Part] = ["HGET", counter, self._field] if self._field else ["GET", counter]
        self._look: list[list[Part]] = [["GET", place.id], read]

    async def epoch(self) -> Epoch:
        """The epoch of now; cheap."""
        return Epoch.of(*await self.redis.pipeline(self._look))

    async def read(self) -> Reading[T]:
        """All entries, in one transaction. One that cannot be read is logged and only counted."""
        id, counter, fields = await self.redis.pipeline([*self._look, ["HGETALL", self.place.entries]])
        assert isinstance(fields, dict), fields
        named = {name.decode(): raw for name, raw in fields.items() if not name.startswith(b"@")}
        held = {
            name: Held(value, raw) for name, raw in named.items() if (value := self._decoded(name, raw)) is not None
        }
        return Reading(Epoch.of(id, counter), held, len(named) - len(held))

    async def get(self, name: str) -> Held[T] | None:
        """One entry; None: there is none. ValueError: it was written by another version of Tandem."""
        raw = await self.redis.command("HGET", self.place.entries, name)
        if not isinstance(raw, bytes):
            return None
        value = self._decoded(name, raw)
        if value is None:
            raise ValueError(f"{name!r} was written by another version")
        return Held(value, raw)

    def encode(self, value: T) -> bytes:
        """The value as Redis has it."""
        raw: bytes = self._codec.encode(value)
        return raw

    async def compare_and_set(self, name: str, before: bytes, after: bytes, guard: int | None = None) -> int | None:
        """Sets one entry from `before` to `after`, b"" for none. guard: the counter that the map must have. The
        counter after it; None when the entry or the map was another, and nothing was changed."""
        fresh = secrets.token_hex(8) if self.place.owns_id else ""
        written = await self._run(PUT, name, before, after, "" if guard is None else guard, fresh, _raise())
        assert written is None or isinstance(written, int), written
        return written

    async def write(self, fields: Mapping[str, bytes]) -> None:
        """Sets fields whatever is there."""
        sets: list[list[Part]] = [["HSET", self.place.entries, name, raw] for name, raw in fields.items()]
        counter = self._keys[2]
        more = _raise()
        raised: list[Part] = ["HINCRBY", counter, self._field, more] if self._field else ["INCRBY", counter, more]
        await self.redis.pipeline([*sets, raised, announcement(self.place.entries)])

    async def seed(
        self, fields: Mapping[str, bytes], own_id: str | None, counter: int = 0, *, only_new: bool = False
    ) -> Seeded:
        """Writes a copy where it was lost; what is there by now is kept. own_id, counter: the epoch of the copy, None
        when it is not known. only_new: only into a map that was never written."""
        fresh = (own_id or secrets.token_hex(8)) if self.place.owns_id else ""
        state = (own_id or "", "new" if only_new else "", fresh, counter, _raise(), *_flat(fields))
        answer = await self._run(SEED, *state)
        assert isinstance(answer, list), answer
        is_written, id, at = answer
        return Seeded(Epoch(id.decode() or None, at), bool(is_written))

    async def restore(self, there: Epoch, counter: int, fields: Mapping[str, bytes]) -> Epoch | None:
        """Makes the older map that `there` names what it was at `counter`; entries that cannot be read stay. The epoch
        after it; None when the map was changed meanwhile."""
        older = await self.read()
        if older.epoch != there:
            return None
        gone = sorted(older.held.keys() - fields.keys())
        state = (there.id or "", there.counter, counter + _raise(), len(gone), *gone, *_flat(fields))
        written = await self._run(RESTORE, *state)
        return Epoch(there.id, written) if isinstance(written, int) else None

    async def _run(self, script: str, *arguments: Part) -> object:
        return await self.redis.command("EVAL", script, len(self._keys), *self._keys, self._field, *arguments)

    def _decoded(self, name: str, raw: bytes) -> T | None:
        try:
            value: T = self._codec.decode(raw, type=self._kind)
        except msgspec.DecodeError as error:
            log.error("%r of the %s cannot be read and is left out: %s", name, self.what, error)
            return None
        return value


def _raise() -> int:
    return 1 + secrets.randbelow(JUMP)


def _flat(fields: Mapping[str, bytes]) -> Iterable[Part]:
    return (part for pair in fields.items() for part in pair)
