"""FT-08 for everything that a gateway keeps of tenants: while Redis is frozen, far away, killed, emptied or refuses, no
request is lost or waits, limits hold, an unknown key is not called wrong; afterwards each row is there once."""

import asyncio
import time
from pathlib import Path

import pytest

from tandem.cluster.gateway.http.auth import Principal, StaticKeys, TenantKeys
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable, RequestClient
from tandem.cluster.tenants.quota import Quota
from tandem.cluster.tenants.tenant_service import TenantService
from tandem.workers.messages.errors import RequestRefused
from tests.support.slow_link import slow_link
from tests.unit.tenants.redis_faults import FAULTS, LATENCY_S
from tests.unit.tenants.tenant_rig import FakeTime, Fleet, admitted, row_ids, serve_one, service, until

REQUESTS, TOKENS = 60, 10
MINUTE = 20
AWAY = {"frozen", "killed", "refusing"}
"""The tenants cannot be read then."""


def status_of(auth: TenantKeys, key: str) -> int:
    try:
        auth.authenticate(f"Bearer {key}")
    except RequestRefused as refused:
        return refused.status
    return 200


async def serve_all(tenants: TenantService, first: int) -> None:
    """REQUESTS of them from that number on, ten at once."""
    for number in range(first, first + REQUESTS, 10):
        ids = [f"r{i}" for i in range(number, number + 10)]
        await asyncio.gather(*(serve_one(tenants, "acme", request_id, TOKENS) for request_id in ids))


async def spent_in_redis(redis: BackgroundClient) -> int:
    found = await redis.command("HGETALL", keys.quota("acme"))
    return sum(int(value) for field, value in found.items() if field.startswith(b"u:"))


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_costs_no_request_no_row_and_no_limit(
    name: str, server: RedisServer, redis: BackgroundClient, tmp_path: Path
) -> None:
    async with slow_link(server) as link:
        tenants = service(link.url, tmp_path, redis_timeout_s=LATENCY_S / 2)
        await tenants.start()
        made = await tenants.admin.add("acme", {"token_budget": 100_000, "concurrency": 1000})
        await tenants.admin.add("tight", {"requests_per_minute": MINUTE})
        auth = TenantKeys(StaticKeys(), tenants.directory, may_be_open=True, open_admin=True)
        began_s = time.monotonic()
        let_in = len(await admitted(tenants.quota, 5, name="tight"))
        await serve_all(tenants, 0)
        async with FAULTS[name](server, link):
            await serve_all(tenants, REQUESTS)
            let_in += len(await admitted(tenants.quota, 2 * MINUTE, name="tight"))
            assert auth.authenticate(f"Bearer {made.key}") == Principal("acme", is_admin=False)
            assert status_of(auth, "sk-unknown") in (401, 503)
            if name in AWAY:
                await until(lambda: answers(auth, 503), "an unknown key may be one that Redis has")
                assert status_of(auth, made.key) == 200
        await until(lambda: answers(auth, 401), "Redis says that nobody has the key")
        let_in += len(await admitted(tenants.quota, 2 * MINUTE, name="tight"))
        elapsed_s = time.monotonic() - began_s
        assert 5 < let_in <= MINUTE + elapsed_s * MINUTE / 60 + 1

        async def is_settled() -> bool:
            wanted = {f"r{i}" for i in range(2 * REQUESTS)}
            found = await row_ids(redis)
            return (sorted(found), await spent_in_redis(redis)) == (sorted(wanted), 2 * REQUESTS * TOKENS)

        await until(is_settled, "a row for each, once; what was spent")
        await tenants.close()


async def answers(auth: TenantKeys, status: int) -> bool:
    return status_of(auth, "sk-unknown") == status


async def test_a_redis_that_is_absent_at_the_start_is_taken_up_when_it_comes(
    server: RedisServer, redis: BackgroundClient, tmp_path: Path
) -> None:
    first = service(server.url, tmp_path)
    await first.start()
    made = await first.admin.add("acme", {"requests_per_minute": MINUTE, "token_budget": 100_000})
    await first.close()
    server.stop()
    later, new = service(server.url, tmp_path), service(server.url, tmp_path / "new")
    for tenants in (later, new):
        await tenants.start()
    auth = TenantKeys(StaticKeys(), later.directory, may_be_open=True, open_admin=True)
    assert (status_of(auth, made.key), status_of(auth, "sk-unknown")) == (200, 503)
    nobodys = TenantKeys(StaticKeys(), new.directory, may_be_open=True, open_admin=True)
    assert status_of(nobodys, made.key) == 503, "it has no copy of the tenants, and may have any"
    for number in range(5):
        await serve_one(later, "acme", f"r{number}", TOKENS)
    assert len(await admitted(later.quota, 2 * MINUTE)) <= MINUTE - 5 + 1
    server.start()

    async def is_settled() -> bool:
        try:
            known = status_of(auth, "sk-unknown"), status_of(nobodys, made.key)
            return known == (401, 200) and sorted(await row_ids(redis)) == [f"r{i}" for i in range(5)]
        except RedisUnavailable:
            return False

    await until(is_settled, "both know the tenants; every row is there")
    for tenants in (later, new):
        await tenants.close()


async def test_once_redis_counts_as_away_the_beat_finds_it_again_and_no_request_waits(fleet: Fleet) -> None:
    """Half a minute of requests, ten a second: none is the one that tries."""
    clock = FakeTime()
    fleet.set(requests_per_minute=100_000)
    async with slow_link(fleet.server) as link:
        client = RequestClient(lambda: link.url, timeout_s=0.05, clock=clock.clock)
        quota = Quota(client, fleet.directory, "a", clock=clock.clock, server_ms=clock.server_ms)
        link.delay_s = LATENCY_S

        async def is_open() -> bool:
            await quota.admit("acme", 1, 0)
            return client.breaker.state == "open"

        await until(is_open, "three in a row came too late")
        asked = link.requests
        for _ in range(300):
            clock.now_s += 0.1
            await quota.admit("acme", 1, 0)
        assert link.requests == asked
        link.delay_s = 0.0

        async def is_back() -> bool:
            clock.now_s += 1.0
            await quota.send_heartbeat()
            return client.breaker.state == "closed"

        await until(is_back, "the heartbeat asks")
        await quota.admit("acme", 1, 0)
        assert link.requests > asked
        await client.close()
