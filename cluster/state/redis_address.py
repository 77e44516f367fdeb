"""Clients that follow a Redis whose URL may change: the private one of `serve run`, when its replica is replaced.

Used by gateways and coordinators. After a few failures in a row MovingRedis reads the URL again and opens a new
client when it changed; without an answer nothing changes, and the next failures read it again. The
request-path client follows the URL that the background client found.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from tandem.cluster.state.redis_client import Commands, Part, RedisUnavailable, RequestClient

log = logging.getLogger("tandem.redis")
T = TypeVar("T")
ASK_AFTER_FAILURES = 3
ASK_TIMEOUT_S = 2.0


class Client(Commands, Protocol):
    """BackgroundClient."""

    async def close(self) -> None: ...


class MovingRedis:
    """Commands over a client that is replaced with the URL. ask: returns the current URL; None: it never changes. One
    event loop."""

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
        """The last known URL."""
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
        except RedisUnavailable:
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
        except Exception as error:  # no replica answers yet; Serve raises several types for it
            log.warning("the URL of Redis is unknown: %s", str(error) or type(error).__name__)
            return
        if url != self._url:
            log.warning("Redis was replaced: going on with the new one")
            before, self._url, self._client = self._client, url, self._open(url)
            await before.close()


class RequestRedis:
    """RequestClient for a Redis that may move. One per event loop. where: returns the current URL without waiting."""

    def __init__(self, where: Callable[[], str], timeout_s: float) -> None:
        self._where = where
        self._timeout_s = timeout_s
        self._url = where()
        self._client = RequestClient(self._url, timeout_s)

    async def script(self, text: str, keys: Sequence[str], arguments: Sequence[Part], *, may_probe: bool = True) -> Any:
        """RequestClient.script: the answer within the timeout, or RedisUnavailable."""
        url = self._where()
        if url != self._url:
            before, self._url, self._client = self._client, url, RequestClient(url, self._timeout_s)
            await before.close()
        return await self._client.script(text, keys, arguments, may_probe=may_probe)

    async def close(self) -> None:
        await self._client.close()
