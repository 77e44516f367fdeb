"""The list of adapters in a real Redis: changes are compared and set, copies follow, no loss of data loses it."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.entries import AdapterEntry, BaseFacts
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable
from tests.support.subscribed import subscribed


def entry(name: str = "pirate", digest: str = "a" * 64, **more: object) -> AdapterEntry:
    return AdapterEntry(name=name, digest=digest, source=f"/adapters/{name}", **more)  # type: ignore[arg-type]


async def test_what_one_lists_the_other_sees(redis: BackgroundClient) -> None:
    one, two = AdapterList(redis, "demo"), AdapterList(redis, "demo")
    assert not await two.refresh()
    assert await one.replace(None, entry(), "pirate")
    assert dict(one.entries) == {"pirate": entry()}
    assert await two.refresh()
    assert dict(two.entries) == {"pirate": entry()}
    assert not await two.refresh(), "nothing has changed since"
    assert await two.replace(entry(), None, "pirate")
    assert await one.refresh()
    assert dict(one.entries) == {}


async def test_a_list_belongs_to_one_base_model(redis: BackgroundClient) -> None:
    await AdapterList(redis, "demo").replace(None, entry(), "pirate")
    other = AdapterList(redis, "other")
    await other.refresh()
    assert dict(other.entries) == {}


async def test_of_two_changes_at_once_one_wins_and_the_other_learns_it(redis: BackgroundClient) -> None:
    one, two = AdapterList(redis, "demo"), AdapterList(redis, "demo")
    assert await one.replace(None, entry(digest="a" * 64), "pirate")
    assert not await two.replace(None, entry(digest="b" * 64), "pirate")
    assert two.entries["pirate"].digest == "a" * 64
    assert await two.replace(two.entries["pirate"], entry(digest="b" * 64), "pirate")
    assert not await one.replace(one.entries["pirate"], None, "pirate")
    assert one.entries["pirate"].digest == "b" * 64


async def test_many_writers_lose_no_change(redis: BackgroundClient) -> None:
    lists = [AdapterList(redis, "demo") for _ in range(4)]

    async def add(adapters: AdapterList, name: str) -> None:
        while not await adapters.replace(adapters.entries.get(name), entry(name), name):
            await asyncio.sleep(0)

    await asyncio.gather(*(add(lists[i % 4], f"a{i}") for i in range(40)))
    for adapters in lists:
        await adapters.refresh()
        assert len(adapters.entries) == 40


async def test_a_change_that_redis_cannot_take_changes_nothing_here(redis: BackgroundClient) -> None:
    adapters = AdapterList(redis, "demo")
    await adapters.replace(None, entry(), "pirate")
    await redis.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(RedisUnavailable):
        await adapters.replace(entry(), entry(digest="b" * 64), "pirate")
    assert adapters.entries["pirate"] == entry()
    await redis.command("CONFIG", "SET", "maxmemory", "0")
    await adapters.refresh()
    assert adapters.entries["pirate"] == entry()


async def test_what_is_known_is_served_without_redis(server: RedisServer, redis: BackgroundClient) -> None:
    adapters = AdapterList(redis, "demo")
    await adapters.replace(None, entry(), "pirate")
    impatient = BackgroundClient(server.url, timeout_s=0.2, retries=0)
    adapters.map.redis = impatient
    server.stop()
    try:
        with pytest.raises(RedisUnavailable):
            await adapters.refresh()
        assert dict(adapters.entries) == {"pirate": entry()}
        with pytest.raises(RedisUnavailable):
            await adapters.replace(entry(), None, "pirate")
        assert dict(adapters.entries) == {"pirate": entry()}
    finally:
        server.start()
        await impatient.close()


async def test_an_emptied_redis_gets_the_list_back(redis: BackgroundClient) -> None:
    adapters = AdapterList(redis, "demo")
    adapters.announce(BaseFacts(folder="/m", max_rank=8))
    await adapters.refresh()
    await adapters.replace(None, entry(), "pirate")
    await redis.command("FLUSHALL")
    with pytest.raises(RedisUnavailable):
        await adapters.refresh()
    assert dict(adapters.entries) == {"pirate": entry()}
    await adapters.reseed()  # what the fleet's view asks for
    await redis.command("SET", keys.SENTINEL, "2")
    await adapters.refresh()
    assert dict(adapters.entries) == {"pirate": entry()}
    newcomer = AdapterList(redis, "demo")
    await newcomer.refresh()
    assert dict(newcomer.entries) == {"pirate": entry()}
    assert await newcomer.base() == BaseFacts(folder="/m", max_rank=8)


async def test_a_loss_that_another_has_hidden_is_noticed(redis: BackgroundClient) -> None:
    """A new gateway with an empty copy finds Redis emptied and writes the sentinel; the others still know."""
    old = AdapterList(redis, "demo")
    await old.replace(None, entry(), "pirate")
    await old.refresh()
    await redis.command("FLUSHALL")
    new = AdapterList(redis, "demo")
    await new.reseed()
    await redis.command("SET", keys.SENTINEL, "2")
    await new.replace(None, entry("shout"), "shout")
    await old.refresh()
    assert set(old.entries) == {"pirate", "shout"}
    await new.refresh()
    assert set(new.entries) == {"pirate", "shout"}


async def test_an_entry_of_another_version_hides_only_itself(redis: BackgroundClient) -> None:
    adapters = AdapterList(redis, "demo")
    await adapters.replace(None, entry(), "pirate")
    await redis.command("HSET", keys.adapters("demo"), "odd", b"\x01")
    await redis.command("HINCRBY", keys.adapters("demo"), keys.ADAPTERS_VERSION, 1)
    await adapters.refresh()
    assert set(adapters.entries) == {"pirate"}


async def test_what_the_settings_ask_for_is_listed_without_redis_and_saved_later(redis: BackgroundClient) -> None:
    adapters = AdapterList(redis, "demo")
    adapters.keep(entry())
    assert adapters.entries["pirate"] == entry()
    await adapters.refresh()
    assert adapters.entries["pirate"] == entry()
    other = AdapterList(redis, "demo")
    await other.refresh()
    assert other.entries["pirate"] == entry()


async def test_a_redis_that_takes_no_writes_is_still_read(
    redis: BackgroundClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Its memory is full while a gateway starts, which has to say what it serves."""
    facts = BaseFacts(folder="/m", max_rank=8)
    writer, fresh = AdapterList(redis, "demo"), AdapterList(redis, "demo")
    await writer.replace(None, entry(), "pirate")
    fresh.announce(facts)
    await redis.command("CONFIG", "SET", "maxmemory", "1")
    try:
        assert await fresh.refresh()
        assert fresh.is_known and dict(fresh.entries) == {"pirate": entry()}
        fresh.keep(entry("mine"))
        for _ in range(3):
            await fresh.refresh()
            assert set(fresh.entries) == {"mine", "pirate"}, "what waits to be written is served"
        assert len([line for line in caplog.messages if "takes no changes of the adapters" in line]) == 1
    finally:
        await redis.command("CONFIG", "SET", "maxmemory", "0")
    assert await writer.replace(entry(), None, "pirate")
    await fresh.refresh()
    await writer.refresh()
    assert dict(writer.entries) == dict(fresh.entries) == {"mine": entry("mine")}
    assert await writer.base() == facts and await redis.command("SISMEMBER", keys.ADAPTER_MODELS, "demo") == 1


async def test_what_was_known_stays_while_a_redis_without_it_takes_no_writes(redis: BackgroundClient) -> None:
    """A list that was lost, and one of an earlier life that Redis never had."""
    known, adopted = AdapterList(redis, "demo"), AdapterList(redis, "kept")
    for one in (known, adopted):
        one.announce(BaseFacts(folder="/m", max_rank=8))
    await known.refresh()
    await known.replace(None, entry(), "pirate")
    adopted.adopt({"pirate": entry()})
    await redis.command("FLUSHALL")
    await redis.command("SET", keys.SENTINEL, "another")
    await redis.command("CONFIG", "SET", "maxmemory", "1")
    try:
        for one in (known, adopted):
            with pytest.raises(RedisUnavailable, match="maxmemory"):
                await one.refresh()
            assert dict(one.entries) == {"pirate": entry()}
    finally:
        await redis.command("CONFIG", "SET", "maxmemory", "0")
    for one in (known, adopted):
        await one.refresh()
        later = AdapterList(redis, one.model)
        await later.refresh()
        assert dict(later.entries) == dict(one.entries) == {"pirate": entry()}


async def test_the_modules_listed_last_are_not_listed_again(redis: BackgroundClient) -> None:
    adapters = AdapterList(redis, "demo")
    assert not await adapters.modules_are_listed("s1", "d1")
    await adapters.note_modules_listed("s1", "d1")
    assert await adapters.modules_are_listed("s1", "d1")
    assert not await adapters.modules_are_listed("s2", "d1")
    assert not await adapters.modules_are_listed("s1", "d2"), "another version has others"
    await adapters.note_modules_listed("s1", "d2")
    assert not await adapters.modules_are_listed("s1", "d1"), "a version that comes back lists its own again"


async def test_run_reports_changes_and_outlives_whatever_is_raised(redis: BackgroundClient) -> None:
    follower, writer = AdapterList(redis, "demo"), AdapterList(redis, "demo")
    changed = asyncio.Event()
    running = asyncio.create_task(follower.run(changed.set, period_s=0.0))
    for digest in ("a" * 64, "b" * 64):
        await writer.replace(writer.entries.get("pirate"), entry(digest=digest), "pirate")
        await asyncio.wait_for(changed.wait(), 30)
        changed.clear()
        async with asyncio.timeout(30):
            while follower.entries["pirate"].digest != digest:
                await asyncio.sleep(0.001)
        await redis.command("DEL", keys.SENTINEL)  # unavailable
        await asyncio.sleep(0)
        await redis.command("SET", keys.SENTINEL, "1")
    assert not running.done()
    running.cancel()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def test_an_announced_change_is_seen_long_before_the_period(server: RedisServer, redis: BackgroundClient) -> None:
    follower, writer = AdapterList(redis, "demo"), AdapterList(redis, "demo")
    follower.announce(BaseFacts(folder="/m", max_rank=8))
    async with subscribed(server.url, keys.adapters("demo")) as changes:
        running = asyncio.create_task(follower.run(lambda: None, 60.0, changes))
        await writer.replace(None, entry(), "pirate")
        await until(lambda: "pirate" in follower.entries)
        await writer.replace(entry(), None, "pirate")
        await until(lambda: not follower.entries)
        writer.keep(entry("shout"))
        await writer.refresh()  # saves it
        await until(lambda: set(follower.entries) == {"shout"})
        await redis.command("DEL", keys.adapters("demo"))
        await writer.reseed()
        await until(lambda: set(follower.entries) == {"shout"})
        running.cancel()


async def test_a_change_that_nobody_announced_is_seen_by_the_poll(
    server: RedisServer, redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cluster.adapters.adapter_list.SUBSCRIBED_POLL_S", 0.02)
    follower = AdapterList(redis, "demo")
    async with subscribed(server.url, keys.adapters("demo")) as changes:
        running = asyncio.create_task(follower.run(lambda: None, 0.02, changes))
        await redis.command("HSET", keys.adapters("demo"), "pirate", msgspec.msgpack.encode(entry()))
        await redis.command("HINCRBY", keys.adapters("demo"), keys.ADAPTERS_VERSION, 1)
        await until(lambda: "pirate" in follower.entries)
        running.cancel()


async def test_who_may_not_publish_may_still_write(server: RedisServer, redis: BackgroundClient) -> None:
    await redis.command("ACL", "SETUSER", "quiet", "on", ">secret", "~*", "+@all", "resetchannels")
    quiet = BackgroundClient(f"unix://quiet@{server.socket_path}?password=secret", retries=0)
    try:
        with pytest.raises(RedisUnavailable, match="permission"):
            await quiet.command("PUBLISH", "k", "")
        adapters = AdapterList(quiet, "demo")
        adapters.announce(BaseFacts(folder="/m", max_rank=8))
        assert await adapters.refresh() is False
        assert await adapters.replace(None, entry(), "pirate")
        await adapters.reseed()
        assert (await adapters.base()) == BaseFacts(folder="/m", max_rank=8)
    finally:
        await quiet.close()
        await redis.command("ACL", "DELUSER", "quiet")


async def test_who_may_not_write_follows(server: RedisServer, redis: BackgroundClient) -> None:
    adapters, writer = AdapterList(redis, "demo"), AdapterList(redis, "demo")
    adapters.announce(BaseFacts(folder="/m", max_rank=8))
    await adapters.refresh()
    await redis.command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "&*", "+@all", "-@write")
    reader = BackgroundClient(f"unix://reader@{server.socket_path}?password=secret", retries=0)
    try:
        adapters.map.redis = reader
        await writer.replace(None, entry(), "pirate")
        assert await adapters.refresh() and set(adapters.entries) == {"pirate"}
        with pytest.raises(RedisUnavailable):
            await adapters.replace(entry(), None, "pirate")
    finally:
        await reader.close()
        await redis.command("ACL", "DELUSER", "reader")


async def snapshot(redis: BackgroundClient) -> dict[bytes, bytes]:
    found = await redis.command("HGETALL", keys.adapters("demo"))
    assert isinstance(found, dict)
    return found


async def restore(redis: BackgroundClient, found: dict[bytes, bytes]) -> None:
    """Redis is stopped and started with a file that is some changes old: the sentinel is the same."""
    await redis.command("DEL", keys.adapters("demo"))
    if found:
        await redis.command("HSET", keys.adapters("demo"), *(part for pair in found.items() for part in pair))


@pytest.mark.parametrize("when", ["never listed", "one listed"])
async def test_an_older_copy_of_redis_is_made_what_is_known(redis: BackgroundClient, when: str) -> None:
    adapters, follower = AdapterList(redis, "demo"), AdapterList(redis, "demo")
    older: dict[bytes, bytes] = {}
    adapters.announce(BaseFacts(folder="/m", max_rank=8))
    await adapters.refresh()
    if when == "one listed":
        await adapters.replace(None, entry("gone"), "gone")
        older = await snapshot(redis) | {b"odd": b"\x01"}
        await adapters.replace(entry("gone"), None, "gone")
    await adapters.replace(None, entry(tenant="acme", pinned=True), "pirate")
    await follower.refresh()
    await restore(redis, older)
    await follower.refresh()
    assert set(follower.entries) == ({"gone"} if older else set()), "a group follows, it does not decide"
    await adapters.refresh()
    await follower.refresh()
    for copy in (adapters, follower):
        assert dict(copy.entries) == {"pirate": entry(tenant="acme", pinned=True)}
    assert await follower.base() == BaseFacts(folder="/m", max_rank=8)
    assert (b"odd" in await snapshot(redis)) == bool(older), "of another version: not ours to remove"
    assert not await adapters.refresh()
    assert await follower.replace(follower.entries["pirate"], None, "pirate")
    assert await adapters.refresh() and not adapters.entries, "and changes go on"


async def test_two_that_restore_a_list_at_once_end_with_one(redis: BackgroundClient) -> None:
    behind, ahead = AdapterList(redis, "demo"), AdapterList(redis, "demo")
    for adapters in (behind, ahead):
        adapters.announce(BaseFacts(folder="/m", max_rank=8))
        await adapters.refresh()
    await behind.refresh()
    older = await snapshot(redis)
    await ahead.replace(None, entry("a"), "a")
    await behind.refresh()
    await ahead.replace(None, entry("b"), "b")
    await restore(redis, older)
    await behind.refresh()
    await ahead.refresh()
    await behind.refresh()
    assert dict(behind.entries) == dict(ahead.entries)
