"""Gateways' tenants over one real private Redis: servers that can be frozen and emptied, gateways that can die."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state.redis_client import BackgroundClient, RequestClient
from tandem.cluster.tenants.billing_record import BillingRecord
from tandem.cluster.tenants.quota import Quota
from tandem.cluster.tenants.tenant import Limits, Tenant
from tandem.cluster.tenants.tenant_admission import OverLimit, Reservation
from tandem.cluster.tenants.tenant_service import TenantService
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.request import Usage
from tests.support.usage import read_usage

DEADLINE_S = 20.0
START_MS = 1_800_000_000_000


def patient(server: RedisServer) -> BackgroundClient:
    return BackgroundClient(server.url, timeout_s=5.0, retries=1)


def unhurried(server: RedisServer) -> RequestClient:
    """A request client that a slow test machine does not frighten."""
    return RequestClient(lambda: server.url, timeout_s=20.0)


def tenant(name: str = "acme", budget_id: int = 1, **limits: Any) -> Tenant:
    return Tenant(name=name, keys=(), limits=Limits(**limits), created_s=0.0, budget_id=budget_id)


@dataclass
class Named:
    """A directory that tests fill."""

    tenants: dict[str, Tenant] = field(default_factory=dict)


@dataclass
class FakeTime:
    """One clock for gateways and server."""

    now_s: float = 0.0

    def clock(self) -> float:
        return self.now_s

    def server_ms(self) -> int:
        return START_MS + int(self.now_s * 1000)


@dataclass
class Fleet:
    """Several gateways of one service, on one fake clock."""

    server: RedisServer
    time: FakeTime = field(default_factory=FakeTime)
    directory: Named = field(default_factory=Named)
    clients: list[RequestClient] = field(default_factory=list)
    kv_tokens: int = 0

    def gateway(self, name: str, gateways: int = 1) -> Quota:
        client = unhurried(self.server)
        self.clients.append(client)
        return Quota(
            client,
            self.directory,
            name,
            gateways=gateways,
            kv_tokens=lambda: self.kv_tokens,
            clock=self.time.clock,
            random=lambda: 0.0,
            server_ms=self.time.server_ms,
        )

    def set(self, **limits: Any) -> None:
        budget_id = limits.pop("budget_id", 1)
        self.directory.tenants["acme"] = tenant(budget_id=budget_id, **limits)

    async def close(self) -> None:
        for client in self.clients:
            await client.close()


def service(
    url: str, folder: Path, is_private: bool = False, gateways: int = 1, redis_timeout_s: float = 20.0
) -> TenantService:
    """Everything of tenants that a gateway runs."""
    state_dir = None if is_private else str(folder)
    settings = GatewaySettings(usage_days=7, usage_rows=10**6, num_gateways=gateways, state_dir=state_dir)
    client = BackgroundClient(url, timeout_s=1.0, retries=1)
    return TenantService(client, settings, folder, redis_timeout_s, kv_tokens=lambda: 0)


async def serve_one(tenants: TenantService, name: str, request_id: str, used: int) -> None:
    """A request of the tenant, from admission to its row."""
    reservation = await tenants.quota.admit(name, used, 10)
    record = BillingRecord(id=request_id, time_s=time.time(), tenant=name, model="m")
    tenants.ledger.accepted(record)
    tenants.quota.settle(reservation, used)
    await tenants.ledger.settle(record.ended("stop", Usage(prompt_tokens=used, completion_tokens=0), time.time()))


async def row_ids(redis: BackgroundClient) -> list[str]:
    """Ids of the last two minutes' rows in Redis."""
    now_s = time.time()
    return [row.id for row in await read_usage(redis, None, now_s - 120, now_s + 60)]


async def admitted(quota: Quota, count: int, prompt: int = 1, output: int = 0, name: str = "acme") -> list[Reservation]:
    """The grants of so many requests, one after the other; those refused are left out."""
    reservations = []
    for _ in range(count):
        try:
            reservations.append(await quota.admit(name, prompt, output))
        except OverLimit:
            continue
    return reservations


async def refusal(quota: Quota, prompt: int = 1, output: int = 0) -> OverLimit:
    """Why the next request is refused."""
    try:
        await quota.admit("acme", prompt, output)
    except OverLimit as refused:
        return refused
    raise AssertionError("it was admitted")


def shown(quota: Quota) -> Mapping[str, str]:
    """The headers of now, without their common prefix."""
    return {k.decode().removeprefix("x-ratelimit-"): v.decode() for k, v in quota.headers("acme")}


async def until(condition: Callable[[], Awaitable[object]], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < deadline_s, f"not within {DEADLINE_S:.0f} s: {what}"
        await asyncio.sleep(0.01)
