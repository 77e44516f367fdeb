"""Tenants' weights for a group's fairness, read when the tenants change."""

from tandem.cluster.group.sharing import TenantWeights
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.tenants.store import TenantStore
from tests.support.private_redis import private_redis


async def test_weights_are_read_when_tenants_change_and_outlive_their_loss() -> None:
    with private_redis() as server:
        redis = BackgroundClient(server.url)
        weights, store = TenantWeights(), TenantStore(redis)
        assert await weights.changed(redis) == {}
        assert await weights.changed(redis) is None
        await store.add("acme", {"weight": 2.5})
        await store.add("beta", {})
        assert await weights.changed(redis) == {"acme": 2.5, "beta": 1.0}
        assert await weights.changed(redis) is None
        await store.change("beta", {"weight": 4})
        assert await weights.changed(redis) == {"acme": 2.5, "beta": 4.0}
        await redis.command("FLUSHALL")
        assert await weights.changed(redis) is None, "those who know the tenants write them again"
        await store.add("gamma", {"weight": 3})
        assert await weights.changed(redis) == {"gamma": 3.0}
        await redis.close()
