"""State that an earlier version of Tandem left in Redis and in --state-dir, byte for byte as it wrote it."""

from pathlib import Path

import msgspec

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.state.epoch import Epoch
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.tenants.directory import TenantDirectory
from tandem.cluster.tenants.store import TenantStore

KEY = b'{"digest":"ab","created_s":1.0,"expires_s":null}'
TENANT = b'{"name":"acme","keys":[%s],"limits":{"concurrency":3},"created_s":1.0}' % KEY
ENTRY = {"name": "pirate", "digest": "a" * 64, "source": "/adapters/pirate", "tenant": "acme", "pinned": True}
FILE = b'{"origin":"0123","version":7,"tenants":[%s],"spent":{"acme":[5,3]},"unreadable":0}' % TENANT


async def test_tenants_in_redis(redis: BackgroundClient) -> None:
    await redis.command("HSET", "tandem:tenants", "acme", TENANT)
    await redis.command("SET", "tandem:tenants:version", 7)
    await redis.command("SET", "tandem:tenants:origin", "0123456789abcdef")
    store = TenantStore(redis)
    assert await store.epoch() == Epoch("0123456789abcdef", 7)
    directory = TenantDirectory(store)
    await directory.refresh()
    assert directory.tenant_of(bytes.fromhex("ab")) == "acme" and directory.is_closed
    assert (await store.change("acme", {"weight": 2.0})).limits.concurrency == 3
    assert int(await redis.command("GET", "tandem:tenants:version")) > 7


async def test_a_list_of_adapters_in_redis(redis: BackgroundClient) -> None:
    await redis.command("SET", "tandem:initialized", "0123456789abcdef")
    base = {"folder": "/m", "max_rank": 8}
    fields = {"pirate": ENTRY, "@base": base}
    await redis.command(
        "HSET",
        "tandem:adapters:demo",
        "@version",
        7,
        *(x for k, v in fields.items() for x in (k, msgspec.msgpack.encode(v))),
    )
    adapters = AdapterList(redis, "demo")
    await adapters.refresh()
    assert adapters.entries["pirate"].tenant == "acme" and adapters.entries["pirate"].pinned
    found = await adapters.base()
    assert found is not None and found.max_rank == 8
    assert await adapters.replace(adapters.entries["pirate"], None, "pirate")


async def test_files_of_an_earlier_life(redis: BackgroundClient, tmp_path: Path) -> None:
    (tmp_path / "tenants.json").write_bytes(FILE)
    directory = TenantDirectory(TenantStore(redis), tmp_path / "tenants.json")
    await directory.load()
    await directory.refresh()
    assert directory.tenant_of(bytes.fromhex("ab")) == "acme" and directory.saved_spent == {"acme": (5, 3)}
    assert await redis.command("GET", "tandem:tenants:origin") == b"0123"
    await redis.command("SET", "tandem:initialized", "0123456789abcdef")
    name = "adapters-2a97516c354b6884.json"
    (tmp_path / name).write_bytes(msgspec.json.encode({"model": "demo", "adapters": [ENTRY]}))
    adapters = AdapterList(redis, "demo", tmp_path)
    await adapters.load()
    await adapters.refresh()
    assert set(adapters.entries) == {"pirate"}
    assert await redis.command("HEXISTS", "tandem:adapters:demo", "pirate")
