"""Tenants as durable desired state in Redis: what the CLI and the admin routes change, and gateways read.

Every change is one compare-and-set that also raises a version and announces it (notifications.py), so writers never
lose each other's changes, and readers look at two small keys. Raises RequestRefused for what the caller can mend and
RedisUnavailable.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from tandem.cluster.adapters.owned import adapters_of
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import ANNOUNCE
from tandem.cluster.state.redis_client import Commands
from tandem.cluster.tenants.tenant import HashedKey, Limits, Tenant, changed_limits, check_name, digest_of, new_key
from tandem.workers.messages.errors import RequestRefused

log = logging.getLogger("tandem.tenants")
MAX_GRACE_S = 30 * 86400.0
TRIES = 20

_PUT = f"""
local before = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if before ~= ARGV[2] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
redis.call('SET', KEYS[3], ARGV[4], 'NX')
redis.call('INCR', KEYS[2])
{ANNOUNCE}
return 1
"""
_FOUND = f"""
if not redis.call('SET', KEYS[3], ARGV[1], 'NX') then return 0 end
redis.call('INCR', KEYS[2])
{ANNOUNCE}
return 1
"""
_SEED = f"""
if redis.call('GET', KEYS[3]) == ARGV[1] then return 0 end
for i = 3, #ARGV, 2 do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('SET', KEYS[3], ARGV[1])
local version = tonumber(redis.call('GET', KEYS[2]) or '0')
redis.call('SET', KEYS[2], string.format('%d', math.max(version, tonumber(ARGV[2])) + 1))
{ANNOUNCE}
return 1
"""
_RESTORE = f"""
if redis.call('GET', KEYS[3]) ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
local state = cjson.decode(ARGV[4])
for _, name in ipairs(state.gone) do redis.call('HDEL', KEYS[1], name) end
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('SET', KEYS[2], ARGV[3])
{ANNOUNCE}
return 1
"""
_KEYS = (keys.TENANTS, keys.TENANTS_VERSION, keys.TENANTS_ORIGIN)


class Mark(NamedTuple):
    """A mark that distinguishes states of the tenants. origin None: nothing was ever written to this Redis; with an
    origin the service has, or once had, tenants or keys."""

    origin: str | None
    version: int


class Reading(NamedTuple):
    """All tenants at one moment. unreadable: how many more there are, whose entries cannot be read."""

    mark: Mark
    tenants: dict[str, Tenant]
    unreadable: int = 0


class KeyedTenant(NamedTuple):
    """A tenant and its new key, which is shown now or never."""

    tenant: Tenant
    key: str


class TenantStore:
    """Reads and changes the tenants of one Redis."""

    def __init__(self, redis: Commands, wall_clock: Callable[[], float] = time.time) -> None:
        self._redis = redis
        self._wall_clock = wall_clock

    async def mark(self) -> Mark:
        """Which state is there now; cheap."""
        return _mark(await self._redis.command("MGET", keys.TENANTS_ORIGIN, keys.TENANTS_VERSION))

    async def read(self) -> Reading:
        """All tenants. One that cannot be read (of another version of Tandem) is logged and only counted."""
        answers = await self._redis.pipeline(
            [["MGET", keys.TENANTS_ORIGIN, keys.TENANTS_VERSION], ["HGETALL", keys.TENANTS]]
        )
        values = answers[1]
        assert isinstance(values, dict), values
        tenants = [tenant for value in values.values() if (tenant := _decoded(value)) is not None]
        by_name = {tenant.name: tenant for tenant in tenants}
        return Reading(_mark(answers[0]), by_name, len(values) - len(tenants))

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
        if not await self._put(name, b"", msgspec.json.encode(tenant)):
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
        """Its keys stop working, its counts are forgotten, usage rows stay. RequestRefused 404; 409: has adapters."""
        for _ in range(TRIES):
            before, _tenant = await self._get(name)
            if adapters := await adapters_of(self._redis, name):
                message = f"Tenant {name!r} has adapters; remove them first: {', '.join(adapters)}."
                raise RequestRefused(message, code="invalid_value", status=409, param="name")
            if await self._put(name, before, b""):
                await self._redis.command("DEL", keys.quota(name), keys.quota_gateways(name))
                return
        raise _contended(name)

    async def found(self) -> None:
        """Gives a Redis without tenants an origin: from now on the service is closed, also without tenants."""
        await self._redis.command("EVAL", _FOUND, len(_KEYS), *_KEYS, secrets.token_hex(8))

    async def seed(self, origin: str, tenants: Iterable[Tenant], version: int = 0) -> bool:
        """Writes what was lost, unless another has done so; what is there by now is kept. True when it was written.
        version: the last that was known."""
        pairs = [part for tenant in tenants for part in (tenant.name, msgspec.json.encode(tenant))]
        return bool(await self._redis.command("EVAL", _SEED, len(_KEYS), *_KEYS, origin, version, *pairs))

    async def restore(self, mark: Mark, version: int, tenants: Mapping[str, Tenant]) -> bool:
        """Writes the state of `version` over the older one that `mark` names; what cannot be read stays. False when it
        was changed meanwhile."""
        older = await self.read()
        if older.mark != mark or mark.origin is None:
            return False
        gone = msgspec.json.encode({"gone": sorted(older.tenants.keys() - tenants.keys())})
        pairs = [part for tenant in tenants.values() for part in (tenant.name, msgspec.json.encode(tenant))]
        state = (mark.origin, mark.version, version + 1, gone, *pairs)
        return bool(await self._redis.command("EVAL", _RESTORE, len(_KEYS), *_KEYS, *state))

    async def _update(self, name: str, change: Callable[[Tenant], Tenant]) -> Tenant:
        for _ in range(TRIES):
            before, tenant = await self._get(name)
            after = change(tenant)
            if await self._put(name, before, msgspec.json.encode(after)):
                return after
        raise _contended(name)

    async def _get(self, name: str) -> tuple[bytes, Tenant]:
        value = await self._redis.command("HGET", keys.TENANTS, check_name(name))
        if not isinstance(value, bytes):
            raise no_tenant(name)
        tenant = _decoded(value)
        if tenant is None:
            raise RequestRefused(f"Tenant {name!r} was written by another version.", code="internal_error", status=500)
        return value, tenant

    async def _put(self, name: str, before: bytes, after: bytes) -> bool:
        """Compare-and-set; b"": absent. A change whose answer was lost and that ran twice has been made too."""
        parts = (*_KEYS, name, before, after, secrets.token_hex(8))
        if await self._redis.command("EVAL", _PUT, len(_KEYS), *parts):
            return True
        return bool(after) and await self._redis.command("HGET", keys.TENANTS, name) == after


async def read_weights(redis: Commands) -> dict[str, float]:
    """Each tenant's weight, for the fairness of the groups; a name that is missing has 1."""
    reading = await TenantStore(redis).read()
    return {name: tenant.limits.weight for name, tenant in reading.tenants.items()}


def no_tenant(name: str) -> RequestRefused:
    """There is none of that name."""
    return RequestRefused(f"There is no tenant {name!r}.", code="tenant_not_found", status=404, param="name")


def _contended(name: str) -> RequestRefused:
    message = f"Tenant {name!r} is being changed by others; try again."
    return RequestRefused(message, code="service_unavailable", status=503)


def _mark(values: object) -> Mark:
    assert isinstance(values, list), values
    origin, version = values
    return Mark(origin.decode() if isinstance(origin, bytes) else None, int(version or 0))


def _decoded(value: object) -> Tenant | None:
    assert isinstance(value, bytes), value
    try:
        return msgspec.json.decode(value, type=Tenant)
    except msgspec.DecodeError as error:
        log.error("a tenant cannot be read and is left out: %s", error)
        return None
