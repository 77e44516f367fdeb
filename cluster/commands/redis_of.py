"""The Redis that verbs change: the one given, else that of the service which runs here."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from configs.errors import TandemError

if TYPE_CHECKING:
    from cluster.coordination.client import BackgroundClient

T = TypeVar("T")
NOBODY = "no service of this user is running on this machine; start one with `tandem serve`, or give --redis-url"
RedisUrl = Annotated[
    str | None, typer.Option("--redis-url", help="Default: the Redis of the service that runs here, the newest one.")
]


def with_redis(url: str | None, work: "Callable[[BackgroundClient], Awaitable[T]]") -> T:
    """Runs `work` over a client. TandemError when there is no Redis, or it does not answer."""
    from cluster.coordination.client import BackgroundClient, RedisAway
    from cluster.run_files import read_run_files

    if url is None:
        runs = read_run_files()
        if not runs:
            raise TandemError(NOBODY)
        url = runs[0].redis_url

    async def run() -> T:
        redis = BackgroundClient(url, timeout_s=2.0, retries=2)
        try:
            return await work(redis)
        finally:
            await redis.close()

    try:
        return asyncio.run(run())
    except RedisAway as error:
        raise TandemError(f"Redis does not answer: {error}") from error
    except ValueError as error:
        raise TandemError(f"--redis-url: {error}") from error
