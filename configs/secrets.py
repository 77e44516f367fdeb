"""Secrets by reference: `env:NAME` or `file:PATH` in place of a key or of the URL of Redis.

Command lines (`ps`) and the arguments of a Serve application (its logs, its REST API) are shown to others; references
in them show nothing. Read where the service starts: by `tandem serve`, and by cluster/app.py on the node that builds.
"""

from pathlib import Path
from urllib.parse import urlsplit

from msgspec.structs import replace

from tandem.configs.environment import variable
from tandem.configs.errors import SettingsError
from tandem.configs.schema import ServiceSettings

HIDDEN = "(hidden)"


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
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("redis", "rediss", "unix") and (parts.port or 1) > 0
    except ValueError:
        is_right = False
    if not is_right:
        raise SettingsError(
            f"{HIDDEN} is no redis://, rediss:// or unix:// URL; a password in it is percent-encoded", "--redis-url"
        )


def _keys(given: tuple[str, ...], flag: str) -> tuple[str, ...]:
    """Keys; a file may have several, one a line."""
    keys = tuple(key.strip() for item in given for key in _lines(item, flag) if key.strip())
    check_keys(keys, flag)
    return keys


def _lines(item: str, flag: str) -> list[str]:
    found = read_secret(item, flag)
    return found.split("\n") if item.startswith("file:") else [found]
