"""Which running service a verb means, and its Redis: --url picks one of those that run here, --redis-url one anywhere.

For the verbs that read and write Redis (status, adapters, tenants, usage); those that talk HTTP find theirs in
talking.py.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar
from urllib.parse import urlsplit

import psutil
import typer

from cluster.commands.talking import say
from configs.errors import SettingsError, TandemError

if TYPE_CHECKING:
    from cluster.coordination.client import BackgroundClient
    from cluster.run_files import RunFile

T = TypeVar("T")
EVERYWHERE = ("0.0.0.0", "::")
NOBODY = "no service of this user is running on this machine; start one with `tandem serve`, or give --redis-url"
Url = Annotated[
    str | None, typer.Option("--url", help="Service of yours that runs here, by its address. Default: the newest one.")
]
RedisUrl = Annotated[
    str | None, typer.Option("--redis-url", help="Redis of a service, wherever it runs. Default: that of --url's.")
]


class ServiceAt(NamedTuple):
    """A service as its Redis is reached. model: the name of its base model, None where --redis-url does not say."""

    redis_url: str
    model: str | None


def service_at(url: str | None, redis_url: str | None) -> ServiceAt:
    """The service that is meant; of several that run here the newest. TandemError when there is none, SettingsError
    when the flags name none."""
    from cluster.run_files import running_services

    if redis_url is not None and url is not None:
        raise SettingsError("a service is named by --url or by --redis-url, not by both", "--url")
    if redis_url is not None:
        return ServiceAt(redis_url, None)
    runs = running_services()
    if not runs:
        raise TandemError(NOBODY)
    if url is not None:
        runs = runs_on(url, runs)
    elif len(runs) > 1:
        say(f"{len(runs)} services run here; this is about the newest, {runs[0].url} (--url chooses another)")
    return ServiceAt(runs[0].redis_url, runs[0].model)


def model_on(redis_url: str) -> str:
    """The base model of the newest service that runs here on that Redis. SettingsError when none does."""
    from cluster.run_files import running_services

    models = [run.model for run in running_services() if run.redis_url == redis_url]
    if not models:
        raise SettingsError("no service of this user runs here on that Redis: name the base model", "--model")
    return models[0]


def runs_on(url: str, runs: "Sequence[RunFile]") -> "list[RunFile]":
    """The service on `url` (with or without /v1). The loopback's names are one; a service that listens on all addresses
    has any name of this machine. SettingsError when none is."""
    host, port = _place(url)
    found = [run for run in runs if _place(run.url) == (host, port)]
    if not found and host is not None and _is_here(host):
        found = [run for run in runs if urlsplit(run.url).hostname in EVERYWHERE and _place(run.url)[1] == port]
    if not found:
        here = ", ".join(run.url for run in runs) or "none"
        raise SettingsError(f"{url} is no service of yours that runs here; there is {here}", "--url")
    return found


def with_redis(url: str, work: "Callable[[BackgroundClient], Awaitable[T]]") -> T:
    """Runs `work` over a client. TandemError when there is no Redis, or it does not answer."""
    from cluster.coordination.client import BackgroundClient, RedisAway

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


def _is_here(host: str) -> bool:
    """Whether a name or address is this machine's."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    here = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return any(address in here or ip_address(address.partition("%")[0]).is_loopback for address in found)


def _place(url: str) -> tuple[str | None, int | None]:
    """Host and port; the names of this machine are the same."""
    from cluster.endpoint import NEAR

    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise SettingsError(f"{url!r} is not a URL: {error}", "--url") from error
    return None if host in NEAR else host, port
