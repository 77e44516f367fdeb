"""RedisLease over a real Redis: one holder at a time, renewed, released, ended."""

import asyncio

from tandem.cluster.state.lease import RedisLease
from tandem.cluster.state.redis_client import BackgroundClient

TTL_MS = 60_000


def lease(redis: BackgroundClient, holder: str, ttl_ms: int = TTL_MS) -> RedisLease:
    return RedisLease(redis, "tandem:test:lease", holder, ttl_ms)


async def test_one_holds_it_until_it_is_released(redis: BackgroundClient) -> None:
    one, two = lease(redis, "one"), lease(redis, "two")
    assert await one.take() and not await two.take()
    await two.release()
    assert not await two.take(), "only its holder ends it"
    await one.release()
    assert await two.take() and not await one.take()


async def test_of_many_at_once_one_takes_it(redis: BackgroundClient) -> None:
    taken = await asyncio.gather(*(lease(redis, f"g{i}").take() for i in range(20)))
    assert sum(taken) == 1


async def test_taking_it_again_renews_it(redis: BackgroundClient) -> None:
    one = lease(redis, "one")
    await one.take()
    await redis.command("PEXPIRE", "tandem:test:lease", TTL_MS // 2)
    assert await one.take()
    assert TTL_MS // 2 < await redis.command("PTTL", "tandem:test:lease") <= TTL_MS


async def test_it_ends_by_itself(redis: BackgroundClient) -> None:
    assert await lease(redis, "dead", ttl_ms=1).take()
    async with asyncio.timeout(20):
        while await redis.command("EXISTS", "tandem:test:lease"):
            await asyncio.sleep(0.001)
    assert await lease(redis, "next").take()
