"""A client that leaves before its first token: gateway, ServeDispatch and a group whose engine gives none, together."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.support.fake_engine import FakeEngine
from tests.unit.cluster.group.door import Door
from tests.unit.gateway.rig import MODEL


class SilentEngine(FakeEngine):
    """Its requests wait in the queue, or are long prompts: they hold blocks and say nothing."""

    def turn(self, timeout_s: float) -> bool:
        return False


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    door = Door(SilentEngine)
    await door.group.wait_opened()
    yield door
    await door.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
async def test_leaving_before_the_first_token_frees_the_group_at_once(door: Door, stream: bool, prompts: int) -> None:
    asked = {"model": MODEL, "prompt": ["abc"] * prompts, "stream": stream, "max_tokens": 100}
    post = asyncio.create_task(door.client.post("/v1/completions", json=asked))
    async with asyncio.timeout(30):
        while len(door.group.engine.live if door.group.engine else ()) < prompts:
            await asyncio.sleep(0.002)
    post.cancel()
    left_s = time.monotonic()
    async with asyncio.timeout(door.context.times.drain_s / 2):
        while door.group.engine.live or door.backend._parts or not door.ledger.rows:
            await asyncio.sleep(0.002)
    print(f"free {1000 * (time.monotonic() - left_s):.0f} ms after the client had left")
    assert [row.terminal for row in door.ledger.rows] == ["abort"]
    assert await door.context.tasks.wait_idle(30)
