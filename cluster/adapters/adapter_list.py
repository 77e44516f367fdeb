"""The adapters that a service should serve: durable in Redis, a whole copy in every process that uses it.

Gateways and `tandem adapters` change it by compare-and-set; gateways and coordinators follow it (state/map_copy.py).
Without Redis the last copy is served and nothing can be changed. A gateway saves it in --state-dir, for the next life
of a service whose Redis ends with it. One event loop; no request waits on this file.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from tandem.cluster.adapters.entries import AdapterEntry, BaseFacts
from tandem.cluster.state import keys
from tandem.cluster.state.durable_map import DurableMap
from tandem.cluster.state.epoch import Epoch
from tandem.cluster.state.map_copy import MapCopy
from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import Commands, RedisUnavailable

POLL_S = 0.5
SUBSCRIBED_POLL_S = 2.0
"""Period while changes are announced; no less than without."""


class SavedAdapters(msgspec.Struct, frozen=True, kw_only=True):
    """The file of one base model's list."""

    model: str
    adapters: list[AdapterEntry]


class AdapterList(MapCopy[AdapterEntry]):
    """The list of one base model. redis None: this process has it to itself. folder: where it is saved, None:
    nowhere."""

    SAVED = SavedAdapters

    def __init__(self, redis: Commands | None, base: str, folder: Path | None = None) -> None:
        place = keys.adapters_map(base)
        map = None if redis is None else DurableMap(redis, place, AdapterEntry, msgspec.msgpack, "adapters")
        super().__init__(map, None if folder is None else folder / _file_name(base))
        self.model = base
        self._base: BaseFacts | None = None
        self._last_saved: SavedAdapters | None = None

    @property
    def entries(self) -> Mapping[str, AdapterEntry]:
        """The entries by name, sorted."""
        return self.values

    def keep(self, entry: AdapterEntry) -> None:
        """Lists it here at once, and in Redis when that answers again: what the service's own settings ask for."""
        self.set_here(entry.name, entry)

    def announce(self, base: BaseFacts) -> None:
        """Writes to Redis, as soon as that answers, what the list belongs to: for readers that have only Redis."""
        self._base = base
        self._facts = {keys.ADAPTERS_BASE: msgspec.msgpack.encode(base)}
        self._pending |= self._facts

    async def base(self) -> BaseFacts | None:
        """The facts that were announced; None when no service ever did. RedisUnavailable."""
        if self.map is None:
            return self._base
        value = await self.map.redis.command("HGET", self.map.place.entries, keys.ADAPTERS_BASE)
        return msgspec.msgpack.decode(value, type=BaseFacts) if isinstance(value, bytes) else None

    async def modules_are_listed(self, service: str, modules: str) -> bool:
        """True when a gateway of the service has listed this --lora-modules, and none another since. modules: its
        digest. False while Redis is unavailable: it is not known."""
        if self.map is None:
            return False
        try:
            return await self.map.redis.command("GET", keys.modules_listed(service)) == modules.encode()
        except RedisUnavailable:
            return False

    async def note_modules_listed(self, service: str, modules: str) -> None:
        """Notes them: a gateway with the same --lora-modules that comes later leaves them as they are by then."""
        if self.map is not None:
            note = keys.modules_listed(service)
            with suppress(RedisUnavailable):
                await self.map.redis.command("SET", note, modules, "EX", keys.MODULES_LISTED_TTL_S)

    async def run(
        self,
        on_change: Callable[[], None],
        period_s: float = POLL_S,
        changes: Announcements = Announcements(),
    ) -> None:
        """Refreshes until it is cancelled, see follow()."""
        await self.follow(on_change, period_s, SUBSCRIBED_POLL_S, changes)

    async def save(self) -> None:
        """Writes the file when the list has changed since this last wrote it."""
        now = SavedAdapters(model=self.model, adapters=list(self.entries.values()))
        if self.is_known and now != self._last_saved:
            await self._save(lambda there: now)
            self._last_saved = now

    def _adopt_saved(self, saved: SavedAdapters) -> None:
        if saved.model == self.model:
            self.adopt({entry.name: entry for entry in saved.adapters})

    @property
    def _may_restore(self) -> bool:
        """True for a process that serves the model: it decides, groups follow."""
        return self._base is not None

    async def _repair(self, map: DurableMap[AdapterEntry], there: Epoch) -> None:
        must_write = there.is_behind(self._known) or self._of_earlier_life or self._pending
        if must_write and self._base is not None:
            await map.redis.command("SADD", keys.ADAPTER_MODELS, self.model)
        await super()._repair(map, there)


def _file_name(model: str) -> str:
    name = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"adapters-{name}.json"
