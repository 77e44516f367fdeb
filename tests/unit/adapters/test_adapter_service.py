"""Loads, switches and unloads: checked before listed, atomic, refused with a reason and then as before."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.adapters.sources import Module
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable
from tandem.configs.errors import SettingsError, TandemError
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import AdapterRef

CONTENT = {"/a/one": "1" * 64, "/a/two": "2" * 64, "/copy/one": "1" * 64}


def check(source: str) -> str:
    if source not in CONTENT:
        raise TandemError("tensor q holds NaN")
    return CONTENT[source]


class Unavailable:
    """A Redis that fails while `unavailable`."""

    def __init__(self) -> None:
        self.unavailable = True

    async def command(self, *parts: object) -> object:
        if self.unavailable:
            raise RedisUnavailable("gone")
        return 1

    async def pipeline(self, commands: list[list[object]]) -> list[object]:
        if self.unavailable:
            raise RedisUnavailable("gone")
        return [1] * len(commands)


@pytest.fixture
def adapter_service() -> Iterator[AdapterService]:
    adapter_service = AdapterService(AdapterList(None, "demo"), check, ("demo",), wall_clock=lambda: 100.0)
    yield adapter_service
    adapter_service.close()


async def refusal(adapter_service: AdapterService, name: str, source: str, **more: object) -> RequestRefused:
    before = dict(adapter_service.adapters.entries)
    with pytest.raises(RequestRefused) as caught:
        await adapter_service.load(name, source, **more)  # type: ignore[arg-type]
    assert dict(adapter_service.adapters.entries) == before, "all is as before"
    return caught.value


async def test_a_load_lists_the_version(adapter_service: AdapterService) -> None:
    assert await adapter_service.load("pirate", "/a/one") == "listed"
    found = adapter_service.entry("pirate", "anyone")
    assert found == AdapterEntry(name="pirate", digest="1" * 64, source="/a/one", listed_at_s=100.0)
    assert found is not None and found.ref == AdapterRef(name="pirate", digest="1" * 64, source="/a/one")


async def test_the_same_content_again_changes_nothing(adapter_service: AdapterService) -> None:
    await adapter_service.load("pirate", "/a/one")
    entry = adapter_service.adapters.entries["pirate"]
    assert await adapter_service.load("pirate", "/a/one") == "unchanged"
    assert adapter_service.adapters.entries["pirate"] is entry
    assert await adapter_service.load("pirate", "/copy/one") == "unchanged", "what it holds counts, not where it lies"
    assert adapter_service.adapters.entries["pirate"].source == "/copy/one"


async def test_other_content_needs_to_be_asked_for(adapter_service: AdapterService) -> None:
    await adapter_service.load("pirate", "/a/one", tenant="acme", pinned=True)
    refused = await refusal(adapter_service, "pirate", "/a/two")
    assert (refused.status, refused.param) == (400, "lora_name")
    assert "load_inplace" in str(refused)
    assert await adapter_service.load("pirate", "/a/two", inplace=True) == "switched"
    entry = adapter_service.adapters.entries["pirate"]
    assert (entry.digest, entry.tenant, entry.pinned) == ("2" * 64, "acme", True), "what was not said stays"


async def test_what_cannot_be_served_is_refused_with_the_reason_and_the_old_stays(
    adapter_service: AdapterService,
) -> None:
    refused = await refusal(adapter_service, "pirate", "/a/broken")
    assert (refused.status, refused.param, str(refused)) == (400, "lora_path", "tensor q holds NaN")
    await adapter_service.load("pirate", "/a/one")
    await refusal(adapter_service, "pirate", "/a/broken", inplace=True)
    assert adapter_service.counts == {"listed": 1, "switched": 0, "unchanged": 0, "refused": 2, "unlisted": 0}


@pytest.mark.parametrize("name", ["demo", "a:b", "", "x" * 200])
async def test_names_that_no_adapter_can_have(adapter_service: AdapterService, name: str) -> None:
    assert (await refusal(adapter_service, name, "/a/one")).param == "lora_name"


async def test_a_file_that_cannot_be_read_is_refused() -> None:
    def denied(source: str) -> str:
        raise PermissionError(13, "Permission denied", source)

    adapter_service = AdapterService(AdapterList(None, "demo"), denied, ("demo",))
    refused = await refusal(adapter_service, "pirate", "/a/one")
    assert refused.status == 400
    assert "/a/one" not in str(refused)
    adapter_service.close()


async def test_unload_and_pin(adapter_service: AdapterService) -> None:
    await adapter_service.load("pirate", "/a/one")
    assert await adapter_service.pin("pirate", True)
    assert adapter_service.adapters.entries["pirate"].pinned
    assert await adapter_service.pin("pirate", False)
    assert not adapter_service.adapters.entries["pirate"].pinned
    assert not await adapter_service.pin("shout", True)
    assert await adapter_service.unload("pirate")
    assert not await adapter_service.unload("pirate")
    assert adapter_service.entry("pirate", "anyone") is None


async def test_a_tenant_has_no_more_adapters_than_it_may() -> None:
    limits = {"acme": 1}
    adapter_service = AdapterService(AdapterList(None, "demo"), check, ("demo",), limit=limits.get)
    await adapter_service.load("one", "/a/one", tenant="acme")
    refused = await refusal(adapter_service, "two", "/a/two", tenant="acme")
    assert refused.param == "tenant"
    await adapter_service.load("one", "/a/two", tenant="acme", inplace=True)
    await adapter_service.load("two", "/a/two", tenant="other")
    await adapter_service.load("three", "/a/two")
    assert [entry.name for entry in adapter_service.visible("acme")] == ["one", "three"]
    assert [entry.name for entry in adapter_service.visible("nobody")] == ["three"]
    adapter_service.close()


async def test_of_two_loads_at_once_one_is_above_the_limit(redis: BackgroundClient) -> None:
    adapter_services = [
        AdapterService(AdapterList(redis, "demo"), check, ("demo",), limit=lambda _: 3) for _ in range(2)
    ]
    await adapter_services[0].load("old", "/a/one", tenant="acme")
    await adapter_services[1].load("public", "/a/one")
    loads = [
        adapter_service.load(f"{n}{place}", "/a/one", tenant="acme")
        for place, adapter_service in enumerate(adapter_services)
        for n in "ab"
    ]
    done = await asyncio.gather(*loads, return_exceptions=True)
    assert sorted(str(one) for one in done if not isinstance(one, RequestRefused)) == ["listed"] * 2
    assert {one.param for one in done if isinstance(one, RequestRefused)} == {"tenant"}
    for adapter_service in adapter_services:
        await adapter_service.adapters.refresh()
        assert len(adapter_service.visible("acme")) == 4, "three of its own, one of everybody's"
        adapter_service.close()


async def test_without_redis_the_list_cannot_be_changed_and_goes_on() -> None:
    redis = Unavailable()
    adapter_service = AdapterService(AdapterList(redis, "demo"), check, ("demo",))
    adapter_service.adapters.keep(AdapterEntry(name="pirate", digest="1" * 64, source="/a/one"))
    for change in (
        adapter_service.load("shout", "/a/two"),
        adapter_service.unload("pirate"),
        adapter_service.pin("pirate", True),
    ):
        with pytest.raises(RequestRefused) as caught:
            await change
        assert (caught.value.status, caught.value.code) == (503, "service_unavailable")
    assert adapter_service.entry("pirate", "anyone") is not None
    redis.unavailable = False
    assert await adapter_service.load("shout", "/a/two") == "listed"
    adapter_service.close()


async def test_modules_are_listed_and_without_redis_kept_here() -> None:
    adapter_service = AdapterService(AdapterList(Unavailable(), "demo"), check, ("demo",))
    await adapter_service.list_modules([Module("pirate", "/a/one"), Module("shout", "/a/two")])
    assert set(adapter_service.adapters.entries) == {"pirate", "shout"}
    with pytest.raises(SettingsError, match="odd: /a/broken: tensor q holds NaN") as caught:
        await adapter_service.list_modules([Module("odd", "/a/broken")])
    assert caught.value.flag == "--lora-modules"
    adapter_service.close()


async def test_a_change_by_others_meanwhile_is_taken_into_account() -> None:
    """While the content is checked, somebody else takes the name."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(source: str) -> str:
        begun.set()
        assert go_on.wait(30)
        return check(source)

    adapters = AdapterList(None, "demo")
    adapter_service = AdapterService(adapters, slow, ("demo",))
    loading = asyncio.create_task(adapter_service.load("pirate", "/a/one"))
    assert await asyncio.to_thread(begun.wait, 30)
    await adapters.replace(None, AdapterEntry(name="pirate", digest="9" * 64, source="/x"), "pirate")
    go_on.set()
    with pytest.raises(RequestRefused, match="taken by other content"):
        await loading
    adapter_service.close()


async def test_an_idle_version_is_one_that_no_request_uses() -> None:
    service = AdapterService(AdapterList(None, "demo"), check, ("demo",))
    old, new = (AdapterRef(name="pirate", digest=digest * 64, source="/a") for digest in "12")
    with service.request(None):
        assert await service.wait_idle(old, 0.0)
    with service.request(new):
        with service.request(old), service.request(old):
            waiting = asyncio.create_task(service.wait_idle(old, 5.0))
            assert (service.requests_of(old), service.requests_of(new)) == (2, 1)
            assert not await service.wait_idle(old, 0.001)
            assert not waiting.done()
        assert await waiting, "another version of it still runs"
    assert service.requests_of(old) == service.requests_of(new) == 0
    service.close()
