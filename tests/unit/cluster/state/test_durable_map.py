"""DurableMap and its copies over a real Redis: both layouts of the epoch, guards, losses, two who write back."""

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import durable_map, keys
from tandem.cluster.state.durable_map import DurableMap
from tandem.cluster.state.epoch import Epoch
from tandem.cluster.state.map_copy import MapCopy
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable

OWN = keys.MapKeys("tandem:test:own", "tandem:test:own:id", "tandem:test:own:counter")
SHARED = keys.MapKeys("tandem:test:shared", keys.SENTINEL, owns_id=False)
Defect = Callable[[pytest.MonkeyPatch], None]


class Thing(msgspec.Struct, frozen=True):
    size: int


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[BackgroundClient]:
    client = BackgroundClient(server.url)
    await client.command("FLUSHALL")
    await client.command("SET", keys.SENTINEL, "life-1")
    yield client
    await client.close()


@pytest.fixture(params=[OWN, SHARED], ids=["own id", "shared id"])
def things(request: pytest.FixtureRequest, redis: BackgroundClient) -> DurableMap[Thing]:
    return DurableMap(redis, request.param, Thing, msgspec.json, "things")


async def put(things: DurableMap[Thing], name: str, size: int | None) -> int | None:
    """Compare-and-set from whatever is there."""
    held = await things.get(name)
    after = b"" if size is None else things.encode(Thing(size))
    return await things.compare_and_set(name, held.raw if held is not None else b"", after)


async def sizes(things: DurableMap[Thing]) -> dict[str, int]:
    return {name: thing.size for name, thing in (await things.read()).values.items()}


async def lose(things: DurableMap[Thing], life: str | None = "life-2") -> None:
    """life: what the owner of a shared id writes afterwards."""
    await things.redis.command("FLUSHALL")
    if life is not None:
        await things.redis.command("SET", keys.SENTINEL, life)


async def copy_of(things: DurableMap[Thing]) -> MapCopy[Thing]:
    copy = MapCopy(things)
    await copy.refresh()
    return copy


async def test_a_change_raises_the_counter_and_is_found_by_its_epoch(things: DurableMap[Thing]) -> None:
    assert (await things.epoch()).counter == 0
    seen = [await put(things, "a", 1)]
    first = await things.epoch()
    assert first.id is not None
    seen += [await put(things, "b", 2), await put(things, "a", None)]
    assert None not in seen and seen == sorted(set(seen))  # type: ignore[type-var]
    assert seen[0] == first.counter and await things.epoch() == Epoch(first.id, seen[2])
    assert await sizes(things) == {"b": 2}
    assert await things.get("a") is None


async def test_of_two_writers_one_wins(things: DurableMap[Thing]) -> None:
    one, other = things.encode(Thing(1)), things.encode(Thing(2))
    first = await things.compare_and_set("a", b"", one)
    assert first is not None
    assert await things.compare_and_set("a", b"", other) is None
    again = await things.compare_and_set("a", b"", one)
    assert again == first, "a repeated call: the answer was lost, the change was not"
    assert await things.compare_and_set("a", one, other) is not None
    assert await things.compare_and_set("a", one, b"") is None
    assert await sizes(things) == {"a": 2}


async def test_a_guard_is_about_the_whole_map(things: DurableMap[Thing]) -> None:
    value = things.encode(Thing(1))
    first = await things.compare_and_set("a", b"", value, guard=0)
    assert first is not None
    assert await things.compare_and_set("b", b"", value, guard=0) is None
    assert await things.compare_and_set("b", b"", value, guard=first) is not None
    assert await sizes(things) == {"a": 1, "b": 1}


async def test_a_check_holds_until_the_change_is_made(things: DurableMap[Thing]) -> None:
    """Two that each may be the last of three: the second is checked again on a fresh copy."""
    one, two = await copy_of(things), await copy_of(things)

    def at_most_one(copy: MapCopy[Thing]) -> None:
        if copy.values:
            raise ValueError("there is one")

    assert await one.replace(None, Thing(1), "a", lambda: at_most_one(one))
    assert not await two.replace(None, Thing(1), "b", lambda: at_most_one(two))
    with pytest.raises(ValueError, match="there is one"):
        await two.replace(None, Thing(1), "b", lambda: at_most_one(two))
    assert await sizes(things) == {"a": 1}


async def test_what_another_version_wrote_is_counted_and_left_alone(things: DurableMap[Thing]) -> None:
    await put(things, "a", 1)
    await things.redis.command("HSET", things.place.entries, "odd", b"{}")
    reading = await things.read()
    assert set(reading.values) == {"a"} and reading.unreadable == 1
    with pytest.raises(ValueError, match="another version"):
        await things.get("odd")
    before = await things.epoch()
    assert await things.restore(before, 10, {}) is not None
    assert await sizes(things) == {} and (await things.read()).unreadable == 1


async def test_fields_of_another_version_come_back_as_they_were(things: DurableMap[Thing]) -> None:
    raw = b'{"size":1,"colour":"red"}'
    await things.compare_and_set("a", b"", raw)
    copy = await copy_of(things)
    await lose(things)
    await copy.refresh()
    assert await things.redis.command("HGET", things.place.entries, "a") == raw


async def test_a_lost_map_is_written_back_once_and_what_is_there_stays(things: DurableMap[Thing]) -> None:
    await put(things, "a", 1)
    await put(things, "b", 1)
    one, two = await copy_of(things), await copy_of(things)
    await lose(things)
    await put(things, "b", 2)
    await one.refresh()
    assert await sizes(things) == {"a": 1, "b": 2}
    await put(things, "a", None)
    await two.refresh()
    assert await sizes(things) == {"b": 2}, "the second finds that its life was written back, and brings nobody back"


async def test_lives_that_have_mixed_come_to_rest(things: DurableMap[Thing]) -> None:
    """Two copies of different lives of the map: neither writes for ever because the other has."""
    await put(things, "a", 1)
    old = await copy_of(things)
    await lose(things)
    await put(things, "b", 1)
    new = await copy_of(things)
    await old.refresh()
    await new.refresh()
    await put(things, "a", None)
    after = await things.epoch()
    for _ in range(3):
        await old.refresh()
        await new.refresh()
    assert await things.epoch() == after, "only the removal was written"
    assert dict(old.values) == dict(new.values) == {"b": Thing(1)}


async def test_two_who_restore_at_once_agree(things: DurableMap[Thing]) -> None:
    await put(things, "a", 1)
    behind = await copy_of(things)
    older = await things.redis.command("HGETALL", things.place.entries), await things.epoch()
    await put(things, "b", 1)
    await behind.refresh()
    await put(things, "c", 1)
    ahead = await copy_of(things)
    await go_back(things, *older)
    there = await things.epoch()
    fields = {name: things.encode(thing) for name, thing in behind.values.items()}
    assert await things.restore(there, older[1].counter + 1, fields) is not None
    assert await things.restore(there, older[1].counter + 2, {}) is None, "it was written meanwhile"
    for copy in (ahead, behind, ahead):
        await copy.refresh()
    assert dict(ahead.values) == dict(behind.values) == (await things.read()).values
    assert set(ahead.values) >= {"a", "b"}, "of the state of one or of the other"


async def test_a_write_to_an_older_copy_is_not_taken_for_the_one_that_is_missing(things: DurableMap[Thing]) -> None:
    """As many writes, and another state."""
    await put(things, "a", 1)
    older = await things.redis.command("HGETALL", things.place.entries), await things.epoch()
    await put(things, "b", 1)
    copy = await copy_of(things)
    await go_back(things, *older)
    await put(things, "c", 1)
    await copy.refresh()
    assert dict(copy.values) == (await things.read()).values


async def go_back(things: DurableMap[Thing], fields: dict[bytes, bytes], epoch: Epoch) -> None:
    """Redis was stopped and started with a file that is some changes old."""
    redis, place = things.redis, things.place
    await redis.command("DEL", place.entries)
    await redis.command("HSET", place.entries, *(part for pair in fields.items() for part in pair))
    if place.counter is not None:
        await redis.command("SET", place.counter, epoch.counter)


async def test_a_copy_is_not_replaced_by_a_reading_of_a_lost_map(
    things: DurableMap[Thing], monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(things, "a", 1)
    copy = await copy_of(things)
    await put(things, "b", 1)
    read = things.read

    async def emptied():  # type: ignore[no-untyped-def]
        monkeypatch.undo()
        await lose(things)
        return await read()

    monkeypatch.setattr(things, "read", emptied)
    with pytest.raises(RedisUnavailable):
        await copy.refresh()
    assert dict(copy.values) == {"a": Thing(1)}
    await copy.refresh()
    assert await sizes(things) == {"a": 1}


async def test_an_earlier_life_fills_only_what_was_never_written(things: DurableMap[Thing]) -> None:
    kept = MapCopy(things)
    kept.adopt({"a": Thing(1)}, "an earlier id")
    assert dict(kept.values) == {"a": Thing(1)} and kept.is_known
    await kept.refresh()
    assert await sizes(things) == {"a": 1}
    await put(things, "a", None)
    later = MapCopy(things)
    later.adopt({"a": Thing(1)}, "another earlier id")
    await later.refresh()
    assert await sizes(things) == {} and not later.values


async def test_what_is_set_here_is_written_when_redis_answers(things: DurableMap[Thing]) -> None:
    copy = await copy_of(things)
    await put(things, "a", 1)
    copy.set_here("a", Thing(7))
    assert copy.values["a"] == Thing(7)
    await copy.refresh()
    assert await sizes(things) == {"a": 7}


async def test_a_follower_leaves_an_older_map_as_it_is(redis: BackgroundClient) -> None:
    things = DurableMap(redis, OWN, Thing, msgspec.json, "things")

    class Follower(MapCopy[Thing]):
        @property
        def _may_restore(self) -> bool:
            return False

    await put(things, "a", 1)
    older = await redis.command("HGETALL", OWN.entries), await things.epoch()
    await put(things, "b", 1)
    follower = Follower(things)
    await follower.refresh()
    await go_back(things, *older)
    await follower.refresh()
    assert dict(follower.values) == {"a": Thing(1)} and await sizes(things) == {"a": 1}


async def test_without_the_shared_id_redis_counts_as_unavailable(redis: BackgroundClient) -> None:
    things = DurableMap(redis, SHARED, Thing, msgspec.json, "things")
    await put(things, "a", 1)
    copy = await copy_of(things)
    await lose(things, life=None)
    with pytest.raises(RedisUnavailable, match="its data is gone"):
        await copy.refresh()
    await copy.reseed()
    await redis.command("SET", keys.SENTINEL, "life-2")
    assert await sizes(things) == {"a": 1}
    await put(things, "a", None)
    await copy.refresh()
    assert not copy.values, "it had written its copy back, and does not do so again"


def script_without(part: str, instead: str) -> Defect:
    """A seed script that lacks a part."""
    assert part in durable_map.SEED
    return lambda patch: patch.setattr(durable_map, "SEED", durable_map.SEED.replace(part, instead))


DEFECTS: dict[str, tuple[Defect, Callable[[DurableMap[Thing]], Awaitable[None]]]] = {
    "removed entries come back": (
        script_without("redis.call('SISMEMBER', KEYS[4], own) == 1", "false"),
        test_a_lost_map_is_written_back_once_and_what_is_there_stays,
    ),
    "a copy is written over what is there": (
        script_without("'HSETNX'", "'HSET'"),
        test_a_lost_map_is_written_back_once_and_what_is_there_stays,
    ),
    "every write counts one": (
        lambda patch: patch.setattr(durable_map, "_raise", lambda: 1),
        test_a_write_to_an_older_copy_is_not_taken_for_the_one_that_is_missing,
    ),
    "an earlier life fills any map": (
        script_without("ARGV[3] == 'new'", "false"),
        test_an_earlier_life_fills_only_what_was_never_written,
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
async def test_a_seeded_defect_is_caught(
    things: DurableMap[Thing], monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    break_it, scenario = DEFECTS[defect]
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        await scenario(things)


async def test_a_copy_without_redis_is_its_own() -> None:
    copy: MapCopy[Thing] = MapCopy(None)
    assert not await copy.refresh()
    assert await copy.replace(None, Thing(1), "a") and not await copy.replace(None, Thing(2), "a")
    copy.set_here("b", Thing(2))
    assert dict(copy.values) == {"a": Thing(1), "b": Thing(2)}
    await copy.reseed()
