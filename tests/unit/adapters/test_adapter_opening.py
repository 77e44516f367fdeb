"""A gateway's start: what is durable and what the settings name is listed, once in a life of the service."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.adapters.desk import AdapterDesk
from cluster.adapters.opening import open_desk, tend
from cluster.coordination.client import BackgroundClient, Commands
from configs.errors import SettingsError
from configs.load import build_settings
from configs.schema import ServiceSettings
from tests.unit.adapters.test_adapter_desk import Away

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo"
PIRATE, SHOUT = (DEMO / "adapters" / name for name in ("pirate", "shout"))


def settings(**more: object) -> ServiceSettings:
    values = {"served_model_name": ["demo"], "enable_lora": True, "lora_modules": [f"pirate={PIRATE}"], **more}
    return build_settings(str(DEMO / "model"), values)


@asynccontextmanager
async def opened(redis: Commands | None, life: str = "s1", **more: object) -> AsyncIterator[AdapterDesk]:
    desk = await open_desk(settings(**more), redis, life)
    assert desk is not None
    yield desk
    desk.close()


async def test_without_the_flag_there_is_no_desk() -> None:
    assert await open_desk(settings(enable_lora=False, lora_modules=None), None, "s") is None


async def test_what_was_unloaded_is_not_listed_again_by_a_gateway_that_comes_later(redis: BackgroundClient) -> None:
    async with opened(redis) as first, opened(redis) as second:
        assert set(first.registry.entries) == set(second.registry.entries) == {"pirate"}
        await first.unload("pirate")
        await first.load("shout", str(SHOUT))
    async with opened(redis) as third:
        assert set(third.registry.entries) == {"shout"}, "as it was left"
    async with opened(redis, "s2") as restarted:
        assert set(restarted.registry.entries) == {"pirate", "shout"}, "the settings ask for one, Redis kept the other"


async def test_the_settings_win_over_what_a_name_had_before_a_restart(redis: BackgroundClient) -> None:
    async with opened(redis) as desk:
        digest = desk.registry.entries["pirate"].digest
        await desk.pin("pirate", True)
        await desk.load("pirate", str(SHOUT), inplace=True)
    async with opened(redis, "s2") as desk:
        entry = desk.registry.entries["pirate"]
        assert (entry.digest, entry.source, entry.pinned) == (digest, str(PIRATE), True)


async def test_redis_may_be_away_at_the_start(redis: BackgroundClient) -> None:
    away = Away()
    async with opened(away) as desk:
        assert desk.entry("pirate", "anyone") is not None
        desk.registry._redis = redis
        await desk.registry.refresh()
    async with opened(redis, "s1", lora_modules=None) as other:
        assert other.entry("pirate", "anyone") is not None, "it is saved by now"
        assert (await other.registry.base()) is not None


async def test_a_module_that_cannot_be_served_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="odd: ") as caught:
        await open_desk(settings(lora_modules=[f"odd={tmp_path}"]), None, "s")
    assert caught.value.flag == "--lora-modules"


async def test_what_runs_beside_requests_follows_the_list_and_the_folder(
    redis: BackgroundClient, tmp_path: Path
) -> None:
    watched = settings(lora_watch_dir=str(tmp_path))
    desk = await open_desk(watched, redis, "s1")
    assert desk is not None
    tasks = tend(desk, watched)
    async with opened(redis, "s1") as other, asyncio.timeout(20):
        await other.load("elsewhere", str(SHOUT))
        shutil.copytree(SHOUT, tmp_path / "watched")
        while not set(desk.registry.entries) >= {"elsewhere", "watched"}:
            await asyncio.sleep(0.02)
        await other.registry.refresh()
        assert "watched" in other.registry.entries
    for task in tasks:
        task.cancel()
    desk.close()
