"""Secrets by reference: `env:NAME` or `file:PATH` in place of a key or of the URL of Redis; and what is such a URL.

Command lines (`ps`) and the arguments of a Serve application (its logs, its REST API) are shown to others; references
in them show nothing. Read where the service starts: by `tandem serve`, and by cluster/app.py on the node that builds.

A URL is one of redis-py's, or names sentinels by which a server is found; rediss+sentinel:// is TLS to all of them:

    redis+sentinel://[USER[:PASSWORD]@]HOST[:PORT][,HOST[:PORT] ...]/MASTER[/DATABASE][?OPTIONS]

User, password and options are those of the servers, as redis-py spells them; sentinel_username and sentinel_password
among the options are those of the sentinels.
"""

from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from msgspec.structs import replace

from tandem.configs.environment import variable
from tandem.configs.errors import SettingsError
from tandem.configs.schema import ServiceSettings

HIDDEN = "(hidden)"
SENTINEL_PORT = 26379
SCHEMES = ("redis", "rediss", "unix")
SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")


def with_secrets(settings: ServiceSettings) -> ServiceSettings:
    """Settings with what their references stand for. SettingsError names the flag, and never a secret."""
    gateway = settings.gateway
    gateway = replace(
        gateway,
        api_keys=_keys(gateway.api_keys, "--api-key"),
        admin_keys=_keys(gateway.admin_keys, "--admin-api-key"),
        metrics_keys=_keys(gateway.metrics_keys, "--metrics-api-key"),
    )
    if (url := settings.redis.url) is not None:
        check_redis_url(url := read_secret(url, "--redis-url"))
    return replace(settings, gateway=gateway, redis=replace(settings.redis, url=url))


def read_secret(given: str, flag: str) -> str:
    """Return what `env:NAME` or `file:PATH` stands for, without blanks around it; anything else as it is.
    SettingsError when there is none."""
    kind, _, name = given.partition(":")
    if kind == "env":
        found = variable(name)
        if found is None:
            raise SettingsError(f"{given}: there is no such variable in the environment", flag)
    elif kind == "file":
        try:
            found = Path(name).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"{given} cannot be read: {error.strerror}", flag) from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"{given} is not UTF-8", flag) from error
    else:
        return given
    if not (found := found.strip()):
        raise SettingsError(f"{given} is empty", flag)
    return found


def check_keys(keys: tuple[str, ...], flag: str) -> None:
    """Raises SettingsError for a key that cannot be sent."""
    if not all(key and key.isprintable() for key in keys):
        raise SettingsError("a key must be printable and not empty", flag)


def without_password(url: str) -> str:
    """The URL of a Redis, for the user's eyes: without its password, and without its query, which may hold one."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    user, at, place = rest.rpartition("@")
    if at:
        user = f"{user.partition(':')[0]}:{HIDDEN}"
    place, asked, _ = place.partition("?")
    return f"{scheme}{separator}{user}{at}{place}{asked}{HIDDEN if asked else ''}"


def check_redis_url(url: str) -> None:
    """Raises SettingsError for what is no URL of a Redis; the library's own error would show parts of it."""
    if not is_redis_url(url):
        raise SettingsError(
            f"{HIDDEN} is no redis://, rediss:// or unix:// URL, nor redis+sentinel://HOST[,HOST ...]/MASTER; a "
            "password in it is percent-encoded",
            "--redis-url",
        )


class SentinelUrl(NamedTuple):
    """Parts of such a URL. server_url: redis:// or rediss://, with user, password, database and options, of a host
    that is still to be found."""

    sentinels: tuple[tuple[str, int], ...]
    master: str
    server_url: str


def is_redis_url(url: str) -> bool:
    """True if a Redis may be reached by it."""
    try:
        if (parsed := parse_sentinel_url(url)) is not None:
            url = parsed.server_url
        parts = urlsplit(url)
        return parts.scheme in SCHEMES and (parts.port or 1) > 0
    except ValueError:
        return False


def parse_sentinel_url(url: str) -> SentinelUrl | None:
    """Return the parts of a URL with sentinels, None for another one. ValueError, which repeats none of it."""
    scheme, _, rest = url.partition("://")
    if scheme not in SENTINEL_SCHEMES:
        return None
    place, asked, options = rest.partition("?")
    place, _, path = place.partition("/")
    user, at, hosts = place.rpartition("@")
    master, _, database = path.partition("/")
    if not master:
        raise ValueError("a URL with sentinels ends with the name of a master")
    server_url = f"{scheme.partition('+')[0]}://{user}{at}server/{database}{asked}{options}"
    return SentinelUrl(tuple(map(_host_and_port, hosts.split(","))), unquote(master), server_url)


def _keys(given: tuple[str, ...], flag: str) -> tuple[str, ...]:
    """Keys; a file may have several, one a line."""
    keys = tuple(key.strip() for item in given for key in _lines(item, flag) if key.strip())
    check_keys(keys, flag)
    return keys


def _lines(item: str, flag: str) -> list[str]:
    found = read_secret(item, flag)
    return found.split("\n") if item.startswith("file:") else [found]


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.path:
        raise ValueError("a sentinel without a host")
    return parts.hostname, parts.port or SENTINEL_PORT
