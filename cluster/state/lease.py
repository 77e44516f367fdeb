"""Lease: the right to do something that one process at a time does, as long as it renews it. It ends by itself."""

from tandem.cluster.state.redis_client import Commands

_TAKE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
"""Deletes first: a script that has written may write on in a full memory, and who makes room needs the lease then."""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class Lease:
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
