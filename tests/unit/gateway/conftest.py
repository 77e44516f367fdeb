"""A gateway for tests that need no other one, and a real Redis, empty for each test."""

from collections.abc import AsyncIterator

import pytest

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.configs.schema import GatewaySettings
from tests.support.private_redis import ReusedRedis
from tests.unit.gateway.rig import Rig, gateway
from tests.unit.tenants.tenant_rig import patient


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A gateway that must still answer when the test is done."""
    async with gateway(settings=GatewaySettings(max_body_bytes=1_000_000)) as rig:
        yield rig
        for stream in (False, True):
            alive = await rig.chat(max_tokens=4, stream=stream)
            assert alive.status_code == 200
        assert not rig.backend.streams


@pytest.fixture
def server(reused_redis: ReusedRedis) -> RedisServer:
    return reused_redis.empty()


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[BackgroundClient]:
    client = patient(server)
    yield client
    await client.close()
