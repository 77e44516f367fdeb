"""A private Redis of each test, and a client of it."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state.redis_client import BackgroundClient
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
