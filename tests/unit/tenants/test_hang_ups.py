"""Clients that hang up before the first token: tokens per minute pay for the prompts that a group had begun."""

import asyncio

import pytest

from tandem.cluster.tenants.tenant_admission import OverLimit
from tandem.workers.messages.request import GenerationRequest, SamplingParams
from tests.support.fake_engine import FakeEngine
from tests.support.fake_group import FakeFleet, FakeGroup, FakeHandle, serving
from tests.support.plain_generation import Client
from tests.unit.tenants.tenant_rig import Fleet

SECRET = "ab" * 32
PROMPT = 300


class PrefillingEngine(FakeEngine):
    """Gives each request its row, and no token."""

    def turn(self, timeout_s: float) -> bool:
        for request, _ in self.live.values():
            if (request.request_id, request.attempt) not in self.begun:
                self.begun.add((request.request_id, request.attempt))
                self.sink.begun(request, 0)
        return False


class QueueingEngine(FakeEngine):
    """Lets all wait."""

    def turn(self, timeout_s: float) -> bool:
        return False


@pytest.mark.parametrize(("engine", "admitted"), [(PrefillingEngine, 3), (QueueingEngine, 8)])
async def test_only_prompts_that_were_begun_use_up_the_minute(
    fleet: Fleet, engine: type[FakeEngine], admitted: int
) -> None:
    fleet.set(tokens_per_minute=1000)
    quota = fleet.gateway("a")
    group = FakeGroup(SECRET, "g:1", engine)
    await group.wait_opened()
    client = Client(FakeHandle([group]), FakeFleet(serving()), SECRET, "127.0.0.1", "tandem")
    let_in = 0
    for number in range(8):
        request = GenerationRequest(
            request_id=f"{engine.__name__}{number}",
            prompt_token_ids=[1] * PROMPT,
            sampling=SamplingParams(max_tokens=10),
            tenant="acme",
        )
        stream = await client.submit(request, tenancy=quota)
        async with asyncio.timeout(60):
            while request.request_id not in group.engine.live and stream.generation.error is None:
                await asyncio.sleep(0.002)
            while engine is PrefillingEngine and not stream.part.is_begun and stream.generation.error is None:
                await asyncio.sleep(0.002)
        assert stream.generation.error is None or isinstance(stream.generation.error, OverLimit)
        let_in += stream.generation.error is None
        await stream.aclose()
        assert await client.tasks.wait_idle(60)
    assert let_in == admitted
    assert [row.prompt_tokens for row in client.books.rows] == [PROMPT if engine is PrefillingEngine else 0] * admitted
    await client.close()
    group.close()
