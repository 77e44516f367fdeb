"""Authentication: API keys to tenants. Each route declares its level; routes.py enforces it before the body is read.

Keys are kept as SHA-256 digests; those of settings are compared in constant time. A service may be open as tenant
`default` (--auth) until it has its first key or tenant; then it stays closed. StaticKeys are the settings' (all that
`tandem run-batch` has), TenantKeys the tenants' too.
"""

import enum
import hmac
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from tandem.cluster.tenants.tenant import DEFAULT_TENANT, digest_of
from tandem.workers.messages.errors import RequestRefused


class AuthLevel(enum.Enum):
    """The key that a route requires. METRICS: a metrics or an admin key where there are metrics keys, else none."""

    OPEN = "open"
    METRICS = "metrics"
    API_KEY = "api_key"
    ADMIN = "admin"


class Principal(NamedTuple):
    """The tenant that a request is billed to; is_admin: admin routes are theirs."""

    tenant: str
    is_admin: bool


class Authenticator(Protocol):
    """Turns an Authorization header into a Principal."""

    @property
    def is_open(self) -> bool:
        """True while requests need no key. Never waits."""
        ...

    def authenticate(self, authorization: str | None) -> Principal:
        """RequestRefused 401 `invalid_api_key` for a missing or unknown key. Never waits."""
        ...

    def check_metrics(self, authorization: str | None) -> None:
        """RequestRefused 401 for who may not read the metrics."""
        ...


class KnownKeys(Protocol):
    """This gateway's copy of the tenants' keys (TenantDirectory). Never waits."""

    @property
    def is_known(self) -> bool:
        """They were read at least once."""
        ...

    @property
    def is_certain(self) -> bool:
        """True when they were just read: a key that is not among them does not exist."""
        ...

    @property
    def is_closed(self) -> bool:
        """There is, or once was, a tenant or a key."""
        ...

    def tenant_of(self, digest: bytes) -> str | None:
        """The tenant whose key has this SHA-256."""
        ...


class StaticKeys:
    """The keys of --api-key (all tenant `default`), the admin keys, and those for the metrics alone."""

    def __init__(
        self, api_keys: Iterable[str] = (), admin_keys: Iterable[str] = (), metrics_keys: Iterable[str] = ()
    ) -> None:
        self._api_digests = [digest_of(key) for key in api_keys]
        self._admin_digests = [digest_of(key) for key in admin_keys]
        self._metrics_digests = [digest_of(key) for key in metrics_keys]

    @property
    def is_open(self) -> bool:
        return not self._api_digests and not self._admin_digests

    def authenticate(self, authorization: str | None) -> Principal:
        if self.is_open:
            return Principal(DEFAULT_TENANT, is_admin=True)
        digest = _sent(authorization)
        principal = self.find(digest) if digest is not None else None
        if principal is None:
            raise _unknown_key()
        return principal

    def check_metrics(self, authorization: str | None) -> None:
        if not self._metrics_digests:
            return
        digest = _sent(authorization)
        if digest is None or not _contains([*self._metrics_digests, *self._admin_digests], digest):
            raise _unknown_key()

    def find(self, digest: bytes) -> Principal | None:
        """The tenant of the key with this SHA-256."""
        is_admin = _contains(self._admin_digests, digest)
        is_user = _contains(self._api_digests, digest)
        return Principal(DEFAULT_TENANT, is_admin=is_admin) if is_admin or is_user else None


class TenantKeys:
    """The keys of tenants, and the static ones beside them.

    may_be_open: requests need no key as long as there is none and there never was a tenant. open_admin: then admin
    routes neither. An unknown key is refused with 401 when all keys are known, and with 503 while
    it may be one that Redis has.
    """

    def __init__(self, static: StaticKeys, tenants: KnownKeys, *, may_be_open: bool, open_admin: bool) -> None:
        self._static = static
        self._tenants = tenants
        self._may_be_open = may_be_open and static.is_open
        self._open_admin = open_admin

    @property
    def is_open(self) -> bool:
        return self._may_be_open and self._tenants.is_known and not self._tenants.is_closed

    def authenticate(self, authorization: str | None) -> Principal:
        digest = _sent(authorization)
        if digest is not None:
            if (principal := self._static.find(digest)) is not None:
                return principal
            if (tenant := self._tenants.tenant_of(digest)) is not None:
                return Principal(tenant, is_admin=False)
        if self.is_open:
            return Principal(DEFAULT_TENANT, is_admin=self._open_admin)
        is_unsure = self._may_be_open and not self._tenants.is_closed
        if is_unsure or (digest is not None and not self._tenants.is_certain):
            message = "The key cannot be checked now, because Redis does not answer in time; try again."
            raise RequestRefused(message, code="service_unavailable", status=503)
        raise _unknown_key()

    def check_metrics(self, authorization: str | None) -> None:
        self._static.check_metrics(authorization)


def sent_authorization(headers: Mapping[str, str]) -> str | None:
    """The Authorization header, or what it would be for the key of x-api-key, as Anthropic's clients send it."""
    key = headers.get("x-api-key")
    given = headers.get("authorization")
    return f"Bearer {key}" if given is None and key is not None else given


def check_level(level: AuthLevel, authenticator: Authenticator, authorization: str | None) -> Principal:
    """The principal of a request to a route of `level`. RequestRefused 401 or 403."""
    if level is AuthLevel.METRICS:
        authenticator.check_metrics(authorization)
    if level in (AuthLevel.OPEN, AuthLevel.METRICS):
        return Principal(DEFAULT_TENANT, is_admin=False)
    principal = authenticator.authenticate(authorization)
    if level is AuthLevel.ADMIN and not principal.is_admin:
        raise _no_admin(authenticator.is_open)
    return principal


def may_see_tenants(authenticator: Authenticator, authorization: str | None) -> bool:
    """True when an open route may show tenants to this caller: an admin, or any caller while the service is open."""
    try:
        return authenticator.is_open or authenticator.authenticate(authorization).is_admin
    except RequestRefused:
        return False


def _sent(authorization: str | None) -> bytes | None:
    """SHA-256 of the bearer key that was sent."""
    scheme, _, key = (authorization or "").partition(" ")
    return digest_of(key.strip()) if scheme.lower() == "bearer" and key.strip() else None


def _unknown_key() -> RequestRefused:
    message = "Missing or unknown API key; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
    return RequestRefused(message, code="invalid_api_key", status=401)


def _no_admin(is_open: bool) -> RequestRefused:
    """The refusal, with what would let the caller in."""
    message = (
        "This needs an admin key, one that the service was started with (--admin-api-key); the key that was sent is "
        "none of those."
    )
    if is_open:
        message = (
            "This needs an admin key also where other requests need none, and this service has no admin key: start it "
            "with --admin-api-key KEY (admin_api_key: in a Serve file), and send it as `Authorization: Bearer KEY`."
        )
    return RequestRefused(message, code="permission_denied", status=403)


def _contains(digests: list[bytes], wanted: bytes) -> bool:
    """Looks at every digest, whichever matches."""
    found = False
    for digest in digests:
        found |= hmac.compare_digest(digest, wanted)
    return found
