"""The identity of an application under Serve, without Ray: id and secret, lease, Redis, and replicas that join."""

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.wire import identity
from tandem.cluster.wire.identity import Membership, ServiceIdentity
from tandem.cluster.wire.private_redis import PrivateRedis
from tandem.cluster.wire.service_facts import ServiceFacts, new_identity
from tandem.configs.environment import short_temp_folder

FACTS = ServiceFacts(single_node=True, device="cpu")


class Identity(ServiceIdentity):
    """Keeps its Redis in a folder of the test's."""

    def __init__(
        self, folder: Path, service_id: str = "a1b2c3d4e5f6", secret: str = "ab" * 32, lease_s: float = 60.0
    ) -> None:
        self.now_s = 100.0
        self.folder = folder
        self.exited = asyncio.Event()
        super().__init__(service_id, secret, lease_s=lease_s, clock=lambda: self.now_s)

    def _exit(self) -> None:
        self.exited.set()

    def _folder(self) -> Path:
        return self.folder / "r"


@pytest.fixture
async def actor() -> AsyncIterator[Identity]:
    with tempfile.TemporaryDirectory(prefix="tr-", dir=short_temp_folder()) as name:
        actor = Identity(Path(name))
        yield actor
        actor._ending.cancel()
        await actor.end()
        assert list(Path(name).iterdir()) == [], "nothing of it is left"


def client(url: str) -> BackgroundClient:
    return BackgroundClient(url, timeout_s=20.0, retries=0)


async def test_the_lease_is_over_when_nobody_renews_it(actor: Identity) -> None:
    assert await actor.renew() == ("a1b2c3d4e5f6", "ab" * 32)
    actor.now_s += 59.0
    assert not actor.is_over()
    assert await actor.renew() == ("a1b2c3d4e5f6", "ab" * 32)
    actor.now_s += 59.0
    assert not actor.is_over()
    actor.now_s += 1.0
    assert actor.is_over()


async def test_who_asks_from_outside_learns_where_redis_is(actor: Identity) -> None:
    assert await actor.whereabouts() == ("a1b2c3d4e5f6", None)
    private = await actor.redis_url(on_loopback=True)
    assert await actor.whereabouts() == ("a1b2c3d4e5f6", private)
    await actor.note_redis("redis://theirs")
    assert (await actor.whereabouts())[1] == "redis://theirs"
    await actor.note_redis(None)
    assert (await actor.whereabouts())[1] == private, "a new version has no redis_url any more"


async def test_an_actor_that_nobody_asks_ends(tmp_path: Path) -> None:
    """Ray has restarted it after the last replica was gone."""
    restarted = Identity(tmp_path, lease_s=0.2)
    (tmp_path / "r").mkdir()
    restarted.now_s += 0.2
    async with asyncio.timeout(30):
        await restarted.exited.wait()
    assert not (tmp_path / "r").exists()


async def test_one_that_cannot_end_its_redis_still_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    actor = Identity(tmp_path, lease_s=0.2)

    async def end() -> None:
        raise OSError("the server does not stop")

    monkeypatch.setattr(actor, "end", end)
    actor.now_s += 0.2
    async with asyncio.timeout(30):
        await actor.exited.wait()
    assert "the server does not stop" in caplog.text


async def test_who_comes_while_it_ends_is_refused(actor: Identity) -> None:
    """Not told of a server whose data is about to be removed."""
    await actor.redis_url(True)
    assert isinstance(private := actor._redis, PrivateRedis)
    ending = asyncio.create_task(actor.end())
    asked = asyncio.create_task(actor.redis_url(True))
    for call in (asked, asyncio.create_task(actor.renew())):
        with pytest.raises(RuntimeError, match="a1b2c3d4e5f6 has ended"):
            await call
    await ending
    assert actor._redis is None and not private.is_kept


async def test_one_redis_for_all_who_ask(actor: Identity) -> None:
    urls = await asyncio.gather(*(actor.redis_url(True) for _ in range(3)))
    assert len(set(urls)) == 1 and "@127.0.0.1:" in urls[0]


async def test_a_redis_on_loopback_moves_with_its_data_when_another_machine_asks(
    actor: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity.ray.util, "get_node_ip_address", lambda: "127.0.0.2")
    before = await actor.redis_url(True)
    redis = client(before)
    await redis.command("SET", "tenant", "acme")
    await redis.close()
    after = await actor.redis_url(False)
    assert "@127.0.0.2:" in after
    assert await actor.redis_url(True) == after, "which is for all"
    redis = client(after)
    assert await redis.command("GET", "tenant") == b"acme"
    await redis.close()


async def test_one_that_is_made_again_takes_up_what_is_left(actor: Identity) -> None:
    """As after kill -9: Ray makes it with the same arguments."""
    redis = client(await actor.redis_url(True))
    await redis.command("SET", "tenant", "acme")
    await redis.close()
    assert actor._redis is not None
    await actor._redis.stop(keep_data=True)
    actor._redis = None
    again = Identity(actor.folder)
    try:
        redis = client(await again.redis_url(True))
        assert await redis.command("GET", "tenant") == b"acme"
        await redis.close()
    finally:
        again._ending.cancel()
        await again.end()


async def test_the_url_is_told_while_the_server_starts_again(actor: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    url = await actor.redis_url(True)
    private = actor._redis
    assert isinstance(private, PrivateRedis)
    plain_start = RedisServer.start

    def start(server: RedisServer) -> None:
        begun.set()
        assert go_on.wait(60)
        plain_start(server)

    monkeypatch.setattr(RedisServer, "start", start)
    try:
        private._server.stop()
        assert await asyncio.to_thread(begun.wait, 30), "its watch has seen it"
        async with asyncio.timeout(20):
            assert await actor.redis_url(True) == url
        assert not go_on.is_set() and private.is_kept
        go_on.set()
        async with asyncio.timeout(30):
            while not private._server.is_alive():
                await asyncio.sleep(0.02)
    finally:
        go_on.set()


class Method:
    """A method of an actor's handle."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Cluster:
    """Actors by name, as Ray keeps them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.actors: dict[str, Identity] = {}
        self.made: list[Identity] = []
        self._loop = asyncio.get_running_loop()

    def actor(self, app: str, facts: ServiceFacts) -> Any:
        if app not in self.actors:
            known = (facts.service_id, facts.secret) if facts.service_id else new_identity()
            self.actors[app] = asyncio.run_coroutine_threadsafe(self._make(*known), self._loop).result(30)
            self.made.append(self.actors[app])
        found = self.actors[app]
        return type("Handle", (), {"renew": Method(found.renew), "redis_url": Method(found.redis_url)})

    async def _make(self, service_id: str, secret: str) -> Identity:
        """On the loop, as Ray calls the constructor of an actor with async methods."""
        return Identity(self.folder, service_id, secret)


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    monkeypatch.setattr(identity, "identity_actor", cluster.actor)
    yield cluster
    for actor in cluster.made:
        actor._ending.cancel()


async def test_replicas_of_all_versions_of_an_application_are_one_service(cluster: Cluster) -> None:
    members = [Membership(app, FACTS) for app in ("tandem", "tandem", "other")]
    first, again, other = [await member.join() for member in members]
    assert first == again and first.service_id and first.secret
    assert other.service_id != first.service_id and other.secret != first.secret
    for member in members:
        member.leave()


async def test_facts_with_an_identity_are_taken_as_they_are(cluster: Cluster) -> None:
    """Under `tandem serve` the launcher has made it."""
    facts = ServiceFacts(single_node=True, device="cpu", service_id="mine", secret="cd" * 32, redis_url="unix:///r")
    member = Membership("tandem", facts)
    assert await member.join() == facts
    assert (await member.open_redis()).url == "unix:///r"
    assert not cluster.made
    member.leave()


async def test_an_identity_that_is_lost_is_made_again_by_those_who_know_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "RENEW_PERIOD_S", 0.01)
    member = Membership("tandem", FACTS)
    facts = await member.join()
    lost = cluster.actors.pop("tandem")
    async with asyncio.timeout(30):
        while "tandem" not in cluster.actors:
            await asyncio.sleep(0.01)
    assert cluster.actors["tandem"] is not lost
    later = Membership("tandem", FACTS)
    assert await later.join() == facts, "who comes later is of the same service"
    member.leave()
    later.leave()
