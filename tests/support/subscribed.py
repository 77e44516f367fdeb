"""A subscription to announcements of a Redis for a test, without earlier messages left unread."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.cluster.state.notifications import Changes


@asynccontextmanager
async def subscribed(url: str, *keys: str) -> AsyncIterator[Changes]:
    changes = Changes(lambda: url, keys)
    changes.start()
    async with asyncio.timeout(20):
        while not changes.is_subscribed:
            await asyncio.sleep(0.005)
    for key in keys:
        await changes.wait(key, 0.0)  # what subscribing has told
    try:
        yield changes
    finally:
        await changes.close()
