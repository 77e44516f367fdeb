"""Who is asking: API keys to tenants. Each route declares its level; routes.py enforces it before the body is read.

Keys are kept as SHA-256 digests and all compared in constant time. With no keys at all the service is open as tenant
`default`. A later Authenticator (tenants in Redis) replaces StaticKeys behind the same Protocol.
"""

import enum
import hashlib
import hmac
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from workers.errors import RequestRefused


class AuthLevel(enum.Enum):
    """What a route asks for."""

    OPEN = "open"
    API_KEY = "api_key"
    ADMIN = "admin"


class Principal(NamedTuple):
    """Who a request is billed to, and whether admin routes are theirs."""

    tenant: str
    is_admin: bool


class Authenticator(Protocol):
    """Turns an Authorization header into a Principal."""

    def authenticate(self, authorization: str | None) -> Principal:
        """RequestRefused 401 `invalid_api_key` for a missing or unknown key. Never waits."""
        ...


class StaticKeys:
    """The keys of --api-key (all tenant `default`) and the admin keys."""

    def __init__(self, api_keys: Iterable[str] = (), admin_keys: Iterable[str] = ()) -> None:
        self._api_digests = [_digest(key) for key in api_keys]
        self._admin_digests = [_digest(key) for key in admin_keys]

    def authenticate(self, authorization: str | None) -> Principal:
        if not self._api_digests and not self._admin_digests:
            return Principal("default", is_admin=True)
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip())
        is_admin = _contains(self._admin_digests, digest)
        is_user = _contains(self._api_digests, digest)
        if scheme.lower() != "bearer" or not (is_admin or is_user):
            message = "Missing or unknown API key; send it as `Authorization: Bearer KEY`."
            raise RequestRefused(message, code="invalid_api_key", status=401)
        return Principal("default", is_admin=is_admin)


def check_level(level: AuthLevel, authenticator: Authenticator, authorization: str | None) -> Principal:
    """The principal of a request to a route of `level`. RequestRefused 401 or 403."""
    if level is AuthLevel.OPEN:
        return Principal("default", is_admin=False)
    principal = authenticator.authenticate(authorization)
    if level is AuthLevel.ADMIN and not principal.is_admin:
        raise RequestRefused("This needs an admin key.", code="permission_denied", status=403)
    return principal


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _contains(digests: list[bytes], wanted: bytes) -> bool:
    """Looks at every digest, whichever matches."""
    found = False
    for digest in digests:
        found |= hmac.compare_digest(digest, wanted)
    return found
