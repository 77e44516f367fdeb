"""A private Redis of each test, and a client of it."""

from collections.abc import AsyncIterator, Iterator

import pytest

from cluster.coordination.client import BackgroundClient
from cluster.coordination.redis_server import RedisServer
from tests.support.private_redis import private_redis


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with private_redis() as running:
        yield running


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[BackgroundClient]:
    client = BackgroundClient(server.url, timeout_s=5.0, retries=1)
    yield client
    await client.close()
