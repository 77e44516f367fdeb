"""ServeDispatch of a service that may have no group: what it lets through, how long it holds, what it says."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tandem.cluster.fleet.fleet_view import StartFailure
from tandem.cluster.gateway.generation.gateway_context import GatewayTimes
from tandem.cluster.gateway.generation.serve_dispatch import LEAST_HOLD_S, WAKING_S, WHILE_LOADING, ServeDispatch
from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.scaling.scaling_watch import ScalingWatch
from tandem.cluster.wire.version import without_version
from tandem.configs.autoscaling import ScalingGoals
from tandem.workers.messages.errors import RequestRefused
from tests.support.fake_group import FakeCall, FakeFleet, FakeGroup, serving
from tests.support.plain_generation import Client
from tests.unit.cluster.group.test_dispatch import SECRET, read_all, request, tokens_of, until


class LateHandle:
    """Serve's queue: a call waits there until a group is given."""

    def __init__(self) -> None:
        self.group: asyncio.Future[FakeGroup] = asyncio.get_running_loop().create_future()
        self.waiting = 0

    def options(self, **_: Any) -> "LateHandle":
        return self

    def remote(self, message: bytes, hint: RouteHint) -> FakeCall:
        return FakeCall(asyncio.get_running_loop().create_task(self._when_there(message)))

    async def _when_there(self, message: bytes) -> bytes:
        self.waiting += 1
        try:
            group = await asyncio.shield(self.group)
        finally:
            self.waiting -= 1
        return await group.generate(bytes(without_version(message)))


class Sleeper:
    """A gateway of a service without a group."""

    def __init__(self, **more: Any) -> None:
        self.handle = LateHandle()
        self.fleet = FakeFleet({})
        watch = ScalingWatch(ScalingGoals(low=0, high=1), lambda: self.client.held)
        self.client = Client(
            self.handle, self.fleet, SECRET, "127.0.0.1", "tandem", may_sleep=True, scaling=watch, **more
        )


@pytest.fixture
async def sleeper() -> AsyncIterator[Sleeper]:
    sleeper = Sleeper()
    yield sleeper
    await sleeper.client.close()


async def test_requests_are_held_until_there_is_a_group(sleeper: Sleeper) -> None:
    client = sleeper.client
    assert client.ready() and client.is_asleep
    reading = await client.submit(request("r", 20))
    await until(lambda: sleeper.handle.waiting == 1)
    load = client.load()
    assert (load["requests_held"], load["groups_wanted"]) == (1, 1)
    assert load["why"] == "1 request held, and no group runs"
    group = FakeGroup(SECRET, "g")
    await group.wait_opened()
    sleeper.fleet.records = serving()
    assert client.ready() and not client.is_asleep and client.held == 0
    sleeper.handle.group.set_result(group)
    assert tokens_of(await read_all(reading)) == list(range(100, 120))
    group.close()


async def test_a_held_request_whose_client_leaves_is_in_no_queue(sleeper: Sleeper) -> None:
    client = sleeper.client
    client.times = GatewayTimes(drain_s=0.05)
    await client.submit(request("r", 20))
    await until(lambda: sleeper.handle.waiting == 1)
    client.generations[0].close()
    await until(lambda: not sleeper.handle.waiting)
    await until(lambda: client.books.rows and not client._parts and not sleeper.handle.waiting)
    (row,) = client.books.rows
    assert client.held == 0 and (row.prompt_tokens, row.completion_tokens) == (0, 0)


async def test_a_gateway_knows_how_long_a_load_takes_without_having_seen_one() -> None:
    told, new = Sleeper(load_s=400.0), Sleeper()
    assert told.client.hold_s == 810.0
    waking_s = 2 * WAKING_S + 10.0
    assert new.client.hold_s == waking_s, "no group has ever loaded, and a node may have to be launched"
    (record,) = serving().values()
    new.fleet.records = {"g": msgspec.structs.replace(record, state="loading")}
    assert new.client.hold_s == WHILE_LOADING * waking_s and new.client.is_asleep
    new.fleet.records = {"g": msgspec.structs.replace(record, load_s=2.0)}
    assert new.client.hold_s == waking_s, "the next one may need a node too"
    new.fleet.start_failure = StartFailure(part="group g", message="no memory")
    assert new.client.hold_s == LEAST_HOLD_S, "nothing is to be waited for"
    for sleeper in (told, new):
        await sleeper.client.close()


async def test_one_that_must_not_sleep_holds_for_its_first_group() -> None:
    """Another gateway may have said that the service is ready."""
    fleet, handle = FakeFleet({}), LateHandle()
    client = Client(handle, fleet, SECRET, "127.0.0.1", "tandem")
    assert not client.ready() and not client.is_asleep and "groups_wanted" not in client.load()
    assert client.hold_s == LEAST_HOLD_S
    reading = await client.submit(request("r", 4))
    await until(lambda: handle.waiting == 1)
    assert client.held == 1
    group = FakeGroup(SECRET, "g")
    await group.wait_opened()
    handle.group.set_result(group)
    assert tokens_of(await read_all(reading)) == list(range(100, 104)), "before the gateway has read a record of it"
    group.close()
    await client.close()


async def test_who_waits_for_a_first_group_that_never_comes_hears_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServeDispatch, "hold_s", 0.05)
    client = Client(LateHandle(), FakeFleet({}), SECRET, "127.0.0.1", "tandem")
    reading = await client.submit(request("r", 20))
    with pytest.raises(RequestRefused, match="no worker group became ready; `tandem status` tells the operator why"):
        await read_all(reading)
    await client.close()


async def test_a_gateway_that_ends_is_not_asleep(sleeper: Sleeper) -> None:
    sleeper.client.refuse_all(RequestRefused("ends", code="service_unavailable", status=503))
    assert not sleeper.client.ready() and not sleeper.client.is_asleep
