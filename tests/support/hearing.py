"""Announcements of a Redis for a test: heard from the start, with nothing left to hear."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.coordination.changes import Changes


@asynccontextmanager
async def hearing(url: str, *keys: str) -> AsyncIterator[Changes]:
    changes = Changes(lambda: url, keys)
    changes.start()
    async with asyncio.timeout(20):
        while not changes.is_hearing:
            await asyncio.sleep(0.005)
    for key in keys:
        await changes.wait(key, 0.0)  # what subscribing has told
    try:
        yield changes
    finally:
        await changes.close()
