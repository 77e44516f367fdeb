"""The running service that a verb works on: over HTTP (`on_endpoint`), or through Redis (`on_service`, `with_redis`).

Through Redis, --url names a service of this user on this machine, --redis-url one anywhere; over HTTP, --url is that of
any service. Without them it is the newest one here.
"""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import urlsplit

import psutil

from tandem.cluster.cli.base.flags import Command, flag, with_flags
from tandem.cluster.cli.base.terminal import say
from tandem.configs.environment import PREFIX
from tandem.configs.errors import SettingsError, TandemError
from tandem.configs.secrets import check_redis_url, read_secret

if TYPE_CHECKING:
    from tandem.cluster.cli.client.endpoint import Endpoint
    from tandem.cluster.process.run_files import RunFile
    from tandem.cluster.state.redis_client import BackgroundClient

T = TypeVar("T")
CLIENT = f"{PREFIX}CLIENT_"
"""The beginning of variables of flags that `serve` has too, for its own files and not for a client's."""
EVERYWHERE = ("0.0.0.0", "::")
SERVICE_FLAGS = (
    flag("url", str, help="Address of a service of yours on this machine. Default: the newest one."),
    flag("redis_url", str, help="Redis of a service, on any machine (or env:NAME, file:PATH). Default: that of --url."),
)
ENDPOINT_FLAGS = (
    flag("url", str, help="Address of any OpenAI-compatible service. Default: the newest one here."),
    flag("api_key", str, help=f"API key to send (or env:NAME, file:PATH). Default: ${PREFIX}API_KEY."),
    flag(
        "ssl_certfile",
        str,
        envvar=f"{CLIENT}SSL_CERTFILE",
        help="PEM file with a certificate to show to the service. Default: none is shown.",
    ),
    flag(
        "ssl_keyfile",
        str,
        envvar=f"{CLIENT}SSL_KEYFILE",
        help="PEM file with that certificate's private key. Default: it is in --ssl-certfile.",
    ),
    flag(
        "ssl_ca_certs",
        str,
        envvar=f"{CLIENT}SSL_CA_CERTS",
        help="PEM file with the CA certificates to trust. Default: a service of yours here is known, for others what "
        "the machine trusts.",
    ),
)


class ServiceAt(NamedTuple):
    """A service, reached through its Redis. model: the name of its base model, None where it is not known."""

    redis_url: str
    model: str | None


def on_service(function: Command) -> Command:
    """Makes `function(..., at)` a command with --url and --redis-url. `at` is the ServiceAt that they name."""
    return with_flags(function, "at", SERVICE_FLAGS, service_at)


def service_at(url: str | None, redis_url: str | None) -> ServiceAt:
    """Finds the service that the flags name, else the newest one here. TandemError when none runs here, SettingsError
    when the flags match none."""
    if redis_url is not None and url is not None:
        raise SettingsError("a service is named by --url or by --redis-url, not by both", "--url")
    if redis_url is not None:
        check_redis_url(redis_url := read_secret(redis_url, "--redis-url"))
        return ServiceAt(redis_url, None)
    run = newest("--redis-url") if url is None else runs_on(url, _running("--redis-url"))[0]
    return ServiceAt(run.redis_url, run.model)


def on_endpoint(function: Command) -> Command:
    """Makes `function(..., service)` a command with --url, --api-key and the files of TLS. `with service as endpoint`
    is a connection to the service that they name (endpoint_at)."""
    return with_flags(function, "service", ENDPOINT_FLAGS, endpoint_at)


@contextmanager
def endpoint_at(
    url: str | None,
    api_key: str | None,
    ssl_certfile: str | None,
    ssl_keyfile: str | None,
    ssl_ca_certs: str | None,
) -> "Iterator[Endpoint]":
    """Opens the service at `url`, else the newest one of this user on this machine. Ctrl-C inside ends the process
    with status 130. TandemError when none runs here, SettingsError when a flag is wrong."""
    from tandem.cluster.cli.client.endpoint import Endpoint
    from tandem.cluster.gateway.http.tls import ClientFiles

    if url is None:
        run = newest("--url")
        url, certificate = run.url, run.certificate
    else:
        certificate = certificate_of(url)
    key = None if api_key is None else read_secret(api_key, "--api-key")
    try:
        with Endpoint(url, key, certificate, ClientFiles(ssl_certfile, ssl_keyfile, ssl_ca_certs)) as endpoint:
            yield endpoint
    except KeyboardInterrupt:
        sys.exit(130)


def newest(instead: str) -> "RunFile":
    """The newest service of this user on this machine. instead: the flag that the error names when there is none
    (TandemError)."""
    runs = _running(instead)
    if len(runs) > 1:
        say(f"{len(runs)} services run here; using the newest, {runs[0].url} (--url chooses another)")
    return runs[0]


def certificate_of(url: str) -> str | None:
    """The certificate (PEM) of this user's service here that answers on `url`; None for other services."""
    from tandem.cluster.process.run_files import running_services

    if not url.startswith("https://") or not (runs := running_services()):
        return None
    try:
        return runs_on(url, runs)[0].certificate
    except SettingsError:
        return None


def _running(instead: str) -> "list[RunFile]":
    from tandem.cluster.process.run_files import running_services

    if runs := running_services():
        return runs
    advice = f"start one with `tandem serve`, or give {instead}"
    raise TandemError(f"no service of this user runs on this machine, or it has not come up yet; {advice}")


def model_on(redis_url: str) -> str:
    """The base model of the newest service here that uses this Redis. SettingsError when there is none."""
    from tandem.cluster.process.run_files import running_services

    models = [run.model for run in running_services() if run.redis_url == redis_url]
    if not models:
        raise SettingsError("no service of this user runs here on that Redis: name the base model", "--model")
    return models[0]


def runs_on(url: str, runs: "Sequence[RunFile]") -> "list[RunFile]":
    """The services that answer on `url` (with or without /v1). All names of the loopback are equal; a service that
    listens on all addresses answers to any name of this machine. SettingsError when there is none."""
    host, port = _host_and_port(url)
    found = [run for run in runs if _host_and_port(run.url) == (host, port)]
    if not found and host is not None and _is_here(host):
        found = [r for r in runs if urlsplit(r.url).hostname in EVERYWHERE and _host_and_port(r.url)[1] == port]
    if not found:
        here = ", ".join(run.url for run in runs) or "none"
        raise SettingsError(f"{url} is no service of yours that runs here; there is {here}", "--url")
    return found


def with_redis(
    url: str, work: "Callable[[BackgroundClient], Awaitable[T]]", *, timeout_s: float = 2.0, retries: int = 2
) -> T:
    """Runs `work` with a client. TandemError when the URL is not Redis's or Redis does not answer."""
    from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable

    async def run() -> T:
        redis = BackgroundClient(url, timeout_s=timeout_s, retries=retries)
        try:
            return await work(redis)
        finally:
            await redis.close()

    try:
        return asyncio.run(run())
    except RedisUnavailable as error:
        raise TandemError(f"Redis {error.state}: {error}") from error
    except ValueError as error:
        raise TandemError(f"--redis-url: {error}") from error


def _is_here(host: str) -> bool:
    """Returns True for names and addresses of this machine."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    here = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return any(address in here or ip_address(address.partition("%")[0]).is_loopback for address in found)


def _host_and_port(url: str) -> tuple[str | None, int | None]:
    """Host and port of a URL; None for every name of the loopback. SettingsError when it is malformed."""
    from tandem.cluster.cli.client.endpoint import NEAR

    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise SettingsError(f"{url!r} is not a URL: {error}", "--url") from error
    return None if host in NEAR else host, port
