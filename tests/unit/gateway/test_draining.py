"""A gateway on its way out: what is in flight goes on, new work is refused, what is too slow gets its last words."""

import asyncio

import pytest

from tandem.cluster.gateway.http.draining import Draining
from tests.support.fake_backend import FakeBackend
from tests.unit.gateway.rig import DEADLINE_S, EOS, error_of, events, gateway


async def test_new_work_is_refused_and_what_is_in_hand_ends_by_itself() -> None:
    async with gateway(FakeBackend(eos_token_ids=frozenset({EOS}), manual=True)) as rig:
        running = asyncio.create_task(rig.complete(stream=True, max_tokens=3, ignore_eos=True))
        await asyncio.wait_for(rig.backend.submitted.wait(), DEADLINE_S)
        rig.context.draining.begin()
        late = await rig.complete()
        assert late.status_code == 503 and error_of(late)["code"] == "service_unavailable"
        assert 1 <= int(late.headers["retry-after"]) <= 60
        assert late.headers["connection"] == "close"
        assert (await rig.client.get("/readyz")).status_code == 503
        assert (await rig.client.get("/livez")).status_code == 200
        assert (await rig.client.get("/metrics")).status_code == 200
        assert not await rig.context.draining.wait_idle(0.0)
        rig.backend.step(3)
        answer = await asyncio.wait_for(running, DEADLINE_S)
        assert events(answer.text)[-1] == "[DONE]"
        assert await rig.context.draining.wait_idle(DEADLINE_S)


async def test_refused_requests_leave_the_count() -> None:
    async with gateway() as rig:
        await rig.client.post("/v1/completions", content=b"{")
        await rig.client.get("/nowhere")
        assert rig.context.draining.in_flight == 0


@pytest.mark.parametrize("count", [1, 3])
async def test_idle_is_seen_when_the_last_one_leaves(count: int) -> None:
    draining = Draining()
    for _ in range(count):
        draining.enter()
    waiting = asyncio.create_task(draining.wait_idle(DEADLINE_S))
    for _ in range(count):
        await asyncio.sleep(0)
        assert not waiting.done()
        draining.leave()
    assert await waiting
