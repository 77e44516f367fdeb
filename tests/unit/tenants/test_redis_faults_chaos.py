"""FT-08 by the clock: what a limited request waits for its admission while Redis is well, and while it is not."""

import asyncio
from pathlib import Path

import pytest

from cluster.coordination.redis_server import RedisServer
from cluster.tenants.service import TenantService
from tests.support.slow_link import slow_link
from tests.unit.tenants.redis_faults import FAULTS
from tests.unit.tenants.tenant_rig import service

pytestmark = pytest.mark.chaos

REQUESTS = 2000
BOUND_S = 0.005


async def waits_of(tenants: TenantService, rate: float) -> list[float]:
    """Seconds that each of REQUESTS admissions took, so many begun a second; sorted."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def one(number: int) -> float:
        await asyncio.sleep(began_s + number / rate - loop.time())
        asked_s = loop.time()
        tenants.quota.settle(await tenants.quota.admit("acme", 3, 3), 5)
        return loop.time() - asked_s

    return sorted(await asyncio.gather(*(one(number) for number in range(REQUESTS))))


@pytest.mark.parametrize("rate", [60.0, 400.0])
@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_adds_at_most_5_ms_to_the_99th_of_100(
    name: str, rate: float, server: RedisServer, tmp_path: Path
) -> None:
    async with slow_link(server) as link:
        tenants = service(link.url, tmp_path, redis_timeout_s=0.05)
        await tenants.start()
        await tenants.admin.add("acme", {"requests_per_minute": 10_000_000})
        well = await waits_of(tenants, 400.0)
        async with FAULTS[name](server, link):
            ill = await waits_of(tenants, rate)
        for what, found in (("well", well), (f"{name}, {rate:.0f}/s", ill)):
            figures = [found[int(share * REQUESTS)] * 1000 for share in (0.5, 0.9, 0.99, 0.999)]
            print(f"{what}: p50, p90, p99, p99.9, most (ms):", *(f"{f:.2f}" for f in (*figures, found[-1] * 1000)))
        assert ill[int(0.99 * REQUESTS)] <= well[int(0.99 * REQUESTS)] + BOUND_S
        await tenants.close()
