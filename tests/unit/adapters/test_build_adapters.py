"""A gateway's start: what is durable and what the settings name is listed, once for each list of modules."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.build_adapters import open_adapter_service, start_adapter_tasks
from tandem.cluster.state.redis_client import BackgroundClient, Commands
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.schema import ServiceSettings
from tests.unit.adapters.test_adapter_service import Unavailable

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo"
PIRATE, SHOUT = (DEMO / "adapters" / name for name in ("pirate", "shout"))


def settings(**more: object) -> ServiceSettings:
    values = {"served_model_name": ["demo"], "enable_lora": True, "lora_modules": [f"pirate={PIRATE}"], **more}
    return build_settings(str(DEMO / "model"), values)


@asynccontextmanager
async def opened(redis: Commands | None, life: str = "s1", **more: object) -> AsyncIterator[AdapterService]:
    adapter_service = await open_adapter_service(settings(**more), redis, life)
    assert adapter_service is not None
    yield adapter_service
    adapter_service.close()


async def test_without_the_flag_there_is_no_adapter_service() -> None:
    assert await open_adapter_service(settings(enable_lora=False, lora_modules=None), None, "s") is None


async def test_what_was_unloaded_is_not_listed_again_by_a_gateway_that_comes_later(redis: BackgroundClient) -> None:
    async with opened(redis) as first, opened(redis) as second:
        assert set(first.adapters.entries) == set(second.adapters.entries) == {"pirate"}
        await first.unload("pirate")
        await first.load("shout", str(SHOUT))
    async with opened(redis) as third:
        assert set(third.adapters.entries) == {"shout"}, "as it was left"
    async with opened(redis, "s2") as restarted:
        assert set(restarted.adapters.entries) == {"pirate", "shout"}, "the settings ask for one, Redis kept the other"


async def test_the_settings_win_over_what_a_name_had_before_a_restart(redis: BackgroundClient) -> None:
    async with opened(redis) as adapter_service:
        digest = adapter_service.adapters.entries["pirate"].digest
        await adapter_service.pin("pirate", True)
        await adapter_service.load("pirate", str(SHOUT), inplace=True)
    async with opened(redis, "s2") as adapter_service:
        entry = adapter_service.adapters.entries["pirate"]
        assert (entry.digest, entry.source, entry.pinned) == (digest, str(PIRATE), True)


async def test_another_version_of_the_service_lists_its_own_modules(redis: BackgroundClient, tmp_path: Path) -> None:
    """The service, and what it has in Redis, live over its versions."""
    shutil.copytree(SHOUT, moved := tmp_path / "pirate")
    async with opened(redis) as adapter_service:
        before = adapter_service.adapters.entries["pirate"].digest
        await adapter_service.unload("pirate")
    async with opened(redis, lora_modules=[f"pirate={moved}", f"more={SHOUT}"]) as adapter_service:
        after = adapter_service.adapters.entries["pirate"]
        assert set(adapter_service.adapters.entries) == {"more", "pirate"} and after.source == str(moved)
        assert after.digest != before
    async with opened(redis) as adapter_service:
        assert adapter_service.adapters.entries["pirate"].digest == before, "the first version was deployed again"
    async with opened(redis, served_model_name=["renamed"]) as adapter_service:
        assert set(adapter_service.adapters.entries) == {"pirate"}, "which has a list of its own"


async def test_redis_may_be_unavailable_at_the_start(redis: BackgroundClient) -> None:
    unavailable = Unavailable()
    async with opened(unavailable) as adapter_service:
        assert adapter_service.entry("pirate", "anyone") is not None
        adapter_service.adapters.map.redis = redis
        await adapter_service.adapters.refresh()
    async with opened(redis, "s1", lora_modules=None) as other:
        assert other.entry("pirate", "anyone") is not None, "it is saved by now"
        assert (await other.adapters.base()) is not None


async def test_a_module_that_cannot_be_served_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="odd: ") as caught:
        await open_adapter_service(settings(lora_modules=[f"odd={tmp_path}"]), None, "s")
    assert caught.value.flag == "--lora-modules"


@pytest.mark.realtime
async def test_what_runs_beside_requests_follows_the_list_and_the_folder(
    redis: BackgroundClient, tmp_path: Path
) -> None:
    watched = settings(lora_watch_dir=str(tmp_path))
    adapter_service = await open_adapter_service(watched, redis, "s1")
    assert adapter_service is not None
    tasks = start_adapter_tasks(adapter_service, watched, redis, "s1")
    async with opened(redis, "s1") as other, asyncio.timeout(20):
        await other.load("elsewhere", str(SHOUT))
        shutil.copytree(SHOUT, tmp_path / "watched")
        while not set(adapter_service.adapters.entries) >= {"elsewhere", "watched"}:
            await asyncio.sleep(0.02)
        await other.adapters.refresh()
        assert "watched" in other.adapters.entries
    for task in tasks:
        task.cancel()
    adapter_service.close()
