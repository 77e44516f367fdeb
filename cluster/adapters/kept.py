"""The list of adapters in --state-dir, beside the tenants: for the next life of a service whose Redis ends with it.

One file for each base model. The gateway loads it before the first look at Redis and saves what has changed since;
the content of an unreadable file is lost, and logged.
"""

import asyncio
import hashlib
from pathlib import Path

import msgspec

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.state.snapshot_file import merge_state, read_state

PERIOD_S = 1.0


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    model: str
    adapters: list[AdapterEntry]


class AdapterFile:
    """One registry's file in `folder`. One event loop."""

    def __init__(self, folder: Path, registry: AdapterList) -> None:
        self._registry = registry
        name = hashlib.sha256(registry.model.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self._file = folder / f"adapters-{name}.json"
        self._saved: list[AdapterEntry] | None = None

    async def load(self) -> None:
        """Gives the registry what an earlier life has left."""
        kept = await asyncio.to_thread(read_state, self._file, _Kept)
        if kept is not None and kept.model == self._registry.model:
            self._registry.adopt({entry.name: entry for entry in kept.adapters})

    async def save(self) -> None:
        """Writes the list when it has changed, and was read at all."""
        adapters = list(self._registry.entries.values())
        if self._registry.is_known and adapters != self._saved:
            kept = _Kept(model=self._registry.model, adapters=adapters)
            await asyncio.to_thread(merge_state, self._file, _Kept, lambda there: kept)
            self._saved = adapters

    async def run(self) -> None:
        """Saves until it is cancelled."""
        while True:
            await self.save()
            await asyncio.sleep(PERIOD_S)
