"""An operator's drain: the order and the group that follows it, how long that stays, what gateways do, and nodes."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from tandem.cluster.fleet.fleet_view import FleetView, GroupRecord
from tandem.cluster.fleet.group_drains import DrainFollower, DrainOrder, order_drain
from tandem.cluster.fleet.prefix_resets import ResetFollower
from tandem.cluster.gateway.generation.draining_groups import DrainingGroups, Drains
from tandem.cluster.group.last_requests import DRAIN_PERIOD_S, SEEN_S, OtherGroups, drained, others_serve
from tandem.cluster.ray_private.node_ends import RayNode
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.workers.messages.errors import RequestRefused


def record(group: str, state: Any = "serving", host: str = "n1", **more: Any) -> GroupRecord:
    return GroupRecord(group=group, life=1, model="m", state=state, host=host, pid=1, **more)


class OneHash:
    """Redis with one hash; `away`: it does not answer. loses: is set once it waits for the cancellation that it loses,
    as a call of the library may that has its result."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.away = False
        self.loses: asyncio.Event | None = None

    async def command(self, *parts: Any) -> Any:
        if self.away:
            raise RedisUnavailable("away")
        assert parts[0] == "HGET"
        if self.loses is not None:
            self.loses.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return self.values.get(parts[2])

    async def pipeline(self, commands: list[Any]) -> list[Any]:
        for name, _, *rest in commands:
            if name == "HSETNX":
                self.values.setdefault(rest[0], rest[1])
        return [1] * len(commands)


class Looks(Announcements):
    """Lets a follower look again when the test says so."""

    def __init__(self) -> None:
        self.looks = asyncio.Semaphore(0)

    async def wait(self, key: str, period_s: float) -> None:
        await self.looks.acquire()


async def test_a_group_follows_its_own_order_once() -> None:
    redis, looks, obeyed = OneHash(), Looks(), list[DrainOrder]()

    async def drain(order: DrainOrder) -> None:
        obeyed.append(order)

    following = asyncio.create_task(DrainFollower(redis, "s", "g1", drain, looks).run())  # type: ignore[arg-type]
    await order_drain(redis, "s", "g2", DrainOrder(timeout_s=1.0))  # type: ignore[arg-type]
    redis.away = True
    looks.looks.release()
    await asyncio.sleep(0)
    redis.away, redis.values["g1"] = False, b"\xff"
    looks.looks.release()
    await asyncio.sleep(0)
    assert not obeyed, "another group's order, an outage, and what cannot be read"
    del redis.values["g1"]
    await order_drain(redis, "s", "g1", DrainOrder(timeout_s=5.0))  # type: ignore[arg-type]
    await order_drain(redis, "s", "g1", DrainOrder(timeout_s=9.0))  # type: ignore[arg-type]
    looks.looks.release()
    await asyncio.wait_for(following, 5)
    assert obeyed == [DrainOrder(timeout_s=5.0)], "the first order stands"


async def test_a_group_follows_its_order_whatever_went_wrong_before(caplog: pytest.LogCaptureFixture) -> None:
    redis, looks, tries = OneHash(), Looks(), list[DrainOrder]()

    async def drain(order: DrainOrder) -> None:
        tries.append(order)
        if len(tries) == 1:
            raise ValueError("no such thing")

    await order_drain(redis, "s", "g1", DrainOrder(timeout_s=5.0))  # type: ignore[arg-type]
    following = asyncio.create_task(DrainFollower(redis, "s", "g1", drain, looks).run())  # type: ignore[arg-type]
    looks.looks.release()
    await asyncio.wait_for(following, 5)
    assert len(tries) == 2
    assert "an order to drain was not followed" in caplog.text and "no such thing" in caplog.text


async def test_so_it_does_with_orders_to_forget_its_prefix_cache() -> None:
    class OneNumber:
        async def command(self, *parts: Any) -> Any:
            return b"7"

    tries, looks, is_done = list[str](), Looks(), asyncio.Event()

    async def forget() -> None:
        tries.append("now")
        if len(tries) == 1:
            raise ValueError("not now")

    follower = ResetFollower(OneNumber(), "s", forget, is_done.set, looks)  # type: ignore[arg-type]
    following = asyncio.create_task(follower.run())
    looks.looks.release()
    await asyncio.wait_for(is_done.wait(), 5)
    following.cancel()
    assert follower.done == 7 and len(tries) == 2


async def test_a_follower_ends_when_the_redis_library_loses_its_cancellation() -> None:
    redis, obeyed = OneHash(), list[DrainOrder]()
    redis.loses = asyncio.Event()

    async def drain(order: DrainOrder) -> None:
        obeyed.append(order)

    await order_drain(redis, "s", "g1", DrainOrder(timeout_s=5.0))  # type: ignore[arg-type]
    following = asyncio.create_task(DrainFollower(redis, "s", "g1", drain, Looks()).run())  # type: ignore[arg-type]
    await redis.loses.wait()
    following.cancel()
    await asyncio.wait_for(following, 5)
    assert not obeyed


async def over(timeout_s: float, requests: list[int], others: list[bool]) -> tuple[str, float]:
    """The reason for the end, and when it came: `requests` and `others` by look, the last ones from then on."""
    waited = [0.0]

    def at(values: list[Any]) -> Any:
        return values[min(int(waited[0] / DRAIN_PERIOD_S), len(values) - 1)]

    async def pause(seconds: float) -> None:
        waited[0] += seconds

    async def has_others() -> bool:
        return bool(at(others))

    return await drained(timeout_s, lambda: int(at(requests)), has_others, pause), waited[0]


async def test_a_drained_group_ends_with_its_requests_or_its_time_or_at_once_when_it_is_alone() -> None:
    assert await over(30.0, [0], [True]) == ("its requests have ended", SEEN_S)
    assert await over(30.0, [3] * 20 + [0], [True]) == ("its requests have ended", 20 * DRAIN_PERIOD_S)
    assert await over(4.0, [3], [True]) == ("its 3 requests are handed over after 4 s", 4.0)
    alone = "no other group serves, and its 3 requests wait for the next one"
    assert await over(30.0, [3], [False]) == (alone, 0.0)
    assert await over(30.0, [3], [True, True, False]) == (alone, 2 * DRAIN_PERIOD_S)
    assert await over(0.0, [3], [True]) == ("its 3 requests are handed over after 0 s", 0.0)


def test_others_are_those_that_serve_the_same_model() -> None:
    own = record("g1", kind="1:a")
    assert not others_serve(own, [own, record("g2", "loading"), record("g3", "draining"), record("g4", kind="1:b")])
    assert others_serve(own, [own, record("g2", kind="1:a")])


def test_gateways_send_nothing_to_a_group_that_drains_and_do_not_hurry_it() -> None:
    draining = DrainingGroups(lambda: None, 4.0, lambda: 100.0)
    draining.refresh([record("g1", "draining"), record("g2")])
    assert set(draining.groups) == {"g1"} and not draining.is_due("g1")
    draining.refresh([record("g2")])
    assert not draining.groups


class FleetInRedis:
    """Redis with the records of a fleet; `away`: it does not answer."""

    def __init__(self, *records: GroupRecord) -> None:
        self.records = records
        self.away = False

    async def command(self, *parts: Any) -> Any:
        if self.away:
            raise RedisUnavailable("away")
        values = {keys.group("s", one.group): msgspec.msgpack.encode(one) for one in self.records}
        return [({keys.SENTINEL: b"epoch"} | values).get(name) for name in parts[1:]]

    async def pipeline(self, commands: list[Any]) -> list[Any]:
        return [{one.group.encode() for one in self.records}, await self.command(*commands[1])]


async def drained_beside(redis: FleetInRedis, at: dict[float, Callable[[], object]]) -> tuple[str, float]:
    """The reason for the end of g1 with 3 requests and 10 s, and when it came. at: what happens meanwhile."""
    waited = [0.0]

    async def pause(seconds: float) -> None:
        waited[0] += seconds
        at.get(waited[0], lambda: None)()

    others = OtherGroups(FleetView(redis, "s", clock=lambda: waited[0]), lambda: record("g1", "draining"))
    return await drained(10.0, lambda: 3, others.may_serve, pause), waited[0]


@pytest.mark.parametrize("is_away_first", [False, True])
async def test_a_redis_that_does_not_answer_says_nothing_of_others(is_away_first: bool) -> None:
    redis = FleetInRedis(record("g1", "draining"), record("g2"))

    def is_away(value: bool) -> Callable[[], None]:
        return lambda: setattr(redis, "away", value)

    redis.away = is_away_first
    handed_over = ("its 3 requests are handed over after 10 s", 10.0)
    assert await drained_beside(redis, {1.0: is_away(True), 2.0: is_away(False)}) == handed_over
    redis.away = is_away_first
    assert await drained_beside(redis, {1.0: is_away(True)}) == handed_over, "it is away until the time is over"
    redis.away, redis.records = False, redis.records[:1]
    why, at_s = await drained_beside(redis, {})
    assert why.startswith("no other group serves") and at_s == 0.0


async def test_a_group_that_is_taken_down_stays_while_nobody_knows_whether_it_is_needed() -> None:
    own, redis = record("g1", "draining", kind="1:a"), FleetInRedis(record("g2", kind="1:a"))
    others = OtherGroups(FleetView(redis, "s"), lambda: own)
    redis.away = True
    assert await others.may_be_of_no_use()
    redis.away = False
    assert not await others.may_be_of_no_use()
    redis.records = (record("g2", kind="1:b"),)
    assert await others.may_be_of_no_use()


class ToldFleet:
    """A FleetView that notes orders."""

    def __init__(self, *records: GroupRecord) -> None:
        self.records = {one.group: one for one in records}
        self.orders: list[tuple[str, float]] = []
        self.away = False

    async def order_drain(self, group: str, timeout_s: float) -> None:
        if self.away:
            raise RedisUnavailable("away")
        self.orders.append((group, timeout_s))

    async def read_gateways(self) -> list[Any]:
        raise RedisUnavailable("away")


HEAD, FIRST, SECOND = (RayNode(f"{n}" * 56, f"10.0.0.{n}", f"host-{n}", n == 1) for n in (1, 2, 3))


class ToldRay:
    """Ray's nodes, and what it is told of them."""

    def __init__(self, refusal: str = "") -> None:
        self.told: list[tuple[str, float]] = []
        self.refusal = refusal

    def drain(self, node_id: str, why: str, timeout_s: float) -> str:
        self.told.append((node_id, timeout_s))
        return self.refusal

    def drains(self, fleet: ToldFleet) -> Drains:
        nodes = (HEAD, FIRST, SECOND, SECOND._replace(node_id="4" * 56, address="10.0.0.4"))
        return Drains(
            fleet,  # type: ignore[arg-type]
            30.0,
            lambda name: [node for node in nodes if node.is_called(name)],
            self.drain,
            lambda: {node_id for node_id, _ in self.told},
        )


async def test_a_group_is_drained_by_its_order() -> None:
    fleet = ToldFleet(record("g1", running=2, waiting=1), record("g2"), record("g3", "loading"))
    drains = ToldRay().drains(fleet)
    state = await drains.ask("g1", None)
    shown = [{"id": "g1", "state": "serving", "running": 2, "waiting": 1}]
    assert msgspec.to_builtins(state) == {
        "kind": "group", "id": "g1", "groups": shown, "other_groups": 1, "timeout_s": 30.0, "gateways": 0,
    }  # fmt: skip
    await drains.ask("g1", 5.0)
    assert fleet.orders == [("g1", 30.0), ("g1", 5.0)]
    for target, status, words in (("g3", 409, "has not loaded yet"), ("g9", 404, "no group and no node 'g9'")):
        with pytest.raises(RequestRefused, match=words) as refused:
            await drains.ask(target, None)
        assert refused.value.status == status
    fleet.away = True
    with pytest.raises(RequestRefused, match="Redis is away") as refused:
        await drains.ask("g1", None)
    assert refused.value.status == 503


async def test_a_node_is_told_to_ray_once_by_any_of_its_names() -> None:
    ray = ToldRay()
    near = record("g1", host=FIRST.node_id)
    far = record("g2", host=HEAD.node_id, nodes=[FIRST.node_id])
    drains = ray.drains(ToldFleet(near, far, record("g3", host=HEAD.node_id)))
    for name in (FIRST.address, FIRST.name, FIRST.node_id, FIRST.node_id[:8]):
        state = await drains.ask(name, 7.0)
        assert (state.kind, state.id, [one.id for one in state.groups]) == ("node", FIRST.node_id, ["g1", "g2"])
        assert state.other_groups == 1
    assert ray.told == [(FIRST.node_id, 7.0)]


@pytest.mark.parametrize(
    ("name", "refusal", "status", "words"),
    [
        (HEAD.address, "", 400, "is Ray's head"),
        (SECOND.name, "", 400, "2 nodes are called 'host-3'"),
        (FIRST.address, "it is needed", 400, "does not drain node 10.0.0.2: it is needed"),
        (FIRST.node_id[:7], "", 404, "no group and no node"),
    ],
)
async def test_nodes_that_cannot_be_drained(name: str, refusal: str, status: int, words: str) -> None:
    with pytest.raises(RequestRefused, match=words) as refused:
        await ToldRay(refusal).drains(ToldFleet()).ask(name, None)
    assert refused.value.status == status


async def test_a_ray_that_does_not_answer_is_a_503() -> None:
    def away(name: str) -> list[RayNode]:
        raise ConnectionError("no GCS")

    with pytest.raises(RequestRefused, match="no GCS") as refused:
        await Drains(ToldFleet(), 30.0, away).ask("10.0.0.2", None)  # type: ignore[arg-type]
    assert refused.value.status == 503
