"""Tenants' weights for the fairness of one group, read from Redis when the tenants have changed.

Called by cluster/group_sharing.py when a change is announced, and each second or two. Names without a tenant weigh 1.
"""

from collections.abc import Mapping

from cluster.coordination.client import Commands
from cluster.tenants.store import Mark, TenantStore, read_weights


class TenantWeights:
    """Remembers which state of the tenants was read last."""

    def __init__(self) -> None:
        self._seen: Mark | None = None

    async def changed(self, redis: Commands) -> Mapping[str, float] | None:
        """The weights, when they may be others than at the last call. RedisAway."""
        mark = await TenantStore(redis).mark()
        if mark == self._seen or (mark.origin is None and self._seen is not None):
            return None  # nothing new, or lost: those who know the tenants will write them again
        weights = await read_weights(redis)
        self._seen = mark
        return weights
