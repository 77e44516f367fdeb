"""A private Redis for each test, empty, and a client of it."""

from collections.abc import AsyncIterator

import pytest

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state.redis_client import BackgroundClient
from tests.support.private_redis import ReusedRedis


@pytest.fixture
def server(reused_redis: ReusedRedis) -> RedisServer:
    return reused_redis.empty()


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[BackgroundClient]:
    client = BackgroundClient(server.url, timeout_s=5.0, retries=1)
    yield client
    await client.close()
