"""One private Redis server per test."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state.redis_client import BackgroundClient
from tests.support.private_redis import private_redis
from tests.unit.tenants.tenant_rig import Fleet, patient


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with private_redis() as running:
        yield running


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
