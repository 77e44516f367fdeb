"""A real private server: start, titles, folders, kill -9, freeze; the two clients; the fleet on top."""

import asyncio
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psutil
import pytest

from tandem.cluster.fleet import fleet_view
from tandem.cluster.fleet.fleet_view import (
    FleetView,
    GroupRecord,
    StartFailure,
    group_heartbeat,
    read_start_failure,
    report_start_failure,
)
from tandem.cluster.fleet.prefix_resets import ResetFollower
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import (
    BackgroundClient,
    Part,
    RedisLate,
    RedisRefused,
    RedisUnavailable,
    RequestClient,
    check_reachable,
)

GET = "return redis.call('GET', KEYS[1])"


@pytest.fixture
async def request_client(server: RedisServer) -> AsyncIterator[RequestClient]:
    client = RequestClient(lambda: server.url, timeout_s=20.0)
    yield client
    await client.close()


@pytest.fixture
async def background(server: RedisServer) -> AsyncIterator[BackgroundClient]:
    client = BackgroundClient(server.url)
    yield client
    await client.close()


def record(group: str = "g1", **fields: Any) -> GroupRecord:
    known = {"group": group, "life": 1, "model": "m", "state": "serving", "host": "h", "pid": 1}
    return GroupRecord(**known | fields)


def test_the_server_is_private_and_carries_its_title(server: RedisServer) -> None:
    process = psutil.Process(server.pid)
    assert process.cmdline()[0] == "tandem redis"
    assert not [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert stat.S_IMODE(server.socket_path.parent.stat().st_mode) == 0o700
    assert check_reachable(server.url) is None


def test_stop_ends_the_process_and_start_finds_the_data_again(server: RedisServer) -> None:
    async def write() -> None:
        client = BackgroundClient(server.url)
        await client.command("SET", "k", "v")
        await client.close()

    async def read() -> object:
        client = BackgroundClient(server.url)
        value = await client.command("GET", "k")
        await client.close()
        return value

    asyncio.run(write())
    pid = server.pid
    server.stop()
    assert pid is not None and not psutil.pid_exists(pid)
    server.start()
    assert asyncio.run(read()) == b"v"


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "unix:///nowhere/redis.sock", "no-url"])
def test_an_unreachable_url_is_explained(url: str) -> None:
    assert check_reachable(url, timeout_s=0.5)


async def test_a_frozen_server_opens_the_breaker_and_calls_fail_fast(server: RedisServer) -> None:
    """The breaker's clock is the test's: no timeout is seen late, and no probe is due before it is said to be."""
    now_s = 100.0
    request_client = RequestClient(lambda: server.url, timeout_s=0.05, clock=lambda: now_s)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    for _ in range(3):
        started_s = time.monotonic()
        with pytest.raises(RedisLate):
            await request_client.script(GET, ("k",), ())
        assert time.monotonic() - started_s < 10
    assert request_client.breaker.state == "open"
    for _ in range(100):
        with pytest.raises(RedisLate, match="breaker is open"):  # it asks nobody: no answer would have other words
            await request_client.script(GET, ("k",), ())
    os.kill(server.pid, signal.SIGCONT)
    async with asyncio.timeout(30):
        while request_client.breaker.state != "closed":
            now_s += 1.0
            try:
                await request_client.script(GET, ("k",), ())
            except RedisUnavailable:
                await asyncio.sleep(0.05)
    await request_client.close()


async def test_a_timeout_seen_late_is_the_loops_fault_not_redis(server: RedisServer) -> None:
    """The clock stands in for a loop that was busy: the deadline is noticed 50 ms too late each time."""
    jumps = iter(range(1000))
    client = RequestClient(lambda: server.url, timeout_s=0.02, clock=lambda: next(jumps) * 0.1)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    for _ in range(4):
        with pytest.raises(RedisUnavailable):
            await client.script(GET, ("k",), ())
    assert client.breaker.state == "closed"
    await client.close()


async def test_the_background_client_waits_out_a_restart(server: RedisServer, background: BackgroundClient) -> None:
    await background.command("SET", "k", "1")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)

    async def restart() -> None:
        server.stop()
        server.start()

    answer, _ = await asyncio.gather(background.command("GET", "k"), restart())
    assert answer == b"1", "appendonly brings the data back"


async def test_a_group_registers_renews_and_leaves(server: RedisServer, background: BackgroundClient) -> None:
    await background.command("SET", keys.SENTINEL, "1")
    waiting = 0
    heartbeat = group_heartbeat(background, "s", lambda: record(waiting=waiting))
    fleet = FleetView(background, "s")
    await heartbeat.send_heartbeat()
    waiting = 5
    await heartbeat.send_heartbeat()
    await fleet.refresh()
    assert fleet.records == {"g1": record(waiting=5)}
    assert 0 < int(await background.command("PTTL", keys.group("s", "g1"))) <= keys.GROUP_RECORD_TTL_MS
    await heartbeat.leave()
    await fleet.refresh()
    assert fleet.records == {}


async def test_a_group_without_heartbeats_disappears(background: BackgroundClient) -> None:
    await background.command("SET", keys.SENTINEL, "1")
    await group_heartbeat(background, "s", record).send_heartbeat()
    await background.command("DEL", keys.group("s", "g1"))  # what its TTL does
    fleet = FleetView(background, "s")
    await fleet.refresh()
    assert fleet.records == {}
    assert await background.command("SCARD", keys.groups("s")) == 0


async def test_services_on_one_redis_do_not_see_each_other(background: BackgroundClient) -> None:
    await background.command("SET", keys.SENTINEL, "1")
    await group_heartbeat(background, "one", record).send_heartbeat()
    fleet = FleetView(background, "two")
    await fleet.refresh()
    assert fleet.records == {}


async def test_a_redis_without_the_sentinel_is_unavailable_until_it_is_seeded(background: BackgroundClient) -> None:
    await group_heartbeat(background, "s", record).send_heartbeat()
    fleet = FleetView(background, "s")
    fleet.records = {"old": record("old")}
    await fleet.refresh()
    assert fleet.redis_unavailable
    assert set(fleet.records) == {"old"}, "the last known fleet stays"
    seeded: list[bool] = []

    async def reseed() -> None:
        seeded.append(True)

    fleet = FleetView(background, "s", reseed)
    await fleet.refresh()
    await fleet.refresh()
    assert seeded == [True]
    assert set(fleet.records) == {"g1"}
    assert await background.command("EXISTS", keys.SENTINEL)


async def test_the_fleet_survives_the_server(server: RedisServer) -> None:
    client = BackgroundClient(server.url, timeout_s=20.0, retries=0)
    fleet = FleetView(client, "s", reseed=lambda: asyncio.sleep(0))
    await group_heartbeat(client, "s", record).send_heartbeat()
    await fleet.refresh()
    server.stop()
    await fleet.refresh()
    assert fleet.redis_unavailable and fleet.redis_state == "is away"
    assert set(fleet.records) == {"g1"}
    await client.close()


@pytest.mark.parametrize("retries", [0, 1])  # a second try connects anew, and the library wraps its timeout
async def test_a_slow_server_is_not_called_away(
    server: RedisServer, caplog: pytest.LogCaptureFixture, retries: int
) -> None:
    client = BackgroundClient(server.url, timeout_s=0.2, retries=retries)
    fleet = FleetView(client, "s", reseed=lambda: asyncio.sleep(0))
    await fleet.refresh()
    assert server.pid is not None and not fleet.redis_state
    os.kill(server.pid, signal.SIGSTOP)
    await fleet.refresh()
    assert fleet.redis_state == "does not answer in time"
    os.kill(server.pid, signal.SIGCONT)
    server.stop()
    await fleet.refresh()
    assert fleet.redis_state == "is away"
    assert [line.partition(" (")[0] for line in caplog.messages if line.startswith("Redis")] == [
        "Redis does not answer in time", "Redis is away",
    ]  # fmt: skip
    await client.close()


async def until(condition: Callable[[], Awaitable[object]], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_an_error_reply_ends_neither_the_heartbeat_nor_the_fleet(background: BackgroundClient) -> None:
    """A full memory refuses heartbeats and still answers reads: the records expire and the groups live on."""
    await background.command("SET", keys.SENTINEL, "1")
    fleet = FleetView(background, "s")
    heartbeat = group_heartbeat(background, "s", record, period_s=0.15)
    running = asyncio.create_task(heartbeat.run())
    key = keys.group("s", "g1")
    await until(lambda: background.command("EXISTS", key))
    await fleet.refresh()
    await background.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(RedisRefused, match="maxmemory"):
        await heartbeat.send_heartbeat()
    await background.command("DEL", key)  # what its TTL does
    await fleet.refresh()
    assert fleet.redis_unavailable
    assert set(fleet.records) == {"g1"}, "nobody has left"
    assert not running.done()
    await background.command("CONFIG", "SET", "maxmemory", "0")
    await fleet.refresh()
    assert not fleet.redis_unavailable
    assert set(fleet.records) == {"g1"}, "until it had the time to write its record again"
    await until(lambda: background.command("EXISTS", key))
    running.cancel()


async def test_an_error_reply_does_not_open_the_breaker(
    background: BackgroundClient, request_client: RequestClient
) -> None:
    await background.command("CONFIG", "SET", "maxmemory", "1")
    for _ in range(5):
        with pytest.raises(RedisRefused, match="maxmemory"):
            await request_client.script("return redis.call('SET', KEYS[1], 'v')", ("k",), ())
    assert request_client.breaker.state == "closed"


@pytest.mark.parametrize("answer", [ValueError("odd"), RedisUnavailable("away")], ids=["unforeseen", "away"])
async def test_heartbeat_and_fleet_go_on_whatever_is_raised(answer: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_view, "PERIOD_S", 0.0)
    monkeypatch.setattr(fleet_view, "IDLE_PERIOD_S", 0.0)
    calls: list[int] = []

    def then() -> None:
        calls.append(1)
        raise RuntimeError("one bad call")

    class Broken:
        calls = 0

        async def command(self, *parts: object) -> object:
            Broken.calls += 1
            raise answer

        async def pipeline(self, commands: object) -> list[object]:
            Broken.calls += 1
            raise answer

    fleet = FleetView(Broken(), "s")
    fleet.records = {"g1": record()}
    for task in (
        asyncio.create_task(group_heartbeat(Broken(), "s", record, period_s=0.11).run()),
        asyncio.create_task(fleet.run(then, lambda: False)),
    ):
        before = Broken.calls
        async with asyncio.timeout(30):
            while Broken.calls < before + 3:
                await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()
    assert set(fleet.records) == {"g1"} and len(calls) >= 2


async def test_an_idle_fleet_is_read_less_often(background: BackgroundClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while a group works, stalls, loads or has just left, nor while there is work here."""
    monkeypatch.setattr(fleet_view, "PERIOD_S", 0.001)
    monkeypatch.setattr(fleet_view, "IDLE_PERIOD_S", 60.0)
    await background.command("SET", keys.SENTINEL, "1")
    looks: list[bool] = []

    class Counted(FleetView):
        async def refresh(self) -> None:
            await super().refresh()
            looks.append(self.is_idle)

    fleet = Counted(background, "s")
    assert not fleet.is_idle, "there is nobody"
    restless = [{"running": 1}, {"waiting": 1}, {"stalled_s": 2.5}, {"state": "loading"}, {"state": "draining"}]
    for fields in restless:
        await group_heartbeat(background, "s", lambda fields=fields: record(**fields)).send_heartbeat()
        await fleet.refresh()
        assert not fleet.is_idle, fields
    await group_heartbeat(background, "s", record).send_heartbeat()
    looks.clear()
    following = asyncio.create_task(fleet.run(lambda: None, lambda: len(looks) < 3))
    async with asyncio.timeout(30):
        while len(looks) < 3:
            await asyncio.sleep(0.001)
    for _ in range(20):
        await background.command("PING")
    following.cancel()
    assert looks == [True] * 3
    await group_heartbeat(background, "s", record).leave()
    await group_heartbeat(background, "s", lambda: record("g2")).send_heartbeat()
    await fleet.refresh()
    assert not fleet.is_idle, "one has left"


async def test_the_fleet_is_looked_after_while_redis_does_not_answer(
    background: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_view, "PERIOD_S", 0.001)
    looks = 0
    enough = asyncio.Event()

    class Hung(FleetView):
        async def refresh(self) -> None:
            await asyncio.Event().wait()

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            enough.set()

    following = asyncio.create_task(Hung(background, "s").run(look, lambda: False))
    async with asyncio.timeout(30):
        await enough.wait()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


async def test_flushall_empties_no_fleet_before_the_next_heartbeats(background: BackgroundClient) -> None:
    """Also not the one of a gateway that finds the sentinel written again by another."""
    now_s = 100.0
    emptied: list[int] = []

    def view_of(i: int) -> FleetView:
        return FleetView(background, "s", lambda: asyncio.sleep(0), lambda: emptied.append(i), clock=lambda: now_s)

    fleets = [view_of(i) for i in range(2)]
    heartbeat = group_heartbeat(background, "s", record)
    await heartbeat.send_heartbeat()
    for fleet in fleets:
        await fleet.refresh()
    assert emptied == [], "a first start"
    await background.command("FLUSHALL")
    for moment_s in (100.5, 102.0, 103.4):
        now_s = moment_s
        for fleet in fleets:
            await fleet.refresh()
            assert set(fleet.records) == {"g1"}
    assert emptied == [0, 1], "each is told once, whoever was first"
    now_s = 103.6
    for fleet in fleets:
        await fleet.refresh()
        assert fleet.records == {}, "it had its time"
    await heartbeat.send_heartbeat()
    for fleet in fleets:
        await fleet.refresh()
        assert set(fleet.records) == {"g1"}


async def test_an_emptied_redis_is_reported_though_the_read_fails(background: BackgroundClient) -> None:
    emptied: list[bool] = []
    fleet = FleetView(background, "s", lambda: asyncio.sleep(0), lambda: emptied.append(True))
    await group_heartbeat(background, "s", record).send_heartbeat()
    await fleet.refresh()
    await background.command("FLUSHALL")
    await background.command("SET", keys.SENTINEL, "another gateway's")
    await background.command("CONFIG", "SET", "maxmemory", "1")
    await fleet.refresh()
    assert fleet.redis_unavailable
    await background.command("CONFIG", "SET", "maxmemory", "0")
    await fleet.refresh()
    assert emptied == [True] and not fleet.redis_unavailable


async def test_an_emptied_redis_that_takes_no_writes_empties_no_fleet(background: BackgroundClient) -> None:
    """The sentinel was seeded again before the memory was full, the groups' set was not: nobody is listed as gone."""
    now_s = 100.0
    fleet = FleetView(background, "s", lambda: asyncio.sleep(0), clock=lambda: now_s)
    heartbeat = group_heartbeat(background, "s", record)
    await heartbeat.send_heartbeat()
    await fleet.refresh()
    await background.command("FLUSHALL")
    await fleet.refresh()
    assert await background.command("EXISTS", keys.SENTINEL)
    await background.command("CONFIG", "SET", "maxmemory", "1")
    for moment_s in (100.5, 104.0, 200.0):
        now_s = moment_s
        await fleet.refresh()
        assert fleet.redis_unavailable
        assert set(fleet.records) == {"g1"}, "nobody has left"
    await background.command("CONFIG", "SET", "maxmemory", "0")
    await heartbeat.send_heartbeat()
    await fleet.refresh()
    assert not fleet.redis_unavailable
    assert set(fleet.records) == {"g1"}


async def test_a_record_that_cannot_be_read_hides_only_itself(background: BackgroundClient) -> None:
    await background.command("SET", keys.SENTINEL, "1")
    await group_heartbeat(background, "s", record).send_heartbeat()
    await background.command("SADD", keys.groups("s"), "odd")
    await background.command("SET", keys.group("s", "odd"), b"\x01")
    fleet = FleetView(background, "s")
    await fleet.refresh()
    assert set(fleet.records) == {"g1"}


class Counted:
    """A client whose round trips are counted."""

    def __init__(self, client: BackgroundClient) -> None:
        self._client = client
        self.calls: list[str] = []

    async def command(self, *parts: Part) -> object:
        self.calls.append(str(parts[0]))
        return await self._client.command(*parts)

    async def pipeline(self, commands: list[list[Part]]) -> list[object]:
        self.calls.append(" ".join(str(parts[0]) for parts in commands))
        return await self._client.pipeline(commands)


async def test_reading_a_fleet_that_stays_is_one_round_trip(background: BackgroundClient) -> None:
    await background.command("SET", keys.SENTINEL, "1")
    counted = Counted(background)
    fleet = FleetView(counted, "s")
    look, new, remove = "SMEMBERS MGET", "MGET", "SET SREM"

    async def calls() -> list[str]:
        counted.calls.clear()
        await fleet.refresh()
        return counted.calls

    assert await calls() == [look]
    await group_heartbeat(background, "s", record).send_heartbeat()
    assert await calls() == [look, new]
    await group_heartbeat(background, "s", lambda: record(waiting=3)).send_heartbeat()
    assert await calls() == [look]
    assert fleet.records == {"g1": record(waiting=3)}
    later = group_heartbeat(background, "s", lambda: record("g2"))
    await later.send_heartbeat()
    assert await calls() == [look, new]
    assert set(fleet.records) == {"g1", "g2"}
    await later.leave()
    await calls()
    assert await calls() == [look]
    assert set(fleet.records) == {"g1"}
    await background.command("DEL", keys.group("s", "g1"))  # what its TTL does
    assert await calls() == [look, remove]
    assert await calls() == [look]
    assert fleet.records == {}


async def test_the_first_start_failure_stays(background: BackgroundClient) -> None:
    assert await read_start_failure(background, "s") is None
    first = StartFailure(part="group a", message="no room", flag="--kv-cache-memory-bytes")
    await report_start_failure(background, "s", first)
    await report_start_failure(background, "s", StartFailure(part="group b", message="later"))
    assert await read_start_failure(background, "s") == first


async def test_groups_are_ordered_to_forget_their_prefix_caches(background: BackgroundClient) -> None:
    """Each obeys an order once, says so in its record, and the one who ordered waits for that."""
    forgotten: list[str] = []

    async def forget() -> None:
        forgotten.append("now")

    follower = ResetFollower(background, "resets", forget, lambda: None, Announcements())
    heartbeat = group_heartbeat(background, "resets", lambda: record(prefix_resets=follower.done))
    await follower.look()
    await heartbeat.send_heartbeat()
    fleet = FleetView(background, "resets", reseed=lambda: asyncio.sleep(0))
    assert await fleet.reset_prefix_caches(within_s=0.0) == ["g1"] and not forgotten
    for _ in range(2):
        await follower.look()
    assert len(forgotten) == 1
    ordering = asyncio.create_task(fleet.reset_prefix_caches())
    while not ordering.done():
        await follower.look()
        await heartbeat.send_heartbeat()
    assert await ordering == [] and len(forgotten) == 2
