"""A real Redis for each file of tests here, empty and initialized for each test."""

from collections.abc import AsyncIterator, Iterator

import pytest

from cluster.coordination import keys
from cluster.coordination.client import BackgroundClient
from cluster.coordination.redis_server import RedisServer
from tests.support.private_redis import private_redis


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with private_redis() as server:
        yield server


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[BackgroundClient]:
    client = BackgroundClient(server.url)
    await client.command("FLUSHALL")
    await client.command("SET", keys.SENTINEL, "1")
    yield client
    await client.close()
