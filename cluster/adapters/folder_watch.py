"""--lora-watch-dir: each PEFT folder in it is an adapter of that name; it is listed, switched and unlisted as folders
come, change and go.

Looks once a second; the clock is passed in. A folder that is being written is taken when it has not changed for a
while, one that is missing is given up when it has been so for a while; when it comes back, its adapter is whose it was.
Runs in every gateway that sees the folder: listing the same content twice changes nothing.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.entries import AdapterEntry, is_name
from tandem.cluster.adapters.sources import FILES
from tandem.workers.messages.errors import RequestRefused

log = logging.getLogger("tandem.adapters")
SETTLED_S = 1.5

Print = tuple[tuple[str, int, int], ...]
"""Name, bytes and time of change of each file."""


class _Sight(NamedTuple):
    """A folder as it looks since then."""

    print: Print
    since_s: float


class FolderWatch:
    """The watch of one folder, which loads and unloads through an AdapterService."""

    def __init__(
        self, folder: Path, adapter_service: AdapterService, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._adapter_service = adapter_service
        self._clock = clock
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
            self._missing_since_s.clear()
            return
        now_s = self._clock()
        self._last |= (mine := self._listed())
        for name in sorted(found):
            self._missing_since_s.pop(name, None)
            await self._see(name, found[name], now_s)
        for name in sorted({*self._sights, *mine} - found.keys()):
            await self._miss(name, now_s)

    def _listed(self) -> dict[str, AdapterEntry]:
        """What is listed from this folder."""
        entries = self._adapter_service.registry.entries
        return {name: entry for name, entry in entries.items() if Path(entry.source) == self._folder / name}

    async def _miss(self, name: str, now_s: float) -> None:
        if now_s - self._missing_since_s.setdefault(name, now_s) < SETTLED_S:
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
        listed = self._adapter_service.registry.entries.get(name)
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
    """None when it is being removed at this moment."""
    try:
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    except OSError:
        return None
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
