"""GroupClient and EngineThread against each other over real sockets, with fake engines: every way a request can end."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from cluster.group_client import GroupClient
from tests.support.fake_engine import FakeEngine
from tests.support.fake_group import FakeCaller, FakeFleet, FakeGroup, serving
from workers.errors import GroupLost, RequestRefused
from workers.messages import Abort, GenerationRequest, SamplingParams, TokenDelta

SECRET = "ab" * 32


class SlowEngine(FakeEngine):
    """One token per millisecond or so, so that a test can act in between."""

    def step(self) -> bool:
        import time

        time.sleep(0.002)
        return super().step()


class Service:
    """Two groups and a gateway's client."""

    def __init__(self, engine: type[FakeEngine] = FakeEngine) -> None:
        self.groups = [FakeGroup(SECRET, f"g{i}", engine) for i in range(2)]
        self.caller = FakeCaller(self.groups)
        self.fleet = FakeFleet(serving())
        self.client = GroupClient(self.caller, self.fleet, SECRET, "127.0.0.1", "tandem")

    async def close(self) -> None:
        await self.client.close()
        for group in self.groups:
            group.close()


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    for group in service.groups:
        await group.wait_opened()
    yield service
    await service.close()


@pytest.fixture
async def slow_service() -> AsyncIterator[Service]:
    service = Service(SlowEngine)
    for group in service.groups:
        await group.wait_opened()
    yield service
    await service.close()


def request(request_id: str, max_tokens: int = 5, prompt: list[int] | None = None) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=prompt or [100], sampling=SamplingParams(max_tokens=max_tokens)
    )


async def read_all(stream: AsyncIterator[list[TokenDelta]]) -> list[TokenDelta]:
    async with asyncio.timeout(10):
        return [delta async for deltas in stream for delta in deltas]


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    assert [d.first_position for d in deltas if d.token_ids] == list(range(sum(len(d.token_ids) for d in deltas)))
    return [token for delta in deltas for token in delta.token_ids]


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def test_tokens_come_in_order_with_one_end_and_the_bill(service: Service) -> None:
    deltas = await read_all(await service.client.submit(request("r", 50)))
    assert tokens_of(deltas) == list(range(100, 150))
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
    assert deltas[-1].usage is not None and deltas[-1].usage.completion_tokens == 50
    await until(lambda: not service.client._attempts)


async def test_many_at_once_do_not_mix(service: Service) -> None:
    streams = [await service.client.submit(request(f"r{i}", 1 + i % 40, [1000 * i])) for i in range(200)]
    answers = await asyncio.gather(*(read_all(s) for s in streams))
    for i, deltas in enumerate(answers):
        assert tokens_of(deltas) == [1000 * i + k for k in range(1 + i % 40)]
    assert service.groups[0].requests and service.groups[1].requests


async def test_a_refusal_is_raised_with_its_words(service: Service) -> None:
    stream = await service.client.submit(request("r", prompt=[429]))
    with pytest.raises(RequestRefused, match="queue is full") as caught:
        await read_all(stream)
    assert (caught.value.status, caught.value.code) == (429, "slow_down")


async def test_without_a_group_nothing_is_dispatched(service: Service) -> None:
    service.fleet.records = {}
    assert not service.client.ready()
    with pytest.raises(RequestRefused) as caught:
        await service.client.submit(request("r"))
    assert caught.value.status == 503
    assert service.caller.made == 0


async def test_closing_the_stream_aborts_the_request(slow_service: Service) -> None:
    stream = await slow_service.client.submit(request("r", 10_000))
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    await until(lambda: not slow_service.groups[0].engine.live)
    await until(lambda: not slow_service.client._attempts)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_closing_before_the_first_token_cancels_the_call(slow_service: Service) -> None:
    stream = await slow_service.client.submit(request("r", 10_000))
    await stream.aclose()
    await until(lambda: not slow_service.client._attempts)
    await until(lambda: not slow_service.groups[0].calls)
    await until(lambda: not slow_service.groups[0].engine.live)


async def test_an_abort_with_kept_positions_ends_with_the_bill(slow_service: Service) -> None:
    stream = await slow_service.client.submit(request("r", 10_000))
    got: list[TokenDelta] = []
    async with asyncio.timeout(10):
        async for deltas in stream:
            got += deltas
            if sum(len(d.token_ids) for d in got) == 3:
                await slow_service.client.abort(Abort(request_id="r", epoch=0, keep_positions=2))
    assert got[-1].usage is not None and got[-1].usage.completion_tokens == 2
    assert got[-1].finish_reason is not None


async def test_an_abort_of_an_unknown_request_is_ignored(service: Service) -> None:
    await service.client.abort(Abort(request_id="nobody", epoch=0))


async def test_a_group_that_dies_hands_over_without_gap_or_duplicate(slow_service: Service) -> None:
    stream = await slow_service.client.submit(request("r", 200))
    got = await anext(stream)
    while len(got) < 20:
        got += await anext(stream)
    slow_service.groups[0].die()
    got += await read_all(stream)
    assert tokens_of(got) == list(range(100, 300))
    (moved,) = slow_service.groups[1].requests
    assert moved.epoch == 1
    assert 20 <= len(moved.resume_token_ids[0]) < 200
    assert sum(d.finish_reason is not None for d in got) == 1


async def test_a_request_that_breaks_two_groups_is_poisoned(service: Service) -> None:
    poisoned = await service.client.submit(request("bad", prompt=[666]))  # breaks the first group, then the second
    with pytest.raises(RequestRefused, match="2 groups") as caught:
        await read_all(poisoned)
    assert (caught.value.status, caught.value.code) == (500, "request_poisoned")
    await until(lambda: all(g.failures for g in service.groups))
    assert [len(g.failures) for g in service.groups] == [1, 1]
    assert all(isinstance(g.failures[0][0], GroupLost) for g in service.groups)


async def test_the_same_id_twice_is_refused_and_the_first_goes_on(slow_service: Service) -> None:
    stream = await slow_service.client.submit(request("r", 20))
    with pytest.raises(RequestRefused):
        await slow_service.client.submit(request("r", 20))
    assert len(tokens_of(await read_all(stream))) == 20


async def test_closing_the_client_ends_open_streams(slow_service: Service) -> None:
    stream = await slow_service.client.submit(request("r", 10_000))
    await anext(stream)
    reading = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0)
    await slow_service.client.close()
    with pytest.raises(GroupLost):
        await reading


async def test_an_idle_thread_uses_no_cpu(service: Service) -> None:
    import time

    thread = service.groups[0].thread
    await read_all(await service.client.submit(request("r")))
    clock = time.pthread_getcpuclockid(thread.ident)
    before_s = time.clock_gettime(clock)
    await asyncio.sleep(0.5)
    assert time.clock_gettime(clock) - before_s < 0.005
