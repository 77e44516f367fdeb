"""Several gateways of one service, one state folder: what each has spent of budgets is there for the next start."""

import asyncio
import fcntl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import snapshot_file
from tandem.cluster.state.snapshot_file import merge_state, read_state, write_state
from tandem.cluster.tenants.directory import SavedTenants
from tandem.cluster.tenants.tenant_admission import OverLimit
from tandem.cluster.tenants.tenant_service import TENANTS_FILE, TenantService
from tests.support.private_redis import private_redis
from tests.unit.tenants.tenant_rig import serve_one, service


def saved(folder: Path) -> dict[str, tuple[int, int]]:
    """What the file says was spent."""
    there = read_state(folder / TENANTS_FILE, SavedTenants)
    assert there is not None
    return there.spent


async def save(tenants: TenantService) -> None:
    """As the gateway does every few seconds."""
    await tenants.directory.save(tenants.quota.spent())


async def budget(given: TenantService, others: list[TenantService], name: str, tokens: int = 100) -> int:
    """A tenant with a budget, or a new budget of the tenant, that all gateways know. Its id."""
    limits = {"token_budget": tokens}
    is_there = name in given.directory.tenants
    made = await given.admin.change(name, limits) if is_there else (await given.admin.add(name, limits)).tenant
    for other in others:
        await other.directory.refresh()
    return made.budget_id


@asynccontextmanager
async def two(url: str, folder: Path, order: str = "in order") -> AsyncIterator[tuple[TenantService, TenantService]]:
    """The gateways of a service, and the order in which they end."""
    one, other = service(url, folder, gateways=2), service(url, folder, gateways=2)
    for gateway in (one, other):
        await gateway.start()
    try:
        yield one, other
    finally:
        if order == "at once":
            await asyncio.gather(one.close(), other.close())
        else:
            for gateway in (one, other) if order == "in order" else (other, one):
                await gateway.close()


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that write at the same time would surely undo each other."""

    def slowly(file: Path, data: bytes) -> None:
        time.sleep(0.05)  # this disk is slow
        write_state(file, data)

    monkeypatch.setattr(snapshot_file, "write_state", slowly)


@pytest.mark.parametrize("order", ["in order", "reversed", "at once"])
async def test_what_two_gateways_have_spent_is_spent_for_a_new_redis(tmp_path: Path, order: str) -> None:
    with private_redis() as server:
        async with two(server.url, tmp_path, order) as (one, other):
            ids = {name: await budget(one, [other], name) for name in ("acme", "beta")}
            await serve_one(one, "acme", "r1", 95)
            await serve_one(other, "beta", "r2", 5)
    assert saved(tmp_path) == {"acme": (ids["acme"], 95), "beta": (ids["beta"], 5)}
    with private_redis() as server:
        async with two(server.url, tmp_path) as (one, other):
            await serve_one(one, "acme", "r3", 5)
            await one.quota.send_heartbeat()
            for gateway in (one, other):
                with pytest.raises(OverLimit) as refused:
                    await gateway.quota.admit("acme", 80, 10)
                assert refused.value.code == "insufficient_quota"
            await serve_one(other, "beta", "r4", 90)
    assert saved(tmp_path) == {"acme": (ids["acme"], 100), "beta": (ids["beta"], 95)}


async def test_of_one_budget_that_both_spend_all_is_saved(server: RedisServer, tmp_path: Path) -> None:
    """Each knows what the other has spent only as far as Redis said with its own last report."""
    async with two(server.url, tmp_path) as (one, other):
        number = await budget(one, [other], "acme")
        await serve_one(other, "acme", "r1", 10)
        await other.quota.send_heartbeat()
        await serve_one(one, "acme", "r2", 50)
        await one.quota.send_heartbeat()
        assert (one.quota.spent(), other.quota.spent()) == ({"acme": (number, 60)}, {"acme": (number, 10)})
    assert saved(tmp_path) == {"acme": (number, 60)}


@pytest.mark.usefixtures("slow_writes")
async def test_two_that_save_at_once_do_not_undo_each_other(server: RedisServer, tmp_path: Path) -> None:
    async with two(server.url, tmp_path) as (one, other):
        acme, beta = await budget(one, [other], "acme"), await budget(one, [other], "beta")
        for tokens in range(1, 6):
            known = {"acme": (acme, tokens)}, {"beta": (beta, tokens)}
            await asyncio.gather(one.directory.save(known[0]), other.directory.save(known[1]))
            assert saved(tmp_path) == known[0] | known[1]
        await one.directory.save({"acme": (acme, 1)})
        assert saved(tmp_path)["acme"] == (acme, 5), "it never goes down"


@pytest.mark.parametrize("order", ["in order", "reversed", "at once"])
async def test_a_renewed_budget_begins_at_nothing(server: RedisServer, tmp_path: Path, order: str) -> None:
    """The gateway that does not serve the tenant any more remembers the budget before."""
    async with two(server.url, tmp_path, order) as (one, other):
        old = await budget(one, [other], "acme")
        await serve_one(one, "acme", "r1", 95)
        await save(one)
        new = await budget(other, [one], "acme", 200)
        assert one.quota.spent() == {"acme": (old, 95)}
        await serve_one(other, "acme", "r2", 5)
    assert saved(tmp_path) == {"acme": (new, 5)}


async def test_a_removed_tenant_is_left_out_and_added_again_has_spent_nothing(
    server: RedisServer, tmp_path: Path
) -> None:
    async with two(server.url, tmp_path) as (one, other):
        old = await budget(one, [other], "acme")
        await serve_one(one, "acme", "r1", 95)
        await save(one)
        assert saved(tmp_path) == {"acme": (old, 95)}
        await other.admin.remove("acme")
        await one.directory.refresh()
        for gateway in (one, other):
            await save(gateway)
            assert saved(tmp_path) == {}
        new = await budget(other, [one], "acme")
        await serve_one(other, "acme", "r2", 5)
        await other.quota.send_heartbeat()
        for gateway in (other, one):
            await save(gateway)
        assert saved(tmp_path) == {"acme": (new, 5)}


async def test_without_redis_nothing_is_forgotten(tmp_path: Path) -> None:
    """Each goes on from what it knows; the greater of that and of what the file says is the least that was spent."""
    with private_redis() as server:
        async with two(server.url, tmp_path) as (one, other):
            number = await budget(one, [other], "acme")
            await serve_one(other, "acme", "r1", 10)
            await other.quota.send_heartbeat()
            await serve_one(one, "acme", "r2", 50)
            await one.quota.send_heartbeat()
            await save(one)
            server.stop()
            await serve_one(other, "acme", "r3", 20)
            assert other.quota.spent() == {"acme": (number, 30)}
            await save(other)
            assert saved(tmp_path) == {"acme": (number, 60)}
            await serve_one(one, "acme", "r4", 7)
    assert saved(tmp_path) == {"acme": (number, 67)}


async def test_a_gateway_that_cannot_read_redis_undoes_no_later_budget(server: RedisServer, tmp_path: Path) -> None:
    async with two(server.url, tmp_path) as (one, other):
        old = await budget(one, [other], "acme")
    unavailable = service("redis://127.0.0.1:1", tmp_path)
    await unavailable.start()
    assert unavailable.directory.is_known and not unavailable.directory.is_certain
    async with two(server.url, tmp_path) as (one, other):
        new = await budget(one, [other], "acme")
        beta = await budget(one, [other], "beta")
        await one.directory.save({"acme": (new, 5), "beta": (beta, 7)})
        await unavailable.directory.save({"acme": (old, 95)})
        assert saved(tmp_path) == {"acme": (new, 5), "beta": (beta, 7)}
    await unavailable.close()


class Count(msgspec.Struct, frozen=True):
    number: int


def more(amount: int) -> Callable[[Count | None], Count]:
    return lambda there: Count(amount + (there.number if there is not None else 0))


async def test_a_gateway_that_has_not_heard_of_the_tenants_does_not_write_over_them(
    server: RedisServer, tmp_path: Path
) -> None:
    """With them the next start would find an open service."""
    async with two(server.url, tmp_path) as (one, other):
        assert other.directory.is_known and not other.directory.tenants
        await one.admin.add("acme", {})
        await save(one)
        stale = other.directory._saved(read_state(tmp_path / TENANTS_FILE, SavedTenants), {})
        assert stale.origin is not None and [tenant.name for tenant in stale.tenants] == ["acme"]


async def test_a_file_is_changed_by_one_at_a_time(tmp_path: Path, slow_writes: None) -> None:
    file = tmp_path / "count.json"
    await asyncio.gather(*(asyncio.to_thread(merge_state, file, Count, more(1)) for _ in range(8)))
    assert read_state(file, Count) == Count(8)
    before = file.stat().st_ino
    merge_state(file, Count, more(0))
    assert file.stat().st_ino == before, "nothing new, nothing written"
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


async def test_a_lock_that_is_held_for_ever_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder may be frozen. Time is the test's while there is something to wait for."""
    now_s, tries = 0.0, 0

    def tried(seconds: float) -> None:
        nonlocal now_s, tries
        assert not file.exists()
        now_s, tries = now_s + seconds, tries + 1

    monkeypatch.setattr(snapshot_file, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=tried))
    file = tmp_path / "count.json"
    with (tmp_path / "count.json.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        await asyncio.to_thread(merge_state, file, Count, more(3))
    assert tries >= snapshot_file.LOCK_WAIT_S / snapshot_file.LOCK_PERIOD_S - 1
    assert read_state(file, Count) == Count(3)


async def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    merge_state(tmp_path / "gone" / "count.json", Count, more(1))
    assert "cannot be locked" in caplog.text
