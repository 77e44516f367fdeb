"""KV waste of a run: the share of allocated KV slots that hold no token, averaged over time.

A slot has room for one token; blocks are allocated whole. Allocated are the slots of blocks that a running sequence or
a load uses; a slot holds a token once a plan that computes it has been sent. So the waste is what the last, part-filled
block of each sequence leaves empty, and whatever was allocated before it was needed: internal fragmentation and
reservation in the PagedAttention paper (Kwon et al. 2023), of which vLLM has under 4 %.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp

from tandem.workers.engine.base.stats import EngineStats

PERIOD_S = 0.25
"""Seconds between two looks; a group publishes its counts as often."""


@dataclass(eq=False)
class KVWaste:
    """Slots by state, summed over looks at equal intervals."""

    allocated: float = 0.0
    empty: float = 0.0

    def add(self, allocated: float, empty: float) -> None:
        """Notes one look."""
        self.allocated += allocated
        self.empty += empty

    @property
    def share(self) -> float:
        """Empty slots over allocated ones, 0 to 1; nan when nothing was ever allocated."""
        return self.empty / self.allocated if self.allocated else float("nan")


class EngineWatch:
    """Looks at an engine in this process, at most every PERIOD_S; called after each of its turns."""

    def __init__(
        self, stats: Callable[[], EngineStats], waste: KVWaste, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stats = stats
        self._waste = waste
        self._clock = clock
        self._next_s = 0.0

    def __call__(self) -> None:
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + PERIOD_S
            stats = self._stats()
            self._waste.add(stats.allocated_slots, stats.empty_slots)


@asynccontextmanager
async def watched(session: aiohttp.ClientSession, url: str, waste: KVWaste) -> AsyncIterator[asyncio.Task[None]]:
    """Looks at the metrics of the service at `url` every PERIOD_S while the block runs; raises what ended them."""

    async def look() -> None:
        while True:
            async with session.get(f"{url}/metrics") as response:
                response.raise_for_status()
                text = await response.text()
            waste.add(metric(text, "kv_allocated_slots"), metric(text, "kv_empty_slots"))
            await asyncio.sleep(PERIOD_S)

    looking = asyncio.create_task(look())
    try:
        yield looking
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


def metric(text: str, name: str) -> float:
    """Returns the sum of a metric over the groups in Prometheus text."""
    lines = [line for line in text.splitlines() if line.startswith(f"tandem:{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
