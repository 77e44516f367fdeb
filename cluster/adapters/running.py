"""How many requests of this gateway use each version of an adapter, so that an unload can report when its last one has
ended.

A request counts from the moment its model is resolved (cluster/gateway/services/model_lookup.py) to the end of its
owner task (generation.py). One event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.workers.messages.request import AdapterRef


class RunningAdapters:
    """Counts by name and digest: what is listed later under the name is another's business."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._changed = asyncio.Event()

    @contextmanager
    def request(self, adapter: AdapterRef | None) -> Iterator[None]:
        """While a request runs. None: it uses none."""
        if adapter is None:
            yield
            return
        version = (adapter.name, adapter.digest)
        self._counts[version] += 1
        try:
            yield
        finally:
            self._counts[version] -= 1
            if not self._counts[version]:
                del self._counts[version]
            self._changed.set()

    def of(self, adapter: AdapterRef) -> int:
        """Requests that use it now."""
        return self._counts.get((adapter.name, adapter.digest), 0)

    async def wait_idle(self, adapter: AdapterRef, timeout_s: float) -> bool:
        """True as soon as none uses it; False after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.of(adapter):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
