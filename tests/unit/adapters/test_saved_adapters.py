"""The list of adapters in --state-dir: a new Redis has it again, tenants and pins too; an older file undoes nothing."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.build_adapters import open_adapter_service, start_adapter_tasks
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient
from tests.unit.adapters.test_adapter_list import entry
from tests.unit.adapters.test_adapter_service import Unavailable
from tests.unit.adapters.test_build_adapters import PIRATE, SHOUT, opened, settings


async def start_anew(redis: BackgroundClient) -> None:
    """The service has ended, and its private Redis with it."""
    await redis.command("FLUSHALL")
    await redis.command("SET", keys.SENTINEL, "2")


def file_of(folder: Path) -> Path:
    (file,) = folder.glob("adapters-*.json")
    return file


async def test_the_list_outlives_a_service_and_its_redis(redis: BackgroundClient, tmp_path: Path) -> None:
    async with opened(redis, state_dir=str(tmp_path)) as adapter_service:
        await adapter_service.load("shout", str(SHOUT), tenant="acme", pinned=True)
        await adapter_service.load("pirate", str(SHOUT), tenant="acme", pinned=True, inplace=True)
        await adapter_service.adapters.save()
    assert file_of(tmp_path).stat().st_mode & 0o777 == 0o600
    await start_anew(redis)
    async with opened(redis, "s2", state_dir=str(tmp_path)) as adapter_service:
        shown = {e.name: (e.source, e.tenant, e.pinned) for e in adapter_service.adapters.entries.values()}
        assert shown == {"shout": (str(SHOUT), "acme", True), "pirate": (str(PIRATE), "acme", True)}, (
            "--lora-modules name another source, and nothing else"
        )
    other = AdapterList(redis, "demo")
    await other.refresh()
    assert set(other.entries) == {"shout", "pirate"}, "it is in Redis, for groups and commands"


async def test_it_is_saved_by_itself(redis: BackgroundClient, tmp_path: Path) -> None:
    watched = settings(state_dir=str(tmp_path))
    adapter_service = await open_adapter_service(watched, redis, "s1")
    assert adapter_service is not None
    tasks = start_adapter_tasks(adapter_service, watched, redis, "s1")
    try:
        async with asyncio.timeout(30):
            while not list(tmp_path.glob("adapters-*.json")):
                await asyncio.sleep(0.001)
    finally:
        for task in tasks:
            task.cancel()
        adapter_service.close()
    assert b"pirate" in file_of(tmp_path).read_bytes()


async def test_a_list_that_is_in_redis_is_later_than_the_file(redis: BackgroundClient, tmp_path: Path) -> None:
    none = settings(state_dir=str(tmp_path), lora_modules=None)
    async with opened(redis, state_dir=str(tmp_path)) as adapter_service:
        await adapter_service.adapters.save()
        await adapter_service.unload("pirate")  # and nobody saves any more
    for life in ("s2", "s3"):
        later = await open_adapter_service(none, redis, life)
        assert later is not None
        assert not later.adapters.entries, "what was removed stays removed"
        later.close()


async def test_without_redis_the_kept_list_is_served_and_written_later(redis: BackgroundClient, tmp_path: Path) -> None:
    async with opened(redis, state_dir=str(tmp_path)) as adapter_service:
        await adapter_service.adapters.save()
    await start_anew(redis)
    async with opened(Unavailable(), "s2", state_dir=str(tmp_path), lora_modules=None) as adapter_service:
        assert adapter_service.entry("pirate", "anyone") is not None
        adapter_service.adapters.map.redis = redis
        await adapter_service.adapters.refresh()
    async with opened(redis, "s2", lora_modules=None) as other:
        assert other.entry("pirate", "anyone") is not None


async def test_what_cannot_be_read_is_ignored_and_said(
    redis: BackgroundClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = AdapterList(redis, "demo", tmp_path)
    await adapters.replace(None, entry(), "pirate")
    await adapters.refresh()
    await adapters.save()
    file = file_of(tmp_path)
    file.write_bytes(file.read_bytes()[:-3])
    fresh = AdapterList(None, "demo", tmp_path)
    await fresh.load()
    assert not fresh.entries
    fresh.keep(entry("shout"))
    assert "cannot be read and is ignored" in caplog.text
    await fresh.save()
    assert not file.read_bytes().endswith(b"]}"), "nothing is known: nothing is written over it"


async def test_a_file_of_another_model_is_not_taken(redis: BackgroundClient, tmp_path: Path) -> None:
    adapters = AdapterList(redis, "demo", tmp_path)
    await adapters.replace(None, entry(), "pirate")
    await adapters.refresh()
    await adapters.save()
    other = AdapterList(redis, "other")
    other._file = file_of(tmp_path)
    await other.load()
    assert not other.is_known
    found = msgspec.json.decode(file_of(tmp_path).read_bytes())
    assert found["adapters"][0] | {"listed_at_s": 0.0} == msgspec.to_builtins(replace(entry(), listed_at_s=0.0))
