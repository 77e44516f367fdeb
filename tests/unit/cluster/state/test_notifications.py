"""Announcements over a real Redis that is killed, frozen, absent, moved, or refuses them: waits end, polls go on."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import notifications as module
from tandem.cluster.state.notifications import Announcements, Changes, announcement
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable, published
from tests.support.passing_time import pass_time
from tests.support.subscribed import subscribed

DEADLINE_S = 20.0
LONG_S = 60.0


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries often, and soon takes silence for an end; a close that is waited for in vain takes long."""
    monkeypatch.setattr(module, "CLOSE_S", DEADLINE_S)
    monkeypatch.setattr(module, "MOST_PAUSE_S", 0.2)
    monkeypatch.setattr(module, "SILENT_S", 1.0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def heard(changes: Changes, key: str = "k") -> None:
    """An end of a wait that its timeout is not the cause of."""
    async with asyncio.timeout(DEADLINE_S):
        await changes.wait(key, LONG_S)


async def test_a_change_ends_the_wait_for_its_key_only(server: RedisServer, redis: BackgroundClient) -> None:
    async with subscribed(server.url, "k", "other") as changes:
        waiting = asyncio.create_task(changes.wait("other", LONG_S))
        for _ in range(3):
            await redis.command(*announcement("k"))
            await heard(changes)
        await redis.pipeline([["SET", "k", "1"], announcement("k")])
        await heard(changes)
        assert not waiting.done()
        await redis.command(*announcement("other"))
        await asyncio.wait_for(waiting, DEADLINE_S)
        await changes.wait("k", 0.01)  # ends, though nothing has changed


async def test_a_change_between_two_waits_ends_the_next_one(server: RedisServer, redis: BackgroundClient) -> None:
    async with subscribed(server.url, "k", "last") as changes:
        for key in ("k", "last"):
            await redis.command(*announcement(key))
        await heard(changes, "last")  # so "k" has come, too
        async with asyncio.timeout(DEADLINE_S):
            await changes.wait("k", LONG_S)


async def test_silence_between_changes_is_not_an_end(
    server: RedisServer, redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_S", DEADLINE_S)  # nor is a machine that stands still for a moment

    async def asked() -> int:
        return str(await redis.command("CLIENT", "LIST", "TYPE", "pubsub")).count("cmd=ping")

    async with subscribed(server.url, "k") as changes:
        async with asyncio.timeout(LONG_S):
            for _ in range(2):
                pass_time(module.SILENT_S)
                while not await asked():
                    await asyncio.sleep(0.005)
                assert await asked() == 1, "it was asked for a sign of life, over the same connection"
        assert changes.is_subscribed
        await redis.command(*announcement("k"))
        await heard(changes)


async def test_a_restart_wakes_everyone_twice(server: RedisServer, redis: BackgroundClient) -> None:
    async with subscribed(server.url, "k") as changes:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await heard(changes)
        await until(lambda: not changes.is_subscribed)
        server.stop()
        server.start()
        await heard(changes)
        assert changes.is_subscribed
        await redis.command(*announcement("k"))
        await heard(changes)


async def test_a_frozen_server_is_no_longer_trusted_and_subscribed_again_later(
    server: RedisServer, redis: BackgroundClient
) -> None:
    async with subscribed(server.url, "k") as changes:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        await heard(changes)
        assert not changes.is_subscribed
        os.kill(server.pid, signal.SIGCONT)
        await until(lambda: changes.is_subscribed)
        await changes.wait("k", 0.0)
        await redis.command(*announcement("k"))
        await heard(changes)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tandem.redis"]


async def test_a_server_that_comes_later_is_subscribed(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.redis")
    server.stop()
    changes = Changes(lambda: server.url, ["k"])
    changes.start()
    await changes.wait("k", 1.0)
    assert not changes.is_subscribed
    server.start()
    await until(lambda: changes.is_subscribed)
    await heard(changes)
    await changes.close()
    assert len(said(caplog)) == 1, "all tries are one line"


async def test_a_refusal_is_said_once_and_nothing_else_happens(
    server: RedisServer, redis: BackgroundClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tandem.redis")
    await redis.command("ACL", "SETUSER", "deaf", "on", ">secret", "~*", "+@all", "resetchannels")
    tried = 0

    def subscribe(*given: Any) -> AsyncGenerator[str | None]:
        nonlocal tried
        tried += 1
        return published(*given)

    changes = Changes(lambda: f"unix://deaf@{server.socket_path}?password=secret", ["k"], subscribe)
    changes.start()
    await until(lambda: tried >= 4)
    assert not changes.is_subscribed
    await changes.close()
    (line,) = said(caplog)
    assert "permission" in line


@pytest.mark.parametrize("state", ["subscribed", "frozen", "absent", "never started"])
async def test_close_leaves_nothing_behind(server: RedisServer, redis: BackgroundClient, state: str) -> None:
    before = asyncio.all_tasks()
    changes = Changes(lambda: server.url, ["k"])
    if state != "never started":
        changes.start()
        await until(lambda: changes.is_subscribed)
    assert server.pid is not None
    if state == "frozen":
        os.kill(server.pid, signal.SIGSTOP)
        await until(lambda: not changes.is_subscribed)  # and it tries again
    elif state == "absent":
        server.stop()
        await until(lambda: not changes.is_subscribed)
    async with asyncio.timeout(module.CLOSE_S):
        await changes.close()
    assert asyncio.all_tasks() <= before
    assert not changes.is_subscribed
    await changes.wait("k", 0.0)
    if state == "subscribed":
        async with asyncio.timeout(DEADLINE_S):
            while (await redis.command("PUBSUB", "NUMSUB", "k"))[1]:
                await asyncio.sleep(0.005)


class Scripted:
    """A subscription whose messages the test sends. `opened`: its URLs, in order."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.messages: asyncio.Queue[str | Exception | None] = asyncio.Queue()

    async def __call__(self, url: str, channels: list[str], silent_s: float) -> AsyncGenerator[str | None]:
        self.opened.append(url)
        assert channels == ["k"]
        yield None
        while True:
            message = await self.messages.get()
            if isinstance(message, Exception):
                raise message
            yield message


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


async def test_a_redis_that_moved_is_followed(scripted: Scripted) -> None:
    url = "a"
    changes = Changes(lambda: url, ["k"], scripted)
    changes.start()
    await until(lambda: changes.is_subscribed)
    url = "b"
    scripted.messages.put_nowait(None)
    await until(lambda: scripted.opened == ["a", "b"] and changes.is_subscribed)
    await changes.close()


async def test_a_burst_is_few_looks_and_its_end_is_seen(scripted: Scripted) -> None:
    changes = Changes(lambda: "a", ["k"], scripted)
    changes.start()
    await heard(changes)
    loop, looks, sent = asyncio.get_running_loop(), [], 0

    async def look() -> None:
        while True:
            await changes.wait("k", LONG_S)
            looks.append((loop.time(), sent))

    looking = asyncio.create_task(look())
    began_s = loop.time()
    for sent in range(1, 201):  # noqa: B007
        scripted.messages.put_nowait("k")
        await asyncio.sleep(0.001)
    await until(lambda: looks and looks[-1][1] == 200)
    assert len(looks) <= (loop.time() - began_s) / module.LEAST_PERIOD_S + 2
    looking.cancel()
    await changes.close()


async def test_a_cancellation_that_the_client_library_turns_into_an_error_ends_it_all_the_same(
    scripted: Scripted,
) -> None:
    async def deaf(*given: Any) -> AsyncGenerator[str | None]:
        try:
            async for key in scripted(*given):
                yield key
        except asyncio.CancelledError:
            raise RedisUnavailable("no permission") from None

    changes = Changes(lambda: "a", ["k"], deaf)
    changes.start()
    await until(lambda: changes.is_subscribed)
    async with asyncio.timeout(module.CLOSE_S / 2):
        await changes.close()
    assert scripted.opened == ["a"]


async def test_whatever_is_raised_is_tried_again(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    changes = Changes(lambda: "a", ["k"], scripted)
    changes.start()
    for error in (ValueError("odd"), RedisUnavailable("gone"), ValueError("odd")):
        opened = len(scripted.opened)
        await until(lambda: changes.is_subscribed)
        scripted.messages.put_nowait(error)
        await until(lambda: len(scripted.opened) > opened)  # noqa: B023
    await changes.close()


async def test_without_announcements_a_wait_takes_its_time() -> None:
    nobody = Announcements()
    assert not nobody.is_subscribed
    await nobody.wait("k", 0.0)
