"""A tenant: a name, hashed keys, limits. Made and checked here, kept in Redis by store.py.

A key is 256 random bits, shown once; what is kept is its SHA-256, which a random key needs no salt or stretching for.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.workers.messages import request
from tandem.workers.messages.errors import RequestRefused

DEFAULT_TENANT = request.DEFAULT_TENANT
"""The tenant of requests without a tenant's key: all of an open API, and those with an --api-key."""
KEY_PREFIX = "sk-tandem-"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_Count = Annotated[int, Meta(ge=1, le=10**12)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The amounts that a tenant may take; None: no limit.

    A minute is a token bucket: it holds a minute's worth, fills evenly, and starts full. tokens: prompt and output.
    concurrency: HTTP requests at once. kv_share: of all groups' KV tokens, 0 to 1, for its requests in flight.
    max_adapters: of its own at once. weight: its share of busy groups against other tenants'. priority: of requests
    that name none. token_budget: tokens in all, counted from when it was set.
    """  # the description of the body in openapi.json

    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    concurrency: _Count | None = None
    max_adapters: Annotated[int, Meta(ge=0, le=10**6)] | None = None
    kv_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    token_budget: Annotated[int, Meta(ge=0, le=10**15)] | None = None

    @property
    def counted(self) -> dict[str, Any]:
        """The limits that Redis counts as they are, by name."""
        return {
            "requests_per_minute": self.requests_per_minute,
            "tokens_per_minute": self.tokens_per_minute,
            "concurrency": self.concurrency,
            "token_budget": self.token_budget,
        }

    @property
    def are_counted(self) -> bool:
        """True when some of them need counting in Redis."""
        return any(limit is not None for limit in (self.kv_share, *self.counted.values()))


NO_LIMITS = Limits()


class HashedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is kept. digest: hex SHA-256. expires_s: wall clock, when it was replaced with a time of grace."""

    digest: str
    created_s: float
    expires_s: float | None = None


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant. budget_id grows with every setting of the budget: what was spent before does not count."""

    name: str
    keys: tuple[HashedKey, ...]
    limits: Limits
    created_s: float
    budget_id: int = 0


def check_name(name: str) -> str:
    """The name. RequestRefused 400 when it cannot be a tenant's."""
    if not _NAME.fullmatch(name):
        message = "A tenant's name is 1 to 63 of a-z, 0-9, dot, dash and underscore, and begins with a letter or digit."
        raise RequestRefused(message, code="invalid_value", param="name")
    return name


def changed_limits(limits: Limits, changes: Mapping[str, Any]) -> Limits:
    """`limits` with the given fields replaced; None lifts a limit. RequestRefused 400 names what is wrong."""
    merged = msgspec.structs.asdict(limits) | dict(changes)
    defaults = {"weight": NO_LIMITS.weight, "priority": NO_LIMITS.priority}
    merged |= {name: value for name, value in defaults.items() if merged[name] is None}
    try:
        return msgspec.convert(merged, Limits)
    except msgspec.ValidationError as error:
        words = str(error)
        param = next((name for name in merged if f"`$.{name}`" in words or f"`{name}`" in words), None)
        wanted = words.partition(" - at ")[0]
        raise RequestRefused(f"{param or 'limits'}: {wanted}.", code="invalid_value", param=param) from None


def new_key() -> str:
    """A fresh key: 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """SHA-256 of a key, 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def salted(tenant: str, salt: str | None) -> str:
    """The cache salt of a tenant's request: no two tenants share KV, whatever they send. A name holds no slash."""
    return f"{tenant}/{salt or ''}"
