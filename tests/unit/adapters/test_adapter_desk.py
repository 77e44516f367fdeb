"""Loads, switches and unloads: checked before listed, atomic, refused with a reason and then as before."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from cluster.adapters.desk import AdapterDesk
from cluster.adapters.entries import AdapterEntry
from cluster.adapters.registry import AdapterRegistry
from cluster.adapters.running import RunningAdapters
from cluster.adapters.sources import Module
from cluster.coordination.client import BackgroundClient, RedisAway
from configs.errors import SettingsError, TandemError
from workers.errors import RequestRefused
from workers.messages import AdapterRef

CONTENT = {"/a/one": "1" * 64, "/a/two": "2" * 64, "/copy/one": "1" * 64}


def check(source: str) -> str:
    if source not in CONTENT:
        raise TandemError("tensor q holds NaN")
    return CONTENT[source]


class Away:
    """A Redis that is away as long as `away`."""

    def __init__(self) -> None:
        self.away = True

    async def command(self, *parts: object) -> object:
        if self.away:
            raise RedisAway("away")
        return 1

    async def pipeline(self, commands: list[list[object]]) -> list[object]:
        if self.away:
            raise RedisAway("away")
        return [1] * len(commands)


@pytest.fixture
def desk() -> Iterator[AdapterDesk]:
    desk = AdapterDesk(AdapterRegistry(None, "demo"), check, ("demo",), wall_clock=lambda: 100.0)
    yield desk
    desk.close()


async def refusal(desk: AdapterDesk, name: str, source: str, **more: object) -> RequestRefused:
    before = dict(desk.registry.entries)
    with pytest.raises(RequestRefused) as caught:
        await desk.load(name, source, **more)  # type: ignore[arg-type]
    assert dict(desk.registry.entries) == before, "all is as before"
    return caught.value


async def test_a_load_lists_the_version(desk: AdapterDesk) -> None:
    assert await desk.load("pirate", "/a/one") == "listed"
    found = desk.entry("pirate", "anyone")
    assert found == AdapterEntry(name="pirate", digest="1" * 64, source="/a/one", listed_at_s=100.0)
    assert found is not None and found.ref == AdapterRef(name="pirate", digest="1" * 64, source="/a/one")


async def test_the_same_content_again_changes_nothing(desk: AdapterDesk) -> None:
    await desk.load("pirate", "/a/one")
    entry = desk.registry.entries["pirate"]
    assert await desk.load("pirate", "/a/one") == "unchanged"
    assert desk.registry.entries["pirate"] is entry
    assert await desk.load("pirate", "/copy/one") == "unchanged", "what it holds counts, not where it lies"
    assert desk.registry.entries["pirate"].source == "/copy/one"


async def test_other_content_needs_to_be_asked_for(desk: AdapterDesk) -> None:
    await desk.load("pirate", "/a/one", tenant="acme", pinned=True)
    refused = await refusal(desk, "pirate", "/a/two")
    assert (refused.status, refused.param) == (400, "lora_name")
    assert "load_inplace" in str(refused)
    assert await desk.load("pirate", "/a/two", inplace=True) == "switched"
    entry = desk.registry.entries["pirate"]
    assert (entry.digest, entry.tenant, entry.pinned) == ("2" * 64, "acme", True), "what was not said stays"


async def test_what_cannot_be_served_is_refused_with_the_reason_and_the_old_stays(desk: AdapterDesk) -> None:
    refused = await refusal(desk, "pirate", "/a/broken")
    assert (refused.status, refused.param, str(refused)) == (400, "lora_path", "tensor q holds NaN")
    await desk.load("pirate", "/a/one")
    await refusal(desk, "pirate", "/a/broken", inplace=True)
    assert desk.counts == {"listed": 1, "switched": 0, "unchanged": 0, "refused": 2, "unlisted": 0}


@pytest.mark.parametrize("name", ["demo", "a:b", "", "x" * 200])
async def test_names_that_no_adapter_can_have(desk: AdapterDesk, name: str) -> None:
    assert (await refusal(desk, name, "/a/one")).param == "lora_name"


async def test_a_file_that_cannot_be_read_is_refused() -> None:
    def denied(source: str) -> str:
        raise PermissionError(13, "Permission denied", source)

    desk = AdapterDesk(AdapterRegistry(None, "demo"), denied, ("demo",))
    refused = await refusal(desk, "pirate", "/a/one")
    assert refused.status == 400
    assert "/a/one" not in str(refused)
    desk.close()


async def test_unload_and_pin(desk: AdapterDesk) -> None:
    await desk.load("pirate", "/a/one")
    assert await desk.pin("pirate", True)
    assert desk.registry.entries["pirate"].pinned
    assert await desk.pin("pirate", False)
    assert not desk.registry.entries["pirate"].pinned
    assert not await desk.pin("shout", True)
    assert await desk.unload("pirate")
    assert not await desk.unload("pirate")
    assert desk.entry("pirate", "anyone") is None


async def test_a_tenant_has_no_more_adapters_than_it_may() -> None:
    limits = {"acme": 1}
    desk = AdapterDesk(AdapterRegistry(None, "demo"), check, ("demo",), limit=limits.get)
    await desk.load("one", "/a/one", tenant="acme")
    refused = await refusal(desk, "two", "/a/two", tenant="acme")
    assert refused.param == "tenant"
    await desk.load("one", "/a/two", tenant="acme", inplace=True)
    await desk.load("two", "/a/two", tenant="other")
    await desk.load("three", "/a/two")
    assert [entry.name for entry in desk.visible("acme")] == ["one", "three"]
    assert [entry.name for entry in desk.visible("nobody")] == ["three"]
    desk.close()


async def test_of_two_loads_at_once_one_is_above_the_limit(redis: BackgroundClient) -> None:
    desks = [AdapterDesk(AdapterRegistry(redis, "demo"), check, ("demo",), limit=lambda _: 3) for _ in range(2)]
    await desks[0].load("old", "/a/one", tenant="acme")
    await desks[1].load("public", "/a/one")
    loads = [desk.load(f"{n}{place}", "/a/one", tenant="acme") for place, desk in enumerate(desks) for n in "ab"]
    done = await asyncio.gather(*loads, return_exceptions=True)
    assert sorted(str(one) for one in done if not isinstance(one, RequestRefused)) == ["listed"] * 2
    assert {one.param for one in done if isinstance(one, RequestRefused)} == {"tenant"}
    for desk in desks:
        await desk.registry.refresh()
        assert len(desk.visible("acme")) == 4, "three of its own, one of everybody's"
        desk.close()


async def test_without_redis_the_list_cannot_be_changed_and_goes_on() -> None:
    redis = Away()
    desk = AdapterDesk(AdapterRegistry(redis, "demo"), check, ("demo",))
    desk.registry.keep(AdapterEntry(name="pirate", digest="1" * 64, source="/a/one"))
    for change in (desk.load("shout", "/a/two"), desk.unload("pirate"), desk.pin("pirate", True)):
        with pytest.raises(RequestRefused) as caught:
            await change
        assert (caught.value.status, caught.value.code) == (503, "service_unavailable")
    assert desk.entry("pirate", "anyone") is not None
    redis.away = False
    assert await desk.load("shout", "/a/two") == "listed"
    desk.close()


async def test_modules_are_listed_and_without_redis_kept_here() -> None:
    desk = AdapterDesk(AdapterRegistry(Away(), "demo"), check, ("demo",))
    await desk.list_modules([Module("pirate", "/a/one"), Module("shout", "/a/two")])
    assert set(desk.registry.entries) == {"pirate", "shout"}
    with pytest.raises(SettingsError, match="odd: /a/broken: tensor q holds NaN") as caught:
        await desk.list_modules([Module("odd", "/a/broken")])
    assert caught.value.flag == "--lora-modules"
    desk.close()


async def test_a_change_by_others_meanwhile_is_taken_into_account() -> None:
    """While the content is checked, somebody else takes the name."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(source: str) -> str:
        begun.set()
        assert go_on.wait(30)
        return check(source)

    registry = AdapterRegistry(None, "demo")
    desk = AdapterDesk(registry, slow, ("demo",))
    loading = asyncio.create_task(desk.load("pirate", "/a/one"))
    assert await asyncio.to_thread(begun.wait, 30)
    await registry.replace(None, AdapterEntry(name="pirate", digest="9" * 64, source="/x"), "pirate")
    go_on.set()
    with pytest.raises(RequestRefused, match="taken by other content"):
        await loading
    desk.close()


async def test_an_idle_version_is_one_that_no_request_uses() -> None:
    running = RunningAdapters()
    old, new = (AdapterRef(name="pirate", digest=digest * 64, source="/a") for digest in "12")
    with running.request(None):
        assert await running.wait_idle(old, 0.0)
    with running.request(new):
        with running.request(old), running.request(old):
            waiting = asyncio.create_task(running.wait_idle(old, 5.0))
            assert (running.of(old), running.of(new)) == (2, 1)
            assert not await running.wait_idle(old, 0.001)
            assert not waiting.done()
        assert await waiting, "another version of it still runs"
    assert running.of(old) == running.of(new) == 0
