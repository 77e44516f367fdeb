"""A client that leaves before its first token: gateway, ServeDispatch and a group whose engine gives none, together."""

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tandem.cluster.gateway.generation.generations import GatewayTimes
from tandem.cluster.gateway.generation.serve_dispatch import ServeDispatch
from tandem.cluster.gateway.http.auth import StaticKeys
from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics
from tandem.cluster.gateway.routes import build_gateway_app
from tandem.cluster.gateway.services import Accounts
from tandem.configs.schema import GatewaySettings
from tests.support.fake_engine import FakeEngine
from tests.support.fake_group import FakeCaller, FakeFleet, FakeGroup, serving
from tests.unit.gateway.rig import MODEL, ListLedger, make_generations, make_text, make_tokenizer

SECRET = "cd" * 32


class SilentEngine(FakeEngine):
    """Its requests wait in the queue, or are long prompts: they hold blocks and say nothing."""

    def turn(self, timeout_s: float) -> bool:
        return False


class Door:
    """A gateway over one silent group."""

    def __init__(self) -> None:
        self.group = FakeGroup(SECRET, "g", SilentEngine)
        self.backend = ServeDispatch(FakeCaller([self.group]), FakeFleet(serving()), SECRET, "127.0.0.1", "tandem")
        self.ledger = ListLedger()
        settings, metrics = GatewaySettings(), GatewayMetrics(CollectorRegistry(), "tandem", MODEL)
        self.text = make_text(settings, metrics, make_tokenizer())
        accounts = Accounts(auth=StaticKeys(), ledger=self.ledger)
        times = GatewayTimes(drain_s=60.0)  # what it would take if the group were not told
        self.generations = make_generations(settings, self.backend, accounts, metrics, times=times)
        transport = httpx.ASGITransport(build_gateway_app(self.text, accounts, self.generations))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def close(self) -> None:
        await self.client.aclose()
        await self.backend.close()
        self.group.close()
        self.text.workers.close()


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    door = Door()
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
    async with asyncio.timeout(door.generations.times.drain_s / 2):
        while door.group.engine.live or door.backend._attempts or not door.ledger.rows:
            await asyncio.sleep(0.002)
    print(f"free {1000 * (time.monotonic() - left_s):.0f} ms after the client had left")
    assert [row.terminal for row in door.ledger.rows] == ["abort"]
    assert await door.generations.tasks.wait_idle(30)
