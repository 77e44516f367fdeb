"""A private Redis that is replaced, with a new URL: those who use it find it again."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.fleet.fleet_view import FleetView, group_heartbeat
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state.redis_address import ASK_AFTER_FAILURES, MovingRedis
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable
from tandem.configs.environment import short_temp_folder
from tests.support.fake_group import serving


class Client:
    """Answers when its URL is the living one."""

    living = "a"

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_closed = False

    async def command(self, *parts: Any) -> Any:
        if self.url != self.living:
            raise RedisUnavailable("nobody there")
        return parts

    async def pipeline(self, commands: list[list[Any]]) -> list[Any]:
        return [await self.command(*parts) for parts in commands]

    async def close(self) -> None:
        self.is_closed = True


async def test_the_url_is_asked_for_after_some_failures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Client] = []
    answers: list[Exception | str] = [ConnectionError("no replica"), "a", "b"]
    asked: list[Exception | str] = []

    def open_client(url: str) -> Client:
        opened.append(Client(url))
        return opened[-1]

    async def ask() -> str:
        asked.append(answers.pop(0))
        if isinstance(asked[-1], Exception):
            raise asked[-1]
        return asked[-1]

    redis = MovingRedis("a", open_client, ask)
    assert await redis.command("PING") == ("PING",)
    monkeypatch.setattr(Client, "living", "b")
    for _ in range(3 * ASK_AFTER_FAILURES):
        with pytest.raises(RedisUnavailable):
            await redis.command("PING")
    assert len(asked) == 3 and [client.url for client in opened] == ["a", "b"]
    assert opened[0].is_closed
    assert await redis.pipeline([["PING"]]) == [("PING",)]
    await redis.close()
    assert opened[1].is_closed


async def test_a_url_that_was_given_is_never_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "living", "b")
    redis = MovingRedis("a", Client, None)
    for _ in range(2 * ASK_AFTER_FAILURES):
        with pytest.raises(RedisUnavailable):
            await redis.command("PING")


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

    def open_client(url: str) -> BackgroundClient:
        return BackgroundClient(url, timeout_s=20.0, retries=0)

    clients = [MovingRedis(living.url, open_client, ask) for _ in range(2)]
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
