"""A private Redis server for each test, empty."""

from collections.abc import AsyncIterator

import pytest

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state.redis_client import BackgroundClient
from tests.support.private_redis import ReusedRedis
from tests.unit.tenants.tenant_rig import Fleet, patient


@pytest.fixture
def server(reused_redis: ReusedRedis) -> RedisServer:
    return reused_redis.empty()


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[BackgroundClient]:
    client = patient(server)
    yield client
    await client.close()


@pytest.fixture
async def fleet(server: RedisServer) -> AsyncIterator[Fleet]:
    fleet = Fleet(server)
    yield fleet
    await fleet.close()
