"""A real Redis for each file of tests here, empty and initialized for each test."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient
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
