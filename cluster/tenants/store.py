"""Tenants as durable desired state in Redis: what the CLI and the admin routes change, and gateways read.

A DurableMap whose changes are checked. Raises RequestRefused for what the caller can mend and RedisUnavailable.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tandem.cluster.state import keys
from tandem.cluster.state.durable_map import DurableMap, Held
from tandem.cluster.state.redis_client import Commands
from tandem.cluster.tenants.tenant import (
    HashedKey,
    Limits,
    Tenant,
    changed_limits,
    check_name,
    digest_of,
    new_key,
)
from tandem.workers.messages.errors import RequestRefused

MAX_GRACE_S = 30 * 86400.0
TRIES = 20


class KeyedTenant(NamedTuple):
    """A tenant and its new key, which is shown now or never."""

    tenant: Tenant
    key: str


class _Owned(msgspec.Struct, frozen=True):
    """The part of an AdapterEntry that says whose it is. tenant None: everyone's."""

    tenant: str | None = None


class TenantStore(DurableMap[Tenant]):
    """The tenants of one Redis. Their epoch has an id when the service has, or once had, tenants or keys."""

    def __init__(self, redis: Commands, wall_clock: Callable[[], float] = time.time) -> None:
        super().__init__(redis, keys.TENANTS_MAP, Tenant, msgspec.json, "tenants")
        self._wall_clock = wall_clock

    async def add(self, name: str, limits: Mapping[str, Any]) -> KeyedTenant:
        """A new tenant with a new key. RequestRefused 400 when there is one of that name."""
        key, now_s = new_key(), self._wall_clock()
        tenant = Tenant(
            name=check_name(name),
            keys=(HashedKey(digest=digest_of(key).hex(), created_s=now_s),),
            limits=changed_limits(Limits(), limits),
            created_s=now_s,
            budget_id=int(now_s * 1000),
        )
        if await self.compare_and_set(name, b"", self.encode(tenant)) is None:
            raise RequestRefused(
                f"There is a tenant {name!r} already.", code="already_exists", status=409, param="name"
            )
        return KeyedTenant(tenant, key)

    async def change(self, name: str, limits: Mapping[str, Any]) -> Tenant:
        """Replaces the given limits; None lifts one. Setting token_budget starts it anew."""

        def changed(tenant: Tenant) -> Tenant:
            # later than the one before, whatever clock that was set by
            fresh = max(tenant.budget_id + 1, int(self._wall_clock() * 1000))
            budget_id = fresh if "token_budget" in limits else tenant.budget_id
            merged = changed_limits(tenant.limits, limits)
            return msgspec.structs.replace(tenant, limits=merged, budget_id=budget_id)

        return await self._update(name, changed)

    async def rotate_key(self, name: str, grace_s: float = 0.0) -> KeyedTenant:
        """A new key in place of all others, which go on working for grace_s."""
        if not 0 <= grace_s <= MAX_GRACE_S:
            raise RequestRefused(
                f"A time of grace is from 0 to {MAX_GRACE_S:.0f} seconds.", code="invalid_value", param="grace_s"
            )
        key, now_s = new_key(), self._wall_clock()
        fresh = HashedKey(digest=digest_of(key).hex(), created_s=now_s)

        def rotated(tenant: Tenant) -> Tenant:
            ends_s = now_s + grace_s
            old = tuple(
                msgspec.structs.replace(known, expires_s=min(known.expires_s or ends_s, ends_s))
                for known in tenant.keys
                if grace_s > 0 and (known.expires_s is None or known.expires_s > now_s)
            )
            return msgspec.structs.replace(tenant, keys=(fresh, *old))

        return KeyedTenant(await self._update(name, rotated), key)

    async def remove(self, name: str) -> None:
        """Removes its keys and its counts; usage rows stay. RequestRefused 404; 409 while it has adapters."""
        for _ in range(TRIES):
            known = await self._tenant(name)
            if adapters := await _adapters_of(self.redis, name):
                message = f"Tenant {name!r} has adapters; remove them first: {', '.join(adapters)}."
                raise RequestRefused(message, code="invalid_value", status=409, param="name")
            if await self.compare_and_set(name, known.raw, b"") is not None:
                await self.redis.command("DEL", keys.quota(name), keys.quota_gateways(name))
                return
        raise _contended(name)

    async def weights(self) -> dict[str, float]:
        """Each tenant's weight, for the fairness of the groups; a name that is missing has 1."""
        reading = await self.read()
        return {name: tenant.limits.weight for name, tenant in reading.values.items()}

    async def _update(self, name: str, change: Callable[[Tenant], Tenant]) -> Tenant:
        for _ in range(TRIES):
            known = await self._tenant(name)
            after = change(known.value)
            if await self.compare_and_set(name, known.raw, self.encode(after)) is not None:
                return after
        raise _contended(name)

    async def _tenant(self, name: str) -> Held[Tenant]:
        try:
            known = await self.get(check_name(name))
        except ValueError as error:
            message = f"Tenant {name!r} was written by another version."
            raise RequestRefused(message, code="internal_error", status=500) from error
        if known is None:
            raise no_tenant(name)
        return known


async def _adapters_of(redis: Commands, tenant: str) -> list[str]:
    """Names of the adapters that a tenant has of its own beside every base model, sorted. RedisUnavailable."""
    models = await redis.command("SMEMBERS", keys.ADAPTER_MODELS)
    assert isinstance(models, set | list), models
    maps = [DurableMap(redis, keys.adapters_map(m.decode()), _Owned, msgspec.msgpack, "adapters") for m in models]
    readings = [await map.read() for map in maps]
    return sorted({name for there in readings for name, owned in there.values.items() if owned.tenant == tenant})


def no_tenant(name: str) -> RequestRefused:
    """The refusal of a name that is no tenant's."""
    return RequestRefused(f"There is no tenant {name!r}.", code="tenant_not_found", status=404, param="name")


def _contended(name: str) -> RequestRefused:
    message = f"Tenant {name!r} is being changed by others; try again."
    return RequestRefused(message, code="service_unavailable", status=503)
