"""How many requests of this gateway use each adapter name, so that an unload can say when its last one has ended.

Counted by each request's owner task (cluster/gateway/request_run.py). One event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from workers.messages import AdapterRef


class RunningAdapters:
    """Counts by name: versions of one name count together."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._changed = asyncio.Event()

    @contextmanager
    def request(self, adapter: AdapterRef | None) -> Iterator[None]:
        """While a request runs. None: it uses none."""
        if adapter is None:
            yield
            return
        self._counts[adapter.name] += 1
        try:
            yield
        finally:
            self._counts[adapter.name] -= 1
            if not self._counts[adapter.name]:
                del self._counts[adapter.name]
            self._changed.set()

    def of(self, name: str) -> int:
        """Requests that use it now."""
        return self._counts.get(name, 0)

    async def wait_idle(self, name: str, timeout_s: float) -> bool:
        """True as soon as none uses it; False after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.of(name):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
