"""The only file that imports redis: two clients with different patience, and what is published; torch-free and asyncio.

RequestClient serves the request path: a short deadline, no retries, a breaker. BackgroundClient serves heartbeats and
commands: it retries. published() receives messages. All raise RedisUnavailable and nothing else. Callers name commands
as Redis spells them.

The private Redis of `serve run` moves to another URL when its replica is replaced. A BackgroundClient asks for the URL
after a few failures in a row, and goes on with a new connection when it changed; without an answer nothing changes, and
the next failures ask again. A RequestClient follows the URL that its BackgroundClient found.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar

import redis
import redis.asyncio as redis_asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from tandem.cluster.state.breaker import Breaker

log = logging.getLogger("tandem.redis")
T = TypeVar("T")
Part = str | bytes | int | float
LOOP_LAG_S = 0.010
ASK_AFTER_FAILURES = 3
ASK_TIMEOUT_S = 2.0
_CONNECTION_ERRORS = (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError, redis.ReadOnlyError, OSError)


class RedisUnavailable(Exception):
    """Redis did not answer in time, cannot be reached, refused the command (memory or disk full, no permission), or has
    lost its data. The service goes on without it."""


class RedisRefused(RedisUnavailable):
    """Redis answers, and refused the command: trying again soon has no use."""


class Commands(Protocol):
    """The part of a client that most users of Redis need."""

    async def command(self, *parts: Part) -> object: ...

    async def pipeline(self, commands: list[list[Part]]) -> list[object]: ...


class RequestClient:
    """Runs scripts on behalf of a request: within `timeout_s` or RedisUnavailable. One per event loop. where: returns
    the URL of now without waiting."""

    def __init__(self, where: Callable[[], str], timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._where = where
        self._clock = clock
        self._timeout_s = timeout_s
        self._connect(where())

    async def script(self, text: str, keys: Sequence[str], arguments: Sequence[Part], *, may_probe: bool = True) -> Any:
        """Runs a Lua script, atomically; its text is sent only when the server does not have it. may_probe False:
        while the breaker is open this call is no probe."""
        if (url := self._where()) != self._url:
            before = self._redis
            self._connect(url)
            await before.aclose()
        return await self._bounded(lambda: _run_script(self._redis, text, keys, arguments), may_probe=may_probe)

    async def close(self) -> None:
        await self._redis.aclose()

    def _connect(self, url: str) -> None:
        """Uses another server from now on, of which nothing is known yet."""
        self._url = url
        self.breaker = Breaker(self._clock)
        self._redis = _open(url, timeout_s=self._timeout_s, connect_timeout_s=self._timeout_s, retries=0)

    async def _bounded(self, call: Callable[[], Awaitable[T]], *, may_probe: bool) -> T:
        breaker = self.breaker
        if not breaker.admit(may_probe):
            raise RedisUnavailable("the breaker is open")
        deadline_s = self._clock() + self._timeout_s
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await call()
        except (TimeoutError, redis.TimeoutError) as error:
            # A deadline that this loop noticed late means that the loop was busy, not that Redis is unavailable.
            if self._clock() - deadline_s < LOOP_LAG_S:
                breaker.record_failure()
            raise RedisUnavailable(f"no answer within {self._timeout_s * 1000:.0f} ms") from error
        except _CONNECTION_ERRORS as error:
            breaker.record_failure()
            raise RedisUnavailable(str(error)) from error
        except redis.RedisError as error:
            breaker.record_success()  # an error reply came in time: the server is available
            raise RedisRefused(str(error)) from error
        breaker.record_success()
        return result


class BackgroundClient:
    """Calls that may take their time: six retries with jittered backoff. One per event loop. ask: returns the current
    URL; None: it never changes.

    A call ends after all tries have had their time, whatever it waits for: closing a connection to a server that is
    stopped has no deadline in the library, and the others of its pool wait for it.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 2.0,
        retries: int = 6,
        ask: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._retries = retries
        self._ask = ask
        self._failures = 0
        self._connect(url)

    @property
    def url(self) -> str:
        """The last known URL."""
        return self._url

    async def command(self, *parts: Part) -> Any:
        """Runs one command; may run it twice when a reply was lost, so it must be safe to repeat."""
        return await self._followed(lambda: _execute(self._redis, parts))

    async def pipeline(self, commands: Sequence[Sequence[Part]]) -> list[Any]:
        """Runs several commands in one transaction; may run it twice."""
        return await self._followed(lambda: _transaction(self._redis, commands))

    async def close(self) -> None:
        await self._redis.aclose()

    def _connect(self, url: str) -> None:
        self._url = url
        self._redis = _open(url, timeout_s=self._timeout_s, connect_timeout_s=1.0, retries=self._retries)

    async def _followed(self, call: Callable[[], Awaitable[T]]) -> T:
        """The call's result. Failures in a row are a reason to ask for the URL."""
        try:
            result = await _translated(call, 2 * self._timeout_s * (self._retries + 2))
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
            before = self._redis
            self._connect(url)
            await before.aclose()


async def published(
    url: str, channels: Sequence[str], silent_s: float, timeout_s: float = 2.0
) -> AsyncGenerator[str | None, None]:
    """Yields the channel of each message that is published on some channels, over a connection of its own.

    The first is None: the server has confirmed all channels. None, too, after silent_s without a message; then the
    server gets a PING, and has as long again to send anything. RedisUnavailable when it does not, and when it refuses.
    """
    # not the library's PubSub, which connects again by itself, with no deadline, and without a notice
    connection: Any = _pool(url, timeout_s=timeout_s, connect_timeout_s=1.0, retries=0).make_connection()
    is_asked = False
    try:
        await _translated(lambda: _subscribe(connection, channels), timeout_s)
        yield None
        while True:
            answer = await _translated(partial(_next_message, connection, silent_s, is_asked), silent_s + timeout_s)
            is_asked = answer is None
            yield answer[1].decode() if isinstance(answer, list) and answer[0] == b"message" else None
    finally:
        with suppress(redis.RedisError, OSError):
            await connection.disconnect(nowait=True)  # at once, whatever the server does


async def _subscribe(connection: Any, channels: Sequence[str]) -> None:
    await connection.connect()
    await connection.send_command("SUBSCRIBE", *channels)
    for _ in channels:
        await connection.read_response(push_request=True)


async def _next_message(connection: Any, silent_s: float, is_asked: bool) -> Any:
    """The next answer; None, and a PING is sent, when there was none in that time, for the first time in a row."""
    answer = await connection.read_response(timeout=silent_s, push_request=True)
    if answer is None:
        if is_asked:
            raise RedisUnavailable("no sign of life")
        await connection.send_command("PING")
    return answer


def text_of(answer: object) -> str:
    """A word of an answer as text."""
    return answer.decode() if isinstance(answer, bytes) else str(answer)


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
        is_reply = isinstance(error, redis.ResponseError) and not isinstance(error, _CONNECTION_ERRORS)
        kind = RedisRefused if is_reply else RedisUnavailable
        raise kind(str(error) or "no answer in time") from error


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
        return await _execute(client, ("EVALSHA", _sha1(text), *rest))
    except redis.exceptions.NoScriptError:
        return await _execute(client, ("EVAL", text, *rest))


@lru_cache
def _sha1(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
