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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs

import redis
import redis.asyncio as redis_asyncio
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff

from tandem.cluster.state.breaker import Breaker
from tandem.configs.secrets import SentinelUrl, parse_sentinel_url

log = logging.getLogger("tandem.redis")
T = TypeVar("T")
Part = str | bytes | int | float
LOOP_LAG_S = 0.010
ASK_AFTER_FAILURES = 3
ASK_TIMEOUT_S = 2.0
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
CLUSTER_MODE = "it is in cluster mode; Tandem needs one server for all its keys, alone or behind sentinels"
_CLUSTER_ERRORS = (redis.exceptions.AskError, redis.exceptions.ClusterError, redis.exceptions.ClusterCrossSlotError)
_CONNECTION_ERRORS = (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError, redis.ReadOnlyError, OSError)


class RedisUnavailable(Exception):
    """Redis did not answer in time, cannot be reached, refused the command (memory or disk full, no permission), or has
    lost its data. The service goes on without it. state: what is so, after the word Redis, for users."""

    state = "is away"


class RedisLate(RedisUnavailable):
    """No answer came in time: Redis is slow, stopped, or cut off, which looks the same from here."""

    state = "does not answer in time"


class RedisRefused(RedisUnavailable):
    """Redis answers, and refused the command: trying again soon has no use."""

    state = "refuses it"


class RedisEmptied(RedisUnavailable):
    """Redis answers, and has no data of any service."""

    state = "has lost its data"


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
            await _close(before, self._timeout_s)
        return await self._bounded(lambda: _run_script(self._redis, text, keys, arguments), may_probe=may_probe)

    async def close(self) -> None:
        await _close(self._redis, self._timeout_s)

    def _connect(self, url: str) -> None:
        """Uses another server from now on, of which nothing is known yet."""
        self._url = url
        self.breaker = Breaker(self._clock)
        self._last_failure: type[RedisUnavailable] = RedisUnavailable
        self._redis = _open(url, timeout_s=self._timeout_s, connect_timeout_s=self._timeout_s, retries=0)

    async def _bounded(self, call: Callable[[], Awaitable[T]], *, may_probe: bool) -> T:
        breaker = self.breaker
        if not breaker.admit(may_probe):
            raise self._last_failure("the breaker is open")
        deadline_s = self._clock() + self._timeout_s
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await call()
        except (TimeoutError, redis.TimeoutError) as error:
            # A deadline that this loop noticed late means that the loop was busy, not that Redis is unavailable.
            if self._clock() - deadline_s < LOOP_LAG_S:
                breaker.record_failure()
            self._last_failure = RedisLate
            raise RedisLate(f"no answer within {self._timeout_s * 1000:.0f} ms") from error
        except _CONNECTION_ERRORS as error:
            breaker.record_failure()
            self._last_failure = _kind_of(error)
            raise self._last_failure(str(error)) from error
        except redis.RedisError as error:
            breaker.record_success()  # an error reply came in time: the server is available
            raise RedisRefused(_said(error)) from error
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
        await _close(self._redis, self._timeout_s)

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
            await _close(before, self._timeout_s)


async def published(
    url: str, channels: Sequence[str], silent_s: float, timeout_s: float = 2.0
) -> AsyncGenerator[str | None, None]:
    """Yields the channel of each message that is published on some channels, over a connection of its own.

    The first is None: the server has confirmed all channels. None, too, after silent_s without a message; then the
    server gets a PING, and has as long again to send anything. RedisUnavailable when it does not, and when it refuses.
    """
    # not the library's PubSub, which connects again by itself, with no deadline, and without a notice
    pool = _pool(url, timeout_s=timeout_s, connect_timeout_s=1.0, retries=0)
    connection: Any = pool.make_connection()
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
            await pool.aclose()


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
            raise RedisLate("no sign of life")
        await connection.send_command("PING")
    return answer


def text_of(answer: object) -> str:
    """A word of an answer as text."""
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def check_reachable(url: str, timeout_s: float = 2.0) -> str | None:
    """The reason, for users, why the server at `url` cannot be used; None when it can. Blocking; for the launcher."""
    for name, (path, *_) in parse_qs(url.partition("?")[2]).items():
        if name in _FILES and not Path(path).is_file():
            return f"{name}={path}: there is no such file"
    try:
        with ThreadPoolExecutor(1) as pool:  # this thread may have a loop that runs
            return pool.submit(asyncio.run, _why_not(url, timeout_s)).result()
    except (ValueError, TypeError) as error:  # of its options, too
        return f"not a Redis URL: {error}"


async def _why_not(url: str, timeout_s: float) -> str | None:
    client = BackgroundClient(url, timeout_s, retries=0)
    try:
        await client.command("PING")
        with suppress(RedisRefused):  # a user who may not ask
            found = await client.command("INFO", "cluster")
            if isinstance(found, dict) and found.get("cluster_enabled"):
                return CLUSTER_MODE
    except RedisUnavailable as error:
        return str(error)
    finally:
        await client.close()
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
    if (found_by := parse_sentinel_url(url)) is not None:
        return _SentinelPool(found_by, options)
    return redis_asyncio.BlockingConnectionPool.from_url(url, **options)


class _SentinelPool(redis_asyncio.BlockingConnectionPool):
    """Connections to the master that sentinels name, who are asked before each new one. A master that is none any more
    closes its connections, or refuses to write, which closes the connection here."""

    is_master, check_connection = True, False  # what the library's connections ask of their pool

    def __init__(self, url: SentinelUrl, options: dict[str, Any]) -> None:
        of_server = dict(parse_url(url.server_url))
        is_tls = url.server_url.startswith("rediss://")
        own = {name: of_server.pop(f"sentinel_{name}", None) for name in ("username", "password")}
        for name in ("host", "port", "connection_class"):
            of_server.pop(name, None)
        kind = SentinelManagedSSLConnection if is_tls else SentinelManagedConnection
        super().__init__(connection_class=kind, **{**options, **of_server})
        self.connection_kwargs["connection_pool"] = self
        self._master = url.master
        shared = {name: value for name, value in of_server.items() if name.startswith("ssl_")}
        times = {name: options[name] for name in ("socket_timeout", "socket_connect_timeout")}
        self._sentinels = [
            Sentinel([place], sentinel_kwargs={"ssl": is_tls, **shared, **times, **own})  # type: ignore[no-untyped-call]
            for place in url.sentinels
        ]

    async def get_master_address(self) -> tuple[str, int]:
        """The master's address, of the first sentinel that names one which is not down. redis.ConnectionError."""
        asking = [asyncio.ensure_future(sentinel.discover_master(self._master)) for sentinel in self._sentinels]
        try:
            for asked in asyncio.as_completed(asking):
                with suppress(redis.RedisError, OSError):
                    host, port = await asked
                    return str(host), int(port)
        finally:
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        raise redis.ConnectionError(f"no sentinel names a master {self._master!r} that is up")

    async def aclose(self) -> None:
        """Closes its connections, those to the sentinels too."""
        await super().aclose()
        for sentinel in self._sentinels:
            await sentinel.aclose()


async def _translated(call: Callable[[], Awaitable[T]], limit_s: float) -> T:
    try:
        async with asyncio.timeout(limit_s):
            return await call()
    except (redis.RedisError, OSError, TimeoutError) as error:
        raise _kind_of(error)(_said(error) or "no answer in time") from error


def _kind_of(error: Exception) -> type[RedisUnavailable]:
    cause: BaseException | None = error  # a timeout of a connection's first words, or of all connections, is wrapped
    while cause is not None:
        if isinstance(cause, TimeoutError | redis.TimeoutError):
            return RedisLate
        cause = cause.__cause__
    is_reply = isinstance(error, redis.ResponseError) and not isinstance(error, _CONNECTION_ERRORS)
    return RedisRefused if is_reply else RedisUnavailable


async def _close(client: "redis_asyncio.Redis", limit_s: float) -> None:
    """Closes a client's connections, which has no deadline in the library."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await client.aclose()


def _said(error: Exception) -> str:
    """The words of an error, for users."""
    return CLUSTER_MODE if isinstance(error, _CLUSTER_ERRORS) else str(error)


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
