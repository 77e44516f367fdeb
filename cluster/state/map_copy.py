"""A process's own copy of a DurableMap: used without waiting, refreshed when the map changes, written back when Redis
has lost it.

Read again when the map's epoch changes, which is announced and polled for. While Redis is unavailable the copy goes on
serving. A Redis that comes back without the map, or as it was some changes ago, gets the copy. A file may hold the copy
for the process's next life.

    empty --load--> of an earlier life --refresh--> read --Redis unavailable--> read (goes on) --refresh--> read
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from tandem.cluster.state.durable_map import DurableMap, Held
from tandem.cluster.state.epoch import Change, Epoch
from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.cluster.state.snapshot_file import merge_state, read_state

log = logging.getLogger("tandem.state")
T = TypeVar("T", bound=msgspec.Struct)


class MapCopy(Generic[T]):
    """A copy of one map, on one event loop. map None: this process has the entries to itself. file: where the copy is
    saved, None: nowhere."""

    SAVED: ClassVar[type[msgspec.Struct]]
    """The content of the file."""

    def __init__(self, map: DurableMap[T] | None, file: Path | None = None) -> None:
        self.map = map
        self._file = file
        self._held: dict[str, Held[T]] = {}
        self._known: Epoch | None = None
        """The latest epoch of the map in Redis that this process knows of; None before the first reading."""
        self._read: Epoch | None = None
        """The epoch of which the copy is; None when it has to be read again."""
        self._of_earlier_life = False
        self._pending: dict[str, bytes] = {}
        """Fields that Redis shall have, whatever it has now."""
        self._facts: dict[str, bytes] = {}
        """Fields beside the entries, written with them."""
        self._is_refused = False
        self._refreshing = asyncio.Lock()
        self.id: str | None = None
        """Id of the map, also as an earlier life knew it."""
        self.unreadable = 0
        self.is_known = False
        """`values` are those of a reading or of an earlier life, and what was changed here since."""
        self.values: Mapping[str, T] = MappingProxyType({})

    def adopt(self, values: Mapping[str, T], id: str | None = None, unreadable: int = 0) -> None:
        """Takes entries of an earlier life: served until Redis was read, and written to one that never had any. Before
        the first refresh."""
        self._of_earlier_life = self.is_known = True
        self._take({name: self._hold(value) for name, value in values.items()}, id, unreadable)

    def set_here(self, name: str, value: T) -> None:
        """Sets an entry here at once, and in Redis when that answers again, whatever that has."""
        held = self._hold(value)
        self._pending[name] = held.raw
        self._take(self._held | {name: held}, self.id, self.unreadable)

    async def refresh(self) -> bool:
        """Takes over what has changed; True if anything had. RedisUnavailable: the copy stays as it is."""
        if self.map is None:
            return False
        async with self._refreshing:
            return await self._refresh(self.map)

    async def follow(
        self,
        on_change: Callable[[], None],
        period_s: float,
        subscribed_s: float,
        changes: Announcements = Announcements(),
    ) -> None:
        """Refreshes until it is cancelled: when a change is announced, and each period; while changes are announced
        each `subscribed_s`, if that is longer."""
        assert self.map is not None
        unavailable = False
        while True:
            is_trusting = False
            try:
                if await self.refresh():
                    on_change()
                unavailable, is_trusting = False, changes.is_subscribed
            except RedisUnavailable as error:
                if not unavailable:
                    log.warning("Redis %s (%s): going on with the %s known", error.state, error, self.map.what)
                unavailable = True
            except Exception:
                log.exception("the %s were not read: going on with those known", self.map.what)
            await changes.wait(self.map.place.entries, max(period_s, subscribed_s) if is_trusting else period_s)

    async def reseed(self) -> None:
        """Writes the copy into a Redis that lost its data; what others have written since stays. RedisUnavailable."""
        if self.map is not None and (fields := self._fields()):
            known = self._known if self._known is not None else Epoch(None)
            await self.map.seed(fields, known.id, known.counter)

    async def replace(
        self, before: T | None, after: T | None, name: str, check: Callable[[], None] | None = None
    ) -> bool:
        """Sets the entry from `before` to `after`, None for none. False, and a fresh copy: somebody was faster.
        RedisUnavailable: nothing is known to have changed. check: raises when `values` as they are do not allow it; the
        map must still be as it was checked."""
        async with self._refreshing:
            held = self._held.get(name)
            if (held.value if held is not None else None) != before:
                return False
            if check is not None:
                check()
            wanted = self._hold(after) if after is not None else None
            if self.map is not None:
                guard = None if check is None else self._read.counter if self._read is not None else 0
                from_raw, to_raw = (one.raw if one is not None else b"" for one in (held, wanted))
                written = await self.map.compare_and_set(name, from_raw, to_raw, guard)
                if written is None:
                    self._read = None
                    await self._refresh(self.map)
                    return False
                if self._known is not None:
                    self._known = self._known._replace(counter=max(self._known.counter, written))
            others = {key: value for key, value in self._held.items() if key != name}
            self._take(others if wanted is None else others | {name: wanted}, self.id, self.unreadable)
            return True

    # ---- the file ------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Adopts what the file of an earlier life holds, before the first refresh."""
        if self._file is not None and (saved := await asyncio.to_thread(read_state, self._file, self.SAVED)):
            self._adopt_saved(saved)

    async def _save(self, merged: Callable[[Any], msgspec.Struct]) -> None:
        """Replaces the SAVED in the file, None at first, by what `merged` makes of it, on a thread. Nothing happens
        before the copy was read."""
        if self._file is not None and self.is_known:
            await asyncio.to_thread(merge_state, self._file, self.SAVED, merged)

    # ---- for owners of a kind of map ------------------------------------------------------------------------------

    def _adopt_saved(self, saved: Any) -> None:
        """Adopts the SAVED of an earlier life."""
        raise NotImplementedError

    @property
    def _may_restore(self) -> bool:
        """True when this process decides what an older copy of the map becomes; False when it follows."""
        return True

    def _on_taken(self) -> None:
        """Called when the copy was replaced."""

    # ---- inside --------------------------------------------------------------------------------------------------

    async def _refresh(self, map: DurableMap[T]) -> bool:
        there = await map.epoch()
        if there.id is None and not map.place.owns_id:
            raise RedisUnavailable("its data is gone")
        if there == self._read == self._known and not self._pending and not self._is_refused:
            return False
        refused = await self._write_back(map, there)
        if refused is not None and there == self._read == self._known:
            return False  # read already, and nothing of it has changed
        reading = await map.read()
        if reading.epoch.is_behind(self._known) or (self._of_earlier_life and not reading.epoch.counter):
            raise refused or RedisUnavailable("it lost its data at this moment")
        self._known = self._read = reading.epoch
        self._of_earlier_life = False
        self.is_known = True
        pending = {name: one for name, one in self._held.items() if self._pending.get(name) == one.raw}
        return self._take(reading.held | pending, reading.epoch.id, reading.unreadable)

    async def _write_back(self, map: DurableMap[T], there: Epoch) -> RedisUnavailable | None:
        """Writes what Redis shall have and has not; why it refuses that. One that takes no writes (memory or disk full)
        can still be read; what was to be written is kept for later."""
        refused = None
        try:
            await self._repair(map, there)
            await self._write_pending(map)
        except RedisUnavailable as error:
            refused = error
            if not self._is_refused:
                log.warning("Redis takes no changes of the %s (%s): they wait here", map.what, error)
        self._is_refused = refused is not None
        return refused

    async def _repair(self, map: DurableMap[T], there: Epoch) -> None:
        """Writes back what Redis does not have any more, or never had."""
        change, known = there.since(self._known), self._known
        if change is Change.LOST:
            assert known is not None
            seeded = await map.seed(self._fields(), known.id, known.counter)
            self._known = seeded.epoch
            if seeded.is_written:
                log.warning("Redis had lost the %s: %d were written again", map.what, len(self._held))
        elif change is Change.OLDER and not self._may_restore:
            self._known = there
        elif change is Change.OLDER:
            assert known is not None
            if (restored := await map.restore(there, known.counter, self._fields())) is not None:
                self._known = restored
                log.warning("Redis was an older copy of itself: %d %s were written again", len(self._held), map.what)
        elif self._of_earlier_life:
            seeded = await map.seed(self._fields(), self.id, only_new=True)
            self._known = seeded.epoch
            if seeded.is_written:
                log.info("%d %s of an earlier life are there again", len(self._held), map.what)
        self._of_earlier_life = False

    async def _write_pending(self, map: DurableMap[T]) -> None:
        if written := dict(self._pending):
            await map.write(written)
            self._pending = {name: raw for name, raw in self._pending.items() if written.get(name) != raw}

    def _fields(self) -> dict[str, bytes]:
        return {name: held.raw for name, held in self._held.items()} | self._facts

    def _hold(self, value: T) -> Held[T]:
        return Held(value, self.map.encode(value) if self.map is not None else b"")

    def _take(self, held: dict[str, Held[T]], id: str | None, unreadable: int) -> bool:
        has_changed = held != self._held
        self._held, self.id, self.unreadable = held, id, unreadable
        self.values = MappingProxyType({name: one.value for name, one in sorted(held.items())})
        self._on_taken()
        return has_changed
