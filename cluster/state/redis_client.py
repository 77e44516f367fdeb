"""The only file that imports redis: two clients with different patience, and a subscription; torch-free and asyncio.

RequestClient serves the request path: a short deadline, no retries, a breaker. BackgroundClient serves heartbeats and
commands: it retries. Subscription receives what is published. All raise RedisUnavailable and nothing else. Callers name
commands as Redis spells them.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import redis
import redis.asyncio as redis_asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from tandem.cluster.state.breaker import Breaker

T = TypeVar("T")
Part = str | bytes | int | float
LOOP_LAG_S = 0.010
_CONNECTION_ERRORS = (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError, redis.ReadOnlyError, OSError)


class RedisUnavailable(Exception):
    """Redis did not answer in time, cannot be reached, refused the command (memory or disk full, no permission), or has
    lost its data. The service goes on without it."""


class Commands(Protocol):
    """The part of a client that most users of Redis need."""

    async def command(self, *parts: Part) -> object: ...

    async def pipeline(self, commands: list[list[Part]]) -> list[object]: ...


class RequestClient:
    """Calls on behalf of a request: answers within `timeout_s` or RedisUnavailable. One per event loop."""

    def __init__(self, url: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self.breaker = Breaker(clock)
        self._redis = _open(url, timeout_s=timeout_s, connect_timeout_s=timeout_s, retries=0)

    async def command(self, *parts: Part) -> Any:
        """One command, e.g. command("GET", key)."""
        return await self._bounded(lambda: _execute(self._redis, parts), may_probe=True)

    async def pipeline(self, commands: Sequence[Sequence[Part]]) -> list[Any]:
        """Several commands in one round trip, in one transaction."""
        return await self._bounded(lambda: _transaction(self._redis, commands), may_probe=True)

    async def script(self, text: str, keys: Sequence[str], arguments: Sequence[Part], *, may_probe: bool = True) -> Any:
        """One Lua script, atomically; its text is sent only when the server does not have it. may_probe
        False: while the breaker is open this call is no probe."""
        return await self._bounded(lambda: _run_script(self._redis, text, keys, arguments), may_probe=may_probe)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _bounded(self, call: Callable[[], Awaitable[T]], *, may_probe: bool) -> T:
        if not self.breaker.admit(may_probe):
            raise RedisUnavailable("the breaker is open")
        deadline_s = self._clock() + self._timeout_s
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await call()
        except (TimeoutError, redis.TimeoutError) as error:
            # A deadline that this loop noticed late means that the loop was busy, not that Redis is unavailable.
            if self._clock() - deadline_s < LOOP_LAG_S:
                self.breaker.record_failure()
            raise RedisUnavailable(f"no answer within {self._timeout_s * 1000:.0f} ms") from error
        except _CONNECTION_ERRORS as error:
            self.breaker.record_failure()
            raise RedisUnavailable(str(error)) from error
        except redis.RedisError as error:
            self.breaker.record_success()  # an error reply came in time: the server is available
            raise RedisUnavailable(str(error)) from error
        self.breaker.record_success()
        return result


class BackgroundClient:
    """Calls that may take their time: six retries with jittered backoff. One per event loop.

    A call ends after all tries have had their time, whatever it waits for: closing a connection to a server that is
    stopped has no deadline in the library, and the others of its pool wait for it.
    """

    def __init__(self, url: str, timeout_s: float = 2.0, retries: int = 6) -> None:
        self._limit_s = 2 * timeout_s * (retries + 2)
        self._redis = _open(url, timeout_s=timeout_s, connect_timeout_s=1.0, retries=retries)

    async def command(self, *parts: Part) -> Any:
        """One command; may run twice when a reply was lost, so it must be safe to repeat."""
        return await _translated(lambda: _execute(self._redis, parts), self._limit_s)

    async def pipeline(self, commands: Sequence[Sequence[Part]]) -> list[Any]:
        """Several commands in one transaction; may run twice."""
        return await _translated(lambda: _transaction(self._redis, commands), self._limit_s)

    async def close(self) -> None:
        await self._redis.aclose()


class Subscription:
    """What is published on some channels, over a connection of its own. Used by one task; an end is for ever: after
    RedisUnavailable there is only close()."""

    def __init__(self, url: str, timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s
        # not the library's PubSub, which connects again by itself, with no deadline, and without a notice
        self._connection: Any = _pool(url, timeout_s=timeout_s, connect_timeout_s=1.0, retries=0).make_connection()
        self._is_asked = False

    async def open(self, channels: Sequence[str]) -> None:
        """Returns when the server has confirmed every one of them; RedisUnavailable also when it refuses."""
        await _translated(lambda: self._subscribe(channels), self._timeout_s)

    async def next(self, timeout_s: float) -> str | None:
        """The channel of the next message. None: no message came in that time; a server that sends nothing until the
        end of the next call either is unavailable."""
        return await _translated(lambda: self._next(timeout_s), timeout_s + self._timeout_s)

    async def close(self) -> None:
        """Closes the connection at once, whatever the server does."""
        with suppress(redis.RedisError, OSError):
            await self._connection.disconnect(nowait=True)

    async def _subscribe(self, channels: Sequence[str]) -> None:
        await self._connection.connect()
        await self._connection.send_command("SUBSCRIBE", *channels)
        for _ in channels:
            await self._connection.read_response(push_request=True)

    async def _next(self, timeout_s: float) -> str | None:
        answer = await self._connection.read_response(timeout=timeout_s, push_request=True)
        if answer is None:
            if self._is_asked:
                raise RedisUnavailable("no sign of life")
            self._is_asked = True
            await self._connection.send_command("PING")
            return None
        self._is_asked = False
        return answer[1].decode() if isinstance(answer, list) and answer[0] == b"message" else None


def check_reachable(url: str, timeout_s: float = 2.0) -> str | None:
    """The reason, for users, why a PING to `url` got no answer; None when it did. Blocking; for the launcher."""
    try:
        with redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        ) as client:
            client.ping()
    except ValueError as error:
        return f"not a Redis URL: {error}"
    except redis.RedisError as error:
        return str(error)
    return None


def _open(url: str, *, timeout_s: float, connect_timeout_s: float, retries: int) -> "redis_asyncio.Redis":
    pool = _pool(url, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, retries=retries)
    return redis_asyncio.Redis(connection_pool=pool)


def _pool(url: str, *, timeout_s: float, connect_timeout_s: float, retries: int) -> Any:
    backoff = ExponentialWithJitterBackoff(base=0.02, cap=0.5) if retries else NoBackoff()
    options: dict[str, Any] = {
        "max_connections": 64,
        "timeout": timeout_s,
        "protocol": 3,
        "socket_timeout": timeout_s,
        # a check that is due while a frozen server is connected to connects and checks within itself, for ever
        "health_check_interval": 0,
        "retry": AsyncRetry(backoff, retries),
    }
    if retries:
        options["retry_on_error"] = [redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError]
    if not url.startswith("unix://"):
        options |= {"socket_connect_timeout": connect_timeout_s, "socket_keepalive": True}
    return redis_asyncio.BlockingConnectionPool.from_url(url, **options)


async def _translated(call: Callable[[], Awaitable[T]], limit_s: float) -> T:
    try:
        async with asyncio.timeout(limit_s):
            return await call()
    except (redis.RedisError, OSError, TimeoutError) as error:
        raise RedisUnavailable(str(error) or "no answer in time") from error


async def _execute(client: "redis_asyncio.Redis", parts: Sequence[Part]) -> Any:
    return await client.execute_command(*parts)  # type: ignore[no-untyped-call]


async def _transaction(client: "redis_asyncio.Redis", commands: Sequence[Sequence[Part]]) -> list[Any]:
    async with client.pipeline(transaction=True) as pipe:
        for parts in commands:
            pipe.execute_command(*parts)
        return list(await pipe.execute())


async def _run_script(client: "redis_asyncio.Redis", text: str, keys: Sequence[str], arguments: Sequence[Part]) -> Any:
    rest = (len(keys), *keys, *arguments)
    try:
        return await _execute(
            client, ("EVALSHA", hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), *rest)
        )
    except redis.exceptions.NoScriptError:
        return await _execute(client, ("EVAL", text, *rest))
