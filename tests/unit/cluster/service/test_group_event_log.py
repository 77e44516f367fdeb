"""Events of groups become lines on the terminal: written to a real Redis, read by the launcher's thread."""

import asyncio
import queue

import pytest

from tandem.cluster.fleet.group_events import MOST_EVENTS, GroupEvent, GroupTally, read_tally, take_events, write_event
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.service.group_event_log import GroupEventLog, Lines
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient

DEADLINE_S = 20.0


def test_a_groups_end_is_said_once_whoever_tells_of_it() -> None:
    lines = Lines(2)
    lost = lines.of(GroupEvent("lost", "a", "rank 0 of group a has died"))
    assert lost == (
        "group a is lost: rank 0 of group a has died; its requests go on with another that serves, or with the new one "
        "that Serve starts"
    )
    assert [lines.of(GroupEvent(kind, "a")) for kind in ("missing", "left", "missing")] == [None] * 3
    assert "is missing: it was killed or hangs;" in str(lines.of(GroupEvent("missing", "b")))
    killed = GroupEvent("missing", "f", "its coordinator was killed by SIGKILL")
    assert "group f is missing: its coordinator was killed by SIGKILL; its requests" in str(lines.of(killed))
    assert lines.of(GroupEvent("left", "c")) == "group c has ended"
    assert lines.of(GroupEvent("serving", "d")) == "group d serves"
    assert lines.of(GroupEvent("failed", "e", "no memory")) == "group e did not start: no memory; Serve tries another"


def test_the_requests_of_the_only_group_are_not_said_to_go_on_with_another() -> None:
    lost = Lines(1).of(GroupEvent("lost", "a", "rank 0 of group a has died"))
    assert lost == ("group a is lost: rank 0 of group a has died; its requests wait for the new one that Serve starts")


def test_a_group_that_comes_back_may_go_missing_again() -> None:
    lines = Lines(2)
    assert lines.of(GroupEvent("returned", "a")) is None, "nobody said that it had gone"
    assert "is missing" in str(lines.of(GroupEvent("missing", "a")))
    assert [lines.of(GroupEvent("returned", "a")) for _ in range(2)] == ["group a is back", None], "two gateways say so"
    assert "is lost" in str(lines.of(GroupEvent("lost", "a", "rank 0 of group a has died")))


async def test_events_are_taken_once_in_order_and_are_few(redis: BackgroundClient) -> None:
    assert await take_events(redis, "s") == []
    for i in range(MOST_EVENTS + 5):
        await write_event(redis, "s", GroupEvent("serving", str(i)))
    assert 0 < int(await redis.command("TTL", keys.events("s"))) <= keys.EVENTS_TTL_S
    taken = await take_events(redis, "s")
    assert [event.group for event in taken] == [str(i) for i in range(5, MOST_EVENTS + 5)]
    assert await take_events(redis, "s") == []


async def test_starts_and_losses_are_counted_once_whoever_tells_of_them(redis: BackgroundClient) -> None:
    assert await read_tally(redis, "s") == GroupTally()
    killed = GroupEvent("lost", "a", "rank 0 of group a was killed by SIGKILL")
    told = [GroupEvent("serving", "a"), GroupEvent("serving", "b"), killed, GroupEvent("missing", "a")]
    told += [GroupEvent("left", "b"), GroupEvent("missing", "b"), GroupEvent("failed", "c", "no memory")]
    for event in told * 2:  # a reply that was lost, two gateways
        await write_event(redis, "s", event)
    tally = await read_tally(redis, "s")
    assert tally._replace(last_loss_s=0.0) == GroupTally(2, 1, 1, killed) and tally.last_loss_s < DEADLINE_S
    await write_event(redis, "s", GroupEvent("missing", "d"))
    await write_event(redis, "s", GroupEvent("returned", "d"))
    assert (await read_tally(redis, "s"))[2:4] == (2, GroupEvent("missing", "d"))
    for key in (keys.group_tally("s"), keys.groups_counted("s")):
        assert keys.EVENTS_TTL_S < int(await redis.command("TTL", key)) <= keys.TALLY_TTL_S


async def test_the_launcher_says_what_comes_after_the_start(server: RedisServer, redis: BackgroundClient) -> None:
    await write_event(redis, "s", GroupEvent("serving", "of the start"))
    said: queue.Queue[str] = queue.Queue()
    news = GroupEventLog(server.url, "s", 2, said.put)
    news.start()
    async with asyncio.timeout(DEADLINE_S):
        while await redis.command("EXISTS", keys.events("s")):  # until those of the start are taken
            await asyncio.sleep(0.01)
    await write_event(redis, "another", GroupEvent("serving", "no group of ours"))
    await write_event(redis, "s", GroupEvent("missing", "a"))
    await write_event(redis, "s", GroupEvent("serving", "b"))
    assert [said.get(timeout=DEADLINE_S)[:18] for _ in range(2)] == ["group a is missing", "group b serves"]
    news.stop()
    news._thread.join(DEADLINE_S)
    assert not news._thread.is_alive()
    assert said.empty()


@pytest.mark.realtime
async def test_without_redis_the_launcher_hears_again_when_it_is_back(server: RedisServer) -> None:
    server.stop()
    said: queue.Queue[str] = queue.Queue()
    news = GroupEventLog(server.url, "s", 2, said.put)
    news.start()
    await asyncio.sleep(0.3)  # it may find nobody several times
    assert news._thread.is_alive()
    server.start()
    client = BackgroundClient(server.url)
    async with asyncio.timeout(DEADLINE_S):
        while said.empty():
            await write_event(client, "s", GroupEvent("serving", "b"))
            await asyncio.sleep(0.1)
    assert said.get() == "group b serves"
    await client.close()
    news.stop()
    news._thread.join(DEADLINE_S)
    assert not news._thread.is_alive()


def test_a_thread_that_never_began_or_has_died_can_be_stopped(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    GroupEventLog(server.url, "s", 2, lambda line: None).stop()

    async def broken(self: GroupEventLog) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(GroupEventLog, "_follow", broken)
    news = GroupEventLog(server.url, "s", 2, lambda line: None)
    news.start()
    news._thread.join(DEADLINE_S)
    news.stop()
