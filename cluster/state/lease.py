"""Lease: the right to do something that one process at a time does, as long as it renews it. It ends by itself."""

from tandem.cluster.state.lua import load_lua
from tandem.cluster.state.redis_client import Commands

_TAKE, _RELEASE = load_lua(__file__, "lease_take.lua"), load_lua(__file__, "lease_release.lua")


class LeaseLost(Exception):
    """Another holds the lease, or what was to be done under it is done."""


class RedisLease:
    """One process's part in the lease at `key`. Who was frozen may believe that it holds a lease which has ended: work
    under it must be safe when two do it. Every method raises RedisUnavailable."""

    def __init__(self, redis: Commands, key: str, holder: str, ttl_ms: int) -> None:
        self._redis = redis
        self._key = key
        self._holder = holder
        self._ttl_ms = ttl_ms

    async def take(self) -> bool:
        """Takes the lease, or renews it, for ttl_ms from now. False: another holds it."""
        return await self._redis.command("EVAL", _TAKE, 1, self._key, self._holder, self._ttl_ms) == 1

    async def release(self) -> None:
        """Ends the lease, if this process has it."""
        await self._redis.command("EVAL", _RELEASE, 1, self._key, self._holder)
