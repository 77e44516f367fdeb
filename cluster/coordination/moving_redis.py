"""A background client of a Redis whose URL may change: the private one of `serve run`, when its replica is replaced.

Used by gateways and coordinators. After a few failures in a row it asks for the URL again and opens a new client when
that has changed; an answer that does not come changes nothing, and the next failures ask again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from cluster.coordination.client import Commands, Part, RedisAway

log = logging.getLogger("tandem.redis")
T = TypeVar("T")
ASK_AFTER_FAILURES = 3
ASK_TIMEOUT_S = 2.0


class Client(Commands, Protocol):
    """BackgroundClient."""

    async def close(self) -> None: ...


class MovingRedis:
    """Commands of the registry. `ask` returns the URL of now; None: it never changes. One event loop."""

    def __init__(
        self, url: str, open_client: Callable[[str], Client], ask: Callable[[], Awaitable[str]] | None
    ) -> None:
        self._url = url
        self._open = open_client
        self._ask = ask
        self._client = open_client(url)
        self._failures = 0

    @property
    def url(self) -> str:
        """Where Redis is now, as far as is known."""
        return self._url

    async def command(self, *parts: Part) -> Any:
        return await self._counted(lambda: self._client.command(*parts))

    async def pipeline(self, commands: list[list[Part]]) -> list[Any]:
        return await self._counted(lambda: self._client.pipeline(commands))

    async def close(self) -> None:
        await self._client.close()

    async def _counted(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            result = await call()
        except RedisAway:
            self._failures += 1
            if self._ask is not None and self._failures % ASK_AFTER_FAILURES == 0:
                await self._follow(self._ask)
            raise
        self._failures = 0
        return result

    async def _follow(self, ask: Callable[[], Awaitable[str]]) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                url = await ask()
        except Exception as error:  # no replica answers yet, in whatever way Serve says so
            log.warning("where Redis is now is not known: %s", str(error) or type(error).__name__)
            return
        if url != self._url:
            log.warning("Redis was replaced: going on with the new one")
            before, self._url, self._client = self._client, url, self._open(url)
            await before.close()
