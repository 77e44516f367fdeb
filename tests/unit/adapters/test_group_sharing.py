"""What a coordinator shares reaches its engine on the engine's own thread; the engine is a fake, the thread is real."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec
import pytest

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.adapters.group_adapters import GroupAdapters
from tandem.cluster.fleet.charges import ChargeExchange, Charges
from tandem.cluster.fleet.group_reports import AdapterReport
from tandem.cluster.group.sharing import Sharing
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient, Commands, RedisUnavailable
from tandem.cluster.tenants.store import TenantStore
from tandem.configs.schema import LoraSettings
from tandem.workers.messages.channel import new_secret
from tandem.workers.messages.request import AdapterRef, GenerationRequest, SamplingParams
from tests.support.fake_group import FakeGroup
from tests.support.subscribed import subscribed

PIRATE = AdapterEntry(name="pirate", digest="a" * 64, source="/a", pinned=True)
SHOUT = AdapterEntry(name="shout", digest="b" * 64, source="/b")


@pytest.fixture
async def group() -> AsyncIterator[FakeGroup]:
    group = FakeGroup(new_secret(), "g1:1")
    await group.wait_opened()
    yield group
    group.thread.stop()
    await asyncio.to_thread(group.thread.join, 5)


def sharing(redis: Commands, group: FakeGroup, **more: object) -> Sharing:
    lora = LoraSettings(enable_lora=True, max_loras=4)
    return Sharing(redis, group.thread, service="s", group="g1", base="demo", lora=lora, **more)  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def run_one(group: FakeGroup, tenant: str, tokens: int) -> None:
    params = SamplingParams(max_tokens=tokens)
    request = GenerationRequest(request_id=tenant, prompt_token_ids=[1], sampling=params, tenant=tenant)
    await group.generate(msgspec.msgpack.encode(request))


async def test_charges_go_out_and_come_in(redis: BackgroundClient, group: FakeGroup) -> None:
    await redis.command("SADD", keys.groups("s"), "g1", "g2")
    mine = sharing(redis, group)
    await mine.update()
    await run_one(group, "acme", 3)
    others: list[Charges] = [{}, {"beta": 7.5}]
    received: list[Charges] = []

    async def take() -> Charges:
        return others.pop(0) if others else {}

    other = ChargeExchange(redis, "s", "g2", take, received.append)
    for exchange in (other, mine, other, mine, other):
        await exchange.update()
    assert received == [{"acme": 3.0}, {}]
    await until(lambda: group.engine.remote_charges == {"beta": 7.5})


async def test_an_engine_without_work_is_not_asked(redis: BackgroundClient, group: FakeGroup) -> None:
    mine = sharing(redis, group)
    group.engine.charged_here = {"acme": 1.0}
    await mine.update()
    assert group.engine.charged_here == {"acme": 1.0}


async def test_weights_are_passed_on_when_they_change(redis: BackgroundClient, group: FakeGroup) -> None:
    mine, store, passed = sharing(redis, group), TenantStore(redis), list[Mapping[str, float]]()

    async def look() -> None:
        group.engine.weights = None
        await mine.refresh_weights()
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        group.thread.call(lambda engine: loop.call_soon_threadsafe(done.set))
        await asyncio.wait_for(done.wait(), 20)
        passed.append(group.engine.weights)

    await look()
    await look()
    await store.add("acme", {"weight": 2.5})
    await store.add("beta", {})
    await look()
    await look()
    await store.change("beta", {"weight": 4})
    await look()
    await redis.command("FLUSHALL")
    await look()  # those who know the tenants write them again
    await store.add("gamma", {"weight": 3})
    await look()
    assert passed == [{}, None, {"acme": 2.5, "beta": 1.0}, None, {"acme": 2.5, "beta": 4.0}, None, {"gamma": 3.0}]


async def test_pins_follow_the_list(redis: BackgroundClient, group: FakeGroup) -> None:
    adapters = AdapterList(redis, "demo")
    await adapters.replace(None, PIRATE, "pirate")
    await adapters.replace(None, SHOUT, "shout")
    mine = sharing(redis, group)
    assert mine.adapters is not None
    await mine.adapters.refresh()
    await until(lambda: group.engine.pinned == {PIRATE.ref})
    newer = msgspec.structs.replace(PIRATE, digest="c" * 64)
    await adapters.replace(PIRATE, newer, "pirate")
    await mine.adapters.refresh()
    await until(lambda: group.engine.pinned == {newer.ref})
    await adapters.replace(newer, None, "pirate")
    await mine.adapters.refresh()
    await until(lambda: group.engine.pinned == set())


async def test_started_it_goes_on_through_an_outage_until_stop(redis: BackgroundClient, group: FakeGroup) -> None:
    class Shaky:
        calls = 0

        async def command(self, *parts: object) -> object:
            return await self.pipeline([])

        async def pipeline(self, commands: object) -> list[object]:
            Shaky.calls += 1
            raise RedisUnavailable("gone")

    before = asyncio.all_tasks()
    mine = sharing(Shaky(), group, period_s=0.01)
    mine.start()
    started = asyncio.all_tasks() - before
    await until(lambda: Shaky.calls >= 9)
    assert len(started) == 4 and not any(task.done() for task in started)
    mine.stop()
    await asyncio.wait(started, timeout=30)
    assert all(task.cancelled() for task in started)


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "polled"])
async def test_pins_and_weights_follow_changes(
    server: RedisServer, redis: BackgroundClient, group: FakeGroup, is_announced: bool
) -> None:
    """By announcements with a period that nobody waits for; by the poll, when nobody announces."""
    adapters, store = AdapterList(redis, "demo"), TenantStore(redis)
    base = (keys.TENANTS, keys.adapters("demo"))
    async with subscribed(server.url, *base) as changes:
        more = {"changes": changes, "period_s": 60.0} if is_announced else {"period_s": 0.01}
        mine = sharing(redis, group, **more)
        mine.start()
        await store.add("acme", {"weight": 2})
        await until(lambda: group.engine.weights == {"acme": 2.0})
        await adapters.replace(None, PIRATE, "pirate")
        await until(lambda: group.engine.pinned == {PIRATE.ref})
        await store.change("acme", {"weight": 3})
        await until(lambda: group.engine.weights == {"acme": 3.0})
        await adapters.replace(PIRATE, None, "pirate")
        await until(lambda: group.engine.pinned == set())
        mine.stop()


async def test_residency_is_reported_by_the_engines_thread(group: FakeGroup) -> None:
    group.thread.call(lambda engine: engine.set_pinned_adapters({PIRATE.ref}))
    await until(lambda: group.last_residency == {PIRATE.digest: "device"})


def test_a_report_says_what_is_held_and_what_requests_use() -> None:
    adapters = GroupAdapters(Nothing(), "demo", 4, lambda pinned: None)
    assert adapters.report() == AdapterReport(max_loras=4)
    adapters.residency = {PIRATE.digest: "device", SHOUT.digest: "host"}
    late = AdapterRef(name="late", digest="c" * 64, source="/c")
    for adapter in (PIRATE.ref, PIRATE.ref, late, None):
        adapters.enter(adapter)
    assert adapters.report() == AdapterReport(
        on_device=[PIRATE.digest[:16]], on_host=[SHOUT.digest[:16]], running=["pirate"], waiting=["late"], max_loras=4
    )
    for adapter in (PIRATE.ref, late, None):
        adapters.leave(adapter)
    assert (adapters.report().running, adapters.report().waiting) == (["pirate"], [])
    adapters.leave(PIRATE.ref)
    assert adapters.report().running == []


class Nothing:
    """Commands that are never asked."""

    async def command(self, *parts: object) -> object:
        raise AssertionError(parts)

    async def pipeline(self, commands: object) -> list[object]:
        raise AssertionError(commands)
