"""One gateway's tenants from start to end: what its tasks do by themselves, and what they leave behind."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.tenants import journal, tenant_service
from tandem.cluster.tenants.directory import TenantDirectory
from tandem.cluster.tenants.journal import Journal
from tandem.cluster.tenants.store import TenantStore
from tests.support.private_redis import private_redis
from tests.unit.tenants.tenant_rig import patient, row_ids, serve_one, service, until


async def test_everything_reaches_redis_by_itself(server: RedisServer, redis: BackgroundClient, tmp_path: Path) -> None:
    tenants = service(server.url, tmp_path)
    await tenants.start()
    await TenantStore(redis).add("acme", {"concurrency": 1, "token_budget": 1000})

    async def is_known() -> bool:
        return "acme" in tenants.directory.tenants

    await until(is_known, "the poll sees the tenant")
    await serve_one(tenants, "acme", "r1", 30)

    async def is_told() -> bool:
        running = await redis.command("HGETALL", keys.quota("acme"))
        counts = [int(v) for k, v in running.items() if k.startswith(b"n:")]
        return counts == [0] and await row_ids(redis) == ["r1"]

    await until(is_told, "the place is free and the row is there")
    await tenants.close()
    names = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert names == ["tenants.json", "tenants.json.lock", "usage"]


async def test_a_state_folder_carries_tenants_budgets_and_rows_to_a_new_redis(tmp_path: Path) -> None:
    """The service ends with its private Redis; the next one begins with another."""
    with private_redis() as server:
        first = service(server.url, tmp_path / "state")
        await first.start()
        made = await first.admin.add("acme", {"token_budget": 100})
        await serve_one(first, "acme", "r1", 60)
        await first.close()
    with private_redis() as server:
        second = service(server.url, tmp_path / "state")
        await second.start()
        assert {t.name: t.keys for t in second.directory.tenants.values()} == {"acme": made.tenant.keys}
        await serve_one(second, "acme", "r2", 10)
        assert second.quota.spent() == {"acme": (made.tenant.budget_id, 70)}
        redis = patient(server)

        async def both() -> bool:
            return sorted(await row_ids(redis)) == ["r1", "r2"]

        await until(both, "the old rows are there, too")
        await redis.close()
        await second.close()


async def test_a_private_folder_goes_with_the_last_gateway(server: RedisServer, tmp_path: Path) -> None:
    folder = tmp_path / "tl-1"
    one, two = service(server.url, folder, is_private=True), service(server.url, folder, is_private=True)
    await asyncio.gather(one.start(), two.start())
    await one.close()
    assert folder.exists(), "the other one writes there"
    await two.close()
    assert not folder.exists()


async def test_a_gateway_that_comes_while_the_last_one_leaves_keeps_its_journal(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions of a service share the folder."""
    folder = tmp_path / "tl-1"
    leaving = service(server.url, folder, is_private=True)
    await leaving.start()
    came: list[Journal] = []

    def is_in_use(folder: Path) -> bool:
        was_in_use = journal.is_in_use(folder)
        came.append(Journal(folder, "next"))
        return was_in_use

    monkeypatch.setattr(tenant_service, "is_in_use", is_in_use)
    await leaving.close()
    (next_one,) = came
    assert list(folder.glob("usage-*")) == next_one.paths, "only its own are gone"
    await next_one.close()


async def test_a_folder_that_is_removed_while_a_journal_begins_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "tl-1").mkdir()
    open_plainly = os.open

    def open_late(path: Any, *more: Any) -> int:
        monkeypatch.undo()
        folder.rmdir()
        return open_plainly(path, *more)

    monkeypatch.setattr(os, "open", open_late)
    begun = Journal(folder, "next")
    assert list(folder.iterdir()) == begun.paths
    await begun.close()


async def test_a_closed_service_says_so_when_its_redis_takes_writes_again(
    server: RedisServer, redis: BackgroundClient, tmp_path: Path
) -> None:
    """Its memory is full while the first gateway starts."""
    directory = TenantDirectory(TenantStore(redis), tmp_path / "tenants.json", has_keys=True)
    await redis.command("CONFIG", "SET", "maxmemory", "1")
    try:
        await directory.refresh()
        await directory.refresh()
    finally:
        await redis.command("CONFIG", "SET", "maxmemory", "0")
    assert await redis.command("GET", keys.TENANTS_ORIGIN) is None
    await directory.refresh()
    assert await redis.command("GET", keys.TENANTS_ORIGIN) is not None


async def test_rows_that_redis_never_heard_of_are_not_removed(server: RedisServer, tmp_path: Path) -> None:
    folder = tmp_path / "tl-1"
    tenants = service(server.url, folder, is_private=True)
    await tenants.start()
    server.stop()
    await serve_one(tenants, "nobody", "r1", 5)
    await tenants.close()
    assert list(folder.glob("usage-*"))
