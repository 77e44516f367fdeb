"""--lora-watch-dir: each PEFT folder in it is an adapter of that name; it is listed, switched and unlisted as folders
come, change and go.

Looks once a second; the clock is passed in. A folder that is being written is taken when it has not changed for a
while, one that is missing is given up when it has been so for a while and no other gateway sees it; when it comes back,
its adapter is whose it was. Runs in every gateway: listing the same content twice changes nothing.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.entries import AdapterEntry, is_name
from tandem.cluster.adapters.sources import FILES
from tandem.cluster.state import keys
from tandem.cluster.state.heartbeat import read_live
from tandem.cluster.state.redis_client import Commands, RedisUnavailable
from tandem.workers.messages.errors import RequestRefused

log = logging.getLogger("tandem.adapters")
SETTLED_S = 1.5
UNSEEN_S = 30.0
"""The same time for a folder that this gateway has never seen: another one, which starts later, may have it."""

Print = tuple[tuple[str, int, int], ...]
"""Name, bytes and time of change of each file."""


class _Sight(NamedTuple):
    """A folder as it looks since then."""

    print: Print
    since_s: float


class Sightings:
    """The names that the gateways see in the folder, each on its own node: a key of each in Redis, renewed by each
    look."""

    def __init__(self, redis: Commands, service: str) -> None:
        self._redis = redis
        self._service = service
        self._id = secrets.token_hex(6)

    async def exchange(self, names: list[str]) -> set[str]:
        """Tells what this gateway sees and returns what the others do. RedisUnavailable."""
        own, everyone = keys.sighting(self._service, self._id), keys.sightings(self._service)
        answers = await self._redis.pipeline(
            [
                ["SET", own, msgspec.msgpack.encode(names), "PX", keys.SIGHTING_TTL_MS],
                ["SADD", everyone, self._id],
                ["PEXPIRE", everyone, keys.SIGHTING_TTL_MS],
                ["SMEMBERS", everyone],
            ]
        )
        members = answers[3]
        assert isinstance(members, set | list), members
        others = sorted(name for member in members if (name := member.decode()) != self._id)
        values = await read_live(self._redis, others, partial(keys.sighting, self._service), everyone)
        return {name for value in values for name in msgspec.msgpack.decode(value, type=list[str])}


class FolderWatch:
    """The watch of one folder, which loads and unloads through an AdapterService."""

    def __init__(
        self,
        folder: Path,
        adapter_service: AdapterService,
        sightings: Sightings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._adapter_service = adapter_service
        self._clock = clock
        self._sightings = sightings
        self._sights: dict[str, _Sight] = {}
        self._done: dict[str, Print] = {}
        self._missing_since_s: dict[str, float] = {}
        self._last: dict[str, AdapterEntry] = {}

    async def run(self, period_s: float = 1.0) -> None:
        """Looks until it is cancelled."""
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("%s was not looked at", self._folder)
            await asyncio.sleep(period_s)

    async def look(self) -> None:
        """One look: takes what has settled, unlists what has been gone for as long."""
        try:
            found = await asyncio.to_thread(self._scan)
        except OSError as error:  # on its way out or unmounted: what is listed stays
            log.warning("%s cannot be read: %s", self._folder, error.strerror)
            found, elsewhere = {}, None
        else:
            elsewhere = await self._seen_elsewhere(sorted(found))
        now_s = self._clock()
        self._last |= (mine := self._listed())
        for name in sorted(found):
            self._missing_since_s.pop(name, None)
            await self._see(name, found[name], now_s)
        if elsewhere is None:
            self._missing_since_s.clear()
            return
        for name in sorted({*self._sights, *mine} - found.keys()):
            if name in elsewhere:
                self._missing_since_s.pop(name, None)
            else:
                await self._miss(name, now_s)

    async def _seen_elsewhere(self, names: list[str]) -> set[str] | None:
        """The names that other gateways see; None when that is not known, and nothing may be unlisted."""
        try:
            return await self._sightings.exchange(names)
        except RedisUnavailable as error:
            log.debug("what other gateways see is not known: %s", error)
            return None

    def _listed(self) -> dict[str, AdapterEntry]:
        """The entries that are listed from this folder."""
        entries = self._adapter_service.adapters.entries
        return {name: entry for name, entry in entries.items() if Path(entry.source) == self._folder / name}

    async def _miss(self, name: str, now_s: float) -> None:
        limit_s = SETTLED_S if name in self._sights else UNSEEN_S
        if now_s - self._missing_since_s.setdefault(name, now_s) < limit_s:
            return
        self._sights.pop(name, None)
        self._done.pop(name, None)
        if name not in self._listed() or await self._unload(name):
            del self._missing_since_s[name]

    async def _see(self, name: str, now: Print, now_s: float) -> None:
        before = self._sights.get(name)
        if before is None or before.print != now:
            self._sights[name] = _Sight(now, now_s)
            return
        if self._done.get(name) == now or now_s - before.since_s < SETTLED_S:
            return
        self._done[name] = now
        try:
            await self._load(name)
        except RequestRefused as error:
            log.warning("%s is not served: %s", self._folder / name, error)
            if error.status == 503:
                del self._done[name]  # not the folder's fault

    async def _load(self, name: str) -> None:
        source = str(self._folder / name)
        listed = self._adapter_service.adapters.entries.get(name)
        if listed is not None and listed.source != source:
            raise RequestRefused(f"{name} is listed from {listed.source}", code="invalid_value", param="lora_name")
        last = self._last.get(name) if listed is None else None
        tenant, pinned = (last.tenant, last.pinned) if last is not None else (None, None)
        await self._adapter_service.load(name, source, tenant=tenant, pinned=pinned, inplace=True)

    async def _unload(self, name: str) -> bool:
        try:
            await self._adapter_service.unload(name)
        except RequestRefused as error:
            log.warning("adapter %s is still listed, its folder is gone: %s", name, error)
            return False
        return True

    def _scan(self) -> dict[str, Print]:
        """Every folder that has an adapter_config.json and whose name an adapter can have."""
        folders = (path for path in self._folder.iterdir() if is_name(path.name) and (path / FILES[0]).is_file())
        return {path.name: printed for path in folders if (printed := _print_of(path)) is not None}


def _print_of(folder: Path) -> Print | None:
    """The files of a folder; None when it is being removed at this moment."""
    try:
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    except OSError:
        return None
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
