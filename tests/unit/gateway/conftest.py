"""A gateway for tests that need no other one."""

from collections.abc import AsyncIterator

import pytest

from tandem.configs.schema import GatewaySettings
from tests.unit.gateway.rig import Rig, gateway


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A gateway that must still answer when the test is done."""
    async with gateway(settings=GatewaySettings(max_body_bytes=1_000_000)) as rig:
        yield rig
        for stream in (False, True):
            alive = await rig.chat(max_tokens=4, stream=stream)
            assert alive.status_code == 200
        assert not rig.backend.streams
