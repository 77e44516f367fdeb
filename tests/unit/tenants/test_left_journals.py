"""A gateway of the next version sends to Redis what a killed one of the version before has left in its folder."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tandem.cluster.gateway.app import opening
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.tenants.billing_record import BillingRecord
from tandem.cluster.tenants.tenant_service import TenantService
from tandem.cluster.wire import identity
from tandem.cluster.wire.identity import Membership
from tandem.cluster.wire.service_facts import ServiceFacts
from tandem.configs.load import settings_from_serve_args
from tandem.workers.messages.request import Usage
from tests.support.usage import read_usage


class Actor:
    """The identity that both versions find."""

    class renew:
        @staticmethod
        async def remote() -> tuple[str, str]:
            return "a1b2c3d4e5f6", "ab" * 32


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[BackgroundClient]:
    redis = BackgroundClient(server.url, timeout_s=5.0, retries=1)
    yield redis
    await redis.close()


async def gateway_of_a_version(num_seqs: int, redis: BackgroundClient) -> TenantService:
    """The tenants of a gateway, of a version with this argument."""
    args = {"model_loading_config": {"model_source": "demo"}, "engine_kwargs": {"max_num_seqs": num_seqs}}
    member = Membership("tandem", ServiceFacts(single_node=True, device="cpu"))
    facts = await member.join()
    member.leave()
    return opening.open_tenants(settings_from_serve_args(args), facts, redis, lambda: 0, changes=Announcements())


async def test_the_next_version_sends_what_a_killed_gateway_has_left(
    redis: BackgroundClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "identity_actor", lambda app, facts: Actor)
    monkeypatch.setattr(opening, "short_temp_folder", lambda: tmp_path)
    killed = await gateway_of_a_version(16, redis)
    bill = BillingRecord(id="r1", time_s=time.time(), tenant="acme", model="m")
    killed.ledger.accepted(bill)
    await killed.ledger.settle(bill.ended("stop", Usage(3, 6), time.time()))
    lost = replace(bill, id="r2")
    killed.ledger.accepted(lost)
    await killed.ledger._journal.sync()
    await killed.ledger._journal.close()  # nothing was sent
    assert not await read_usage(redis, "acme", time.time() - 60, time.time() + 60)
    later = await gateway_of_a_version(8, redis)
    await later.start()
    async with asyncio.timeout(60):
        while len(rows := await read_usage(redis, "acme", time.time() - 600, time.time() + 60)) < 2:
            await asyncio.sleep(0.05)
    assert {row.id: row.terminal for row in rows} == {"r1": "stop", "r2": "client_lost"}
    await later.close()
    assert not list(tmp_path.iterdir()), "all of it is in Redis"
