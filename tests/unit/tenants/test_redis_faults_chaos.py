"""FT-08 by the clock: what a limited request waits for its admission while Redis is well, and while it is not."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.tenants.tenant_service import TenantService
from tests.support.slow_link import slow_link
from tests.unit.tenants.redis_faults import FAULTS
from tests.unit.tenants.tenant_rig import service

pytestmark = pytest.mark.chaos

PACES = ((60.0, 2000), (400.0, 8000))
"""Requests a second, and how many. Those of the first 50 ms of a fault wait that long: of the slow pace three."""
BOUND_S = 0.005
AWAY = {"frozen", "far", "killed"}
"""Redis gives no answer in time: nobody should wait for it. Otherwise the answers take what they take."""


@pytest.fixture(autouse=True)
def only_its_own_garbage() -> Iterator[None]:
    """The collector's pauses are those of a gateway, not of all tests that were imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def waits_of(tenants: TenantService, rate: float, requests: int) -> list[float]:
    """Seconds that each admission took, `rate` begun a second; sorted."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def one(number: int) -> float:
        await asyncio.sleep(began_s + number / rate - loop.time())  # its turn, at this rate
        asked_s = loop.time()
        tenants.quota.settle(await tenants.quota.admit("acme", 3, 3), 5)
        return loop.time() - asked_s

    return sorted(await asyncio.gather(*(one(number) for number in range(requests))))


@pytest.mark.parametrize(("rate", "requests"), PACES)
@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_adds_at_most_5_ms_to_the_99th_of_100(
    name: str, rate: float, requests: int, server: RedisServer, tmp_path: Path
) -> None:
    async with slow_link(server) as link:
        tenants = service(link.url, tmp_path, redis_timeout_s=0.05)
        await tenants.start()
        await tenants.admin.add("acme", {"requests_per_minute": 10_000_000})
        well = await waits_of(tenants, rate, requests // 4)
        async with FAULTS[name](server, link):
            ill = await waits_of(tenants, rate, requests)
        for what, found in (("well", well), (f"{name}, {rate:.0f}/s", ill)):
            figures = [at(found, share) * 1000 for share in (0.5, 0.9, 0.99, 0.999)]
            print(f"{what}: p50, p90, p99, p99.9, most (ms):", *(f"{f:.2f}" for f in (*figures, found[-1] * 1000)))
        assert at(ill, 0.99) <= at(well, 0.5 if name in AWAY else 0.99) + BOUND_S
        await tenants.close()


def at(ordered: list[float], share: float) -> float:
    return ordered[int(share * len(ordered))]
