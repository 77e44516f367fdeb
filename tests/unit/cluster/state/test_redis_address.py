"""A private Redis that is replaced, with a new URL: those who use it find it again."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.fleet.fleet_view import FleetView, group_heartbeat
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import redis_client
from tandem.cluster.state.redis_client import ASK_AFTER_FAILURES, BackgroundClient, RedisUnavailable, RequestClient
from tandem.configs.environment import short_temp_folder
from tests.support.fake_group import serving

open_library = redis_client._open
ABSENT = "unix:///nowhere/redis.sock"


async def test_the_url_is_asked_for_after_some_failures_only(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Exception | str] = [ConnectionError("no replica"), ABSENT, server.url]
    asked: list[Exception | str] = []
    opened: list[Opened] = []

    async def ask() -> str:
        asked.append(answers.pop(0))
        if isinstance(asked[-1], Exception):
            raise asked[-1]
        return asked[-1]

    monkeypatch.setattr(redis_client, "_open", lambda url, **more: opened.append(Opened(url, **more)) or opened[-1])
    redis = BackgroundClient(ABSENT, retries=0, ask=ask)
    for _ in range(3 * ASK_AFTER_FAILURES):
        with pytest.raises(RedisUnavailable):
            await redis.command("PING")
    assert len(asked) == 3 and [client.url for client in opened] == [ABSENT, server.url]
    assert opened[0].is_closed and redis.url == server.url
    assert await redis.pipeline([["PING"]]) == [True]
    await redis.close()
    assert opened[1].is_closed


class Opened:
    """A client of the library whose end is noted."""

    def __init__(self, url: str, **more: Any) -> None:
        self.url = url
        self.is_closed = False
        self._client = open_library(url, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def aclose(self) -> None:
        self.is_closed = True
        await self._client.aclose()


async def test_a_success_begins_the_count_of_failures_anew(server: RedisServer) -> None:
    asked: list[str] = []

    async def ask() -> str:
        asked.append(server.url)
        return server.url

    redis = BackgroundClient(server.url, retries=0, ask=ask)
    for _ in range(2):
        for _ in range(ASK_AFTER_FAILURES - 1):
            with pytest.raises(RedisUnavailable):
                await redis.command("NO-SUCH-COMMAND")
        await redis.command("PING")
    assert not asked
    await redis.close()


async def test_a_request_client_follows_and_forgets_the_failures_of_the_last_one(server: RedisServer) -> None:
    url = ABSENT
    client = RequestClient(lambda: url, timeout_s=20.0, clock=lambda: 0.0)
    for _ in range(3):
        with pytest.raises(RedisUnavailable):
            await client.script("return 1", (), ())
    assert client.breaker.state == "open"
    url = server.url
    assert await client.script("return 1", (), (), may_probe=False) == 1
    assert client.breaker.state == "closed"
    await client.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tr-", dir=short_temp_folder()) as name:
        yield Path(name)


async def test_fleet_and_heartbeat_go_on_with_the_redis_that_takes_its_place(folder: Path) -> None:
    servers = [RedisServer(folder / name) for name in ("one", "two")]
    servers[0].start()
    living = servers[0]

    async def ask() -> str:
        return living.url

    clients = [BackgroundClient(living.url, timeout_s=20.0, retries=0, ask=ask) for _ in range(2)]
    heartbeat = group_heartbeat(clients[0], "s", lambda: serving()["g"])
    view = FleetView(clients[1], "s", reseed=lambda: asyncio.sleep(0))
    try:
        await heartbeat.send_heartbeat()
        await view.refresh()
        assert set(view.records) == {"g"}
        servers[0].stop()
        servers[1].start()
        living = servers[1]
        for _ in range(ASK_AFTER_FAILURES):
            with pytest.raises(RedisUnavailable):
                await heartbeat.send_heartbeat()
            await view.refresh()
            assert view.redis_unavailable and set(view.records) == {"g"}
        await heartbeat.send_heartbeat()
        await view.refresh()
        assert not view.redis_unavailable and set(view.records) == {"g"}
    finally:
        for client in clients:
            await client.close()
        for server in servers:
            server.stop()
