"""Lua scripts on behalf of requests, on whatever Redis the background client follows.

A RequestClient has one URL; under `serve run` the private Redis may move. This opens a new one when it has.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cluster.coordination.client import Part, RequestClient


class RequestRedis:
    """One per event loop. `where` names the URL of now and never waits."""

    def __init__(self, where: Callable[[], str], timeout_s: float) -> None:
        self._where = where
        self._timeout_s = timeout_s
        self._url = where()
        self._client = RequestClient(self._url, timeout_s)

    @property
    def breaker_state(self) -> str:
        return self._client.breaker.state

    async def script(self, text: str, keys: Sequence[str], arguments: Sequence[Part], *, may_probe: bool = True) -> Any:
        """RequestClient.script: the answer within the timeout, or RedisAway."""
        url = self._where()
        if url != self._url:
            before, self._url, self._client = self._client, url, RequestClient(url, self._timeout_s)
            await before.close()
        return await self._client.script(text, keys, arguments, may_probe=may_probe)

    async def close(self) -> None:
        await self._client.close()
