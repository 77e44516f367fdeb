"""Tenants as desired state: changes, races of writers, keys, and the gateways' copies that survive Redis."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from tandem.cluster.gateway.app.wiring import tenant_keys
from tandem.cluster.gateway.http.auth import AuthLevel, Principal, StaticKeys, TenantKeys, check_level
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import keys
from tandem.cluster.state.durable_map import Reading
from tandem.cluster.state.notifications import Changes
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable
from tandem.cluster.tenants.directory import TenantDirectory
from tandem.cluster.tenants.store import TenantStore
from tandem.cluster.tenants.tenant import Limits, Tenant, digest_of
from tandem.cluster.tenants.tenant_admin import StoreAdmin
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import RequestRefused
from tests.support.subscribed import subscribed
from tests.unit.tenants.tenant_rig import until


class Refused:
    """`with Refused(404, "code"):`"""

    def __init__(self, status: int, code: str) -> None:
        self._raises = pytest.raises(RequestRefused)
        self._wanted = (status, code)

    def __enter__(self) -> None:
        self._caught = self._raises.__enter__()

    def __exit__(self, *error: object) -> bool:
        done = self._raises.__exit__(*error)  # type: ignore[arg-type]
        assert (self._caught.value.status, self._caught.value.code) == self._wanted
        return done


@pytest.fixture
def store(redis: BackgroundClient) -> TenantStore:
    return TenantStore(redis, wall_clock=lambda: 1000.0)


async def test_a_tenant_is_made_changed_and_removed(store: TenantStore, redis: BackgroundClient) -> None:
    made = await store.add("acme", {"requests_per_minute": 10, "weight": 2.5})
    assert made.key.startswith("sk-tandem-") and len(made.key) >= len("sk-tandem-") + 43, "256 bits"
    assert [k.digest for k in made.tenant.keys] == [digest_of(made.key).hex()]
    changed = await store.change("acme", {"requests_per_minute": None, "concurrency": 3})
    assert changed.limits == Limits(concurrency=3, weight=2.5)
    assert (await store.read()).values == {"acme": changed}
    assert await store.weights() == {"acme": 2.5}
    await redis.command("HSET", keys.quota("acme"), "at_ms", "1")
    await store.remove("acme")
    assert (await store.read()).values == {}
    assert not await redis.command("EXISTS", keys.quota("acme"))


async def test_no_key_is_kept_anywhere(store: TenantStore, redis: BackgroundClient, tmp_path: Path) -> None:
    made = await store.add("acme", {})
    directory = TenantDirectory(store, tmp_path / "tenants.json")
    await directory.refresh()
    await directory.save({})
    values = await redis.command("HGETALL", keys.TENANTS)
    secret = made.key.removeprefix("sk-tandem-").encode()
    assert secret not in b"".join(values.values())
    assert secret not in (tmp_path / "tenants.json").read_bytes()
    assert (tmp_path / "tenants.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "limits", "param"),
    [
        ("", {}, "name"),
        ("Acme", {}, "name"),
        ("a/b", {}, "name"),
        ("-a", {}, "name"),
        ("a" * 64, {}, "name"),
        ("a\n", {}, "name"),
        ("acme", {"requests_per_minute": 0}, "requests_per_minute"),
        ("acme", {"requests_per_minute": 1.5}, "requests_per_minute"),
        ("acme", {"tokens_per_minute": "9"}, "tokens_per_minute"),
        ("acme", {"concurrency": True}, "concurrency"),
        ("acme", {"kv_share": 1.01}, "kv_share"),
        ("acme", {"weight": 0}, "weight"),
        ("acme", {"weight": float("nan")}, "weight"),
        ("acme", {"token_budget": -1}, "token_budget"),
        ("acme", {"nonsense": 1}, "nonsense"),
    ],
)
async def test_what_is_wrong_is_named(store: TenantStore, name: str, limits: dict[str, object], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        await store.add(name, limits)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert (await store.read()).values == {}


async def test_unknown_and_existing_names_are_refused(store: TenantStore) -> None:
    await store.add("acme", {})
    with Refused(409, "already_exists"):
        await store.add("acme", {})
    for call in (store.change("b", {"concurrency": 1}), store.remove("b"), store.rotate_key("b")):
        with Refused(404, "tenant_not_found"):
            await call


async def test_writers_at_the_same_time_lose_nothing(store: TenantStore, redis: BackgroundClient) -> None:
    await store.add("acme", {})
    changes = ({"concurrency": 4}, {"requests_per_minute": 5}, {"tokens_per_minute": 6}, {"max_adapters": 7})
    await asyncio.gather(*(TenantStore(redis).change("acme", change) for change in changes))
    limits = (await store.read()).values["acme"].limits
    assert limits == Limits(concurrency=4, requests_per_minute=5, tokens_per_minute=6, max_adapters=7)
    results = await asyncio.gather(*(TenantStore(redis).add("b", {}) for _ in range(8)), return_exceptions=True)
    assert sum(not isinstance(result, RequestRefused) for result in results) == 1


async def test_setting_the_budget_starts_it_anew_and_nothing_else_does(store: TenantStore) -> None:
    first = (await store.add("acme", {"token_budget": 10})).tenant.budget_id
    assert (await store.change("acme", {"concurrency": 1})).budget_id == first
    assert (await store.change("acme", {"token_budget": 10})).budget_id > first


async def test_a_rotated_key_ends_at_once_or_with_its_grace(redis: BackgroundClient) -> None:
    now_s = 1000.0
    store = TenantStore(redis, wall_clock=lambda: now_s)
    directory = TenantDirectory(store, wall_clock=lambda: now_s)
    first = (await store.add("acme", {})).key
    second = (await store.rotate_key("acme", grace_s=60)).key
    await directory.refresh()
    assert [directory.tenant_of(digest_of(key)) for key in (first, second)] == ["acme", "acme"]
    now_s += 61
    assert [directory.tenant_of(digest_of(key)) for key in (first, second)] == [None, "acme"]
    third = (await store.rotate_key("acme")).key
    await directory.refresh()
    assert [directory.tenant_of(digest_of(key)) for key in (first, second, third)] == [None, None, "acme"]
    with Refused(400, "invalid_value"):
        await store.rotate_key("acme", grace_s=-1)


async def test_gateways_see_a_change_by_their_poll(store: TenantStore) -> None:
    directory = TenantDirectory(store)
    polling = asyncio.create_task(directory.run(period_s=0.01))
    made = await store.add("acme", {})
    await until(lambda: knows(directory, made.key), "the tenant is known")
    await store.remove("acme")
    await until(lambda: forgot(directory, made.key), "the tenant is gone")
    polling.cancel()


async def test_an_announced_change_is_seen_long_before_the_period(server: RedisServer, store: TenantStore) -> None:
    directory = TenantDirectory(store)
    async with subscribed(server.url, keys.TENANTS) as changes:
        following = asyncio.create_task(directory.run(60.0, changes))
        made = await store.add("acme", {})
        await until(lambda: knows(directory, made.key), "the tenant is known")
        fresh = await store.rotate_key("acme")
        await until(lambda: knows(directory, fresh.key), "the new key is known")
        await store.remove("acme")
        await until(lambda: forgot(directory, fresh.key), "the tenant is gone")
        following.cancel()


async def test_what_is_seeded_or_restored_is_announced(
    server: RedisServer, store: TenantStore, redis: BackgroundClient
) -> None:
    await store.add("acme", {})
    directory = TenantDirectory(store)
    await directory.refresh()
    async with subscribed(server.url, keys.TENANTS) as changes:
        await redis.command("FLUSHALL")
        await directory.refresh()
        await heard(changes)
        await redis.command("SET", keys.TENANTS_VERSION, 1)
        await store.add("beta", {})
        await heard(changes)
        await directory.refresh()
        await redis.command("SET", keys.TENANTS_VERSION, 1)
        await directory.refresh()
        await heard(changes)


async def heard(changes: Changes) -> None:
    async with asyncio.timeout(20):
        await changes.wait(keys.TENANTS, 60.0)


async def knows(directory: TenantDirectory, key: str) -> bool:
    return directory.tenant_of(digest_of(key)) is not None


async def forgot(directory: TenantDirectory, key: str) -> bool:
    return directory.tenant_of(digest_of(key)) is None


async def test_the_gateway_that_took_the_change_has_it_at_once(store: TenantStore) -> None:
    directory = TenantDirectory(store)
    admin = StoreAdmin(store, directory)
    made = await admin.add("acme", {})
    assert directory.tenant_of(digest_of(made.key)) == "acme"
    await admin.change("acme", {"concurrency": 2})
    assert directory.tenants["acme"].limits.concurrency == 2
    await admin.remove("acme")
    assert await admin.all() == {}


async def test_known_keys_go_on_without_redis_and_unknown_ones_are_503(server: RedisServer, store: TenantStore) -> None:
    made = await store.add("acme", {})
    now_s = 100.0
    directory = TenantDirectory(store, clock=lambda: now_s)
    auth = TenantKeys(StaticKeys(["sk-static"]), directory, may_be_open=True, open_admin=True)
    await directory.refresh()
    for unavailable in (False, True):
        if unavailable:
            now_s += 2.1
            assert auth.authenticate(f"Bearer {made.key}").tenant == "acme"
            with Refused(503, "service_unavailable"):
                auth.authenticate("Bearer sk-unknown")  # a reading that does not come fails nobody, and says nothing
            now_s -= 2.1
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(RedisUnavailable):
                await directory.refresh()
        assert auth.authenticate(f"Bearer {made.key}") == Principal("acme", is_admin=False)
        assert auth.authenticate("Bearer sk-static") == Principal("default", is_admin=False)
        with Refused(*((503, "service_unavailable") if unavailable else (401, "invalid_api_key"))):
            auth.authenticate("Bearer sk-unknown")
        with Refused(401, "invalid_api_key"):
            auth.authenticate(None)
    with Refused(503, "service_unavailable"):
        await StoreAdmin(store, directory).change("acme", {"concurrency": 1})


async def test_an_open_service_closes_with_its_first_tenant(store: TenantStore) -> None:
    directory = TenantDirectory(store, clock=lambda: 0.0)
    here, elsewhere = (
        TenantKeys(StaticKeys(), directory, may_be_open=True, open_admin=is_local) for is_local in (True, False)
    )
    with Refused(503, "service_unavailable"):
        here.authenticate(None)  # whether there are tenants is not known yet
    await directory.refresh()
    assert here.authenticate("Bearer anything") == Principal("default", is_admin=True)
    assert elsewhere.authenticate(None) == Principal("default", is_admin=False)
    with Refused(403, "permission_denied"):
        check_level(AuthLevel.ADMIN, elsewhere, None)
    await store.add("acme", {})
    await directory.refresh()
    with Refused(401, "invalid_api_key"):
        here.authenticate("Bearer anything")


@pytest.mark.parametrize("through_proxy", [False, True])
async def test_without_keys_admin_routes_are_for_who_listens_on_loopback(
    store: TenantStore, through_proxy: bool
) -> None:
    """Under `serve run` it is Serve's proxy that listens, wherever Serve's configuration says."""
    directory = TenantDirectory(store, clock=lambda: 0.0)
    await directory.refresh()
    auth = tenant_keys(GatewaySettings(auth="open"), directory, open_port=not through_proxy)
    assert auth.authenticate(None) == Principal("default", is_admin=not through_proxy)
    with_key = GatewaySettings(admin_keys=("root",))
    assert tenant_keys(with_key, directory, open_port=not through_proxy).authenticate("Bearer root").is_admin


async def test_a_service_stays_closed_when_its_last_tenant_goes(store: TenantStore) -> None:
    directory, other = (TenantDirectory(store, clock=lambda: 0.0) for _ in range(2))
    auth = TenantKeys(StaticKeys(), directory, may_be_open=True, open_admin=True)
    await store.add("acme", {})
    await directory.refresh()
    await store.remove("acme")
    await directory.refresh()
    await other.refresh()
    for known in (directory, other):
        auth = TenantKeys(StaticKeys(), known, may_be_open=True, open_admin=True)
        assert not known.tenants and not auth.is_open
        with Refused(401, "invalid_api_key"):
            auth.authenticate(None)


async def test_a_closed_service_stays_closed_when_redis_is_emptied(
    store: TenantStore, redis: BackgroundClient, tmp_path: Path
) -> None:
    """Whether its gateways live on, or start again with what they left in the state folder."""
    directory = TenantDirectory(store, tmp_path / "tenants.json", clock=lambda: 0.0)
    await store.add("acme", {})
    await store.remove("acme")
    await directory.refresh()
    await directory.save({})
    later = TenantDirectory(store, tmp_path / "tenants.json", clock=lambda: 0.0)
    await later.load()
    for known in (directory, later):
        await redis.command("FLUSHALL")
        await known.refresh()
        with Refused(401, "invalid_api_key"):
            TenantKeys(StaticKeys(), known, may_be_open=True, open_admin=True).authenticate(None)
        assert (await store.epoch()).id is not None, "Redis knows it again"


async def test_a_redis_that_is_emptied_while_it_is_read_opens_nothing(
    store: TenantStore, redis: BackgroundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await store.add("acme", {})
    directory = TenantDirectory(store, clock=lambda: 0.0)
    await directory.refresh()
    await store.add("other", {})
    read = store.read

    async def emptied() -> Reading[Tenant]:
        monkeypatch.undo()
        await redis.command("FLUSHALL")
        return await read()

    monkeypatch.setattr(store, "read", emptied)
    with pytest.raises(RedisUnavailable):
        await directory.refresh()
    auth = TenantKeys(StaticKeys(), directory, may_be_open=True, open_admin=True)
    assert auth.authenticate(f"Bearer {made.key}").tenant == "acme" and not auth.is_open
    await directory.refresh()
    assert set((await store.read()).values) == {"acme"}


async def test_a_service_that_once_had_keys_of_its_own_stays_closed_without_them(
    store: TenantStore, redis: BackgroundClient, tmp_path: Path
) -> None:
    with_keys = [TenantDirectory(store, tmp_path / "tenants.json", has_keys=True) for _ in range(2)]
    for directory in with_keys:
        await directory.refresh()
    assert len({(await store.epoch()).id, *(d.id for d in with_keys)}) == 1, "one marker for all gateways"
    await with_keys[0].save({})
    without, after_loss = TenantDirectory(store), TenantDirectory(store, tmp_path / "tenants.json")
    await without.refresh()
    await redis.command("FLUSHALL")
    await after_loss.load()
    await after_loss.refresh()
    for directory in (without, after_loss):
        assert not TenantKeys(StaticKeys(), directory, may_be_open=True, open_admin=True).is_open


async def test_a_tenant_that_cannot_be_read_keeps_the_service_closed(
    store: TenantStore, redis: BackgroundClient, tmp_path: Path
) -> None:
    directory = TenantDirectory(store, tmp_path / "tenants.json", clock=lambda: 0.0)
    await store.add("acme", {})
    await redis.command("HSET", keys.TENANTS, "acme", msgspec.json.encode({"name": "acme", "limits": 7}))
    await directory.refresh()
    await directory.save({})
    later = TenantDirectory(store, tmp_path / "tenants.json", clock=lambda: 0.0)
    await later.load()
    for known in (directory, later):
        auth = TenantKeys(StaticKeys(), known, may_be_open=True, open_admin=True)
        with pytest.raises(RequestRefused):
            auth.authenticate(None)
        assert not auth.is_open


async def test_an_admin_key_closes_the_service(store: TenantStore) -> None:
    directory = TenantDirectory(store, clock=lambda: 0.0)
    await directory.refresh()
    auth = TenantKeys(StaticKeys((), ["root"]), directory, may_be_open=True, open_admin=True)
    with Refused(401, "invalid_api_key"):
        check_level(AuthLevel.API_KEY, auth, None)
    assert check_level(AuthLevel.ADMIN, auth, "Bearer root").is_admin
    made = await store.add("acme", {})
    await directory.refresh()
    with Refused(403, "permission_denied"):
        check_level(AuthLevel.ADMIN, auth, f"Bearer {made.key}")


async def test_an_emptied_redis_gets_the_tenants_back_once(store: TenantStore, redis: BackgroundClient) -> None:
    made = await store.add("acme", {"concurrency": 2})
    one, two = TenantDirectory(store), TenantDirectory(store)
    await one.refresh()
    await two.refresh()
    await redis.command("FLUSHALL")
    newer = await store.add("beta", {})
    await one.refresh()
    assert set((await store.read()).values) == {"acme", "beta"}
    await store.remove("acme")
    await two.refresh()
    assert set(two.tenants) == {"beta"}, "the second gateway sees that they are back, and brings nobody back"
    assert two.tenant_of(digest_of(newer.key)) == "beta" and two.tenant_of(digest_of(made.key)) is None


async def test_a_redis_of_an_older_snapshot_brings_no_removed_tenant_back(
    store: TenantStore, redis: BackgroundClient
) -> None:
    gone, old = await store.add("gone", {}), await store.add("acme", {})
    snapshot, version = await redis.command("HGETALL", keys.TENANTS), (await store.epoch()).counter
    assert isinstance(snapshot, dict)
    await store.remove("gone")
    fresh = await store.rotate_key("acme")
    await store.add("beta", {})
    one, two = TenantDirectory(store), TenantDirectory(store)
    await one.refresh()
    await two.refresh()
    await redis.command("DEL", keys.TENANTS)
    await redis.command("HSET", keys.TENANTS, *(part for pair in snapshot.items() for part in pair), "odd", "{}")
    await redis.command("SET", keys.TENANTS_VERSION, version)
    for directory in (one, two):
        await directory.refresh()
        assert set(directory.tenants) == {"acme", "beta"}
        assert directory.tenant_of(digest_of(fresh.key)) == "acme"
        assert not any(directory.tenant_of(digest_of(made.key)) for made in (gone, old))
    assert set((await store.read()).values) == {"acme", "beta"}
    assert (await store.read()).unreadable == 1, "what cannot be read is left alone"


async def test_two_who_seed_at_the_same_time_bring_nobody_back(store: TenantStore, redis: BackgroundClient) -> None:
    acme, beta = (await store.add("acme", {})).tenant, (await store.add("beta", {})).tenant
    origin = (await store.epoch()).id
    assert origin is not None
    await redis.command("FLUSHALL")
    copy = {tenant.name: store.encode(tenant) for tenant in (acme, beta)}
    assert (await store.seed(copy, origin)).is_written
    await store.remove("acme")
    assert not (await store.seed(copy, origin)).is_written
    assert set((await store.read()).values) == {"beta"}


async def test_a_file_keeps_the_tenants_for_a_new_and_empty_redis(
    store: TenantStore, redis: BackgroundClient, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.json"
    made = await store.add("acme", {"token_budget": 5})
    before = TenantDirectory(store, file)
    await before.refresh()
    await before.save({"acme": (made.tenant.budget_id, 3)})
    await redis.command("FLUSHALL")
    after = TenantDirectory(store, file)
    await after.load()
    assert after.tenant_of(digest_of(made.key)) == "acme" and not after.is_certain
    assert after.saved_spent == {"acme": (made.tenant.budget_id, 3)}
    await after.refresh()
    assert set((await store.read()).values) == {"acme"}
    await redis.command("FLUSHALL")
    await store.add("beta", {})
    foreign = TenantDirectory(store, file)
    await foreign.load()
    await foreign.refresh()
    assert set(foreign.tenants) == {"beta"}, "a file says nothing about a Redis that has tenants of its own"


async def test_a_broken_file_or_entry_ends_nothing(store: TenantStore, redis: BackgroundClient, tmp_path: Path) -> None:
    (tmp_path / "tenants.json").write_text("{")
    directory = TenantDirectory(store, tmp_path / "tenants.json")
    await directory.load()
    assert not directory.is_known
    await store.add("acme", {})
    await redis.command("HSET", keys.TENANTS, "odd", msgspec.json.encode({"name": "odd", "limits": 7}))
    await directory.refresh()
    assert set(directory.tenants) == {"acme"}
    with Refused(500, "internal_error"):
        await store.change("odd", {"concurrency": 1})
