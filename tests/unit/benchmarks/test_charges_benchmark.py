"""benchmarks/service/charges.py: an exchange is measured after a whole round of the other groups."""

import argparse

from benchmarks.service.charges import measure
from tests.support.private_redis import private_redis


async def test_an_exchange_carries_what_every_other_group_has_charged_since_the_last() -> None:
    sizes = []
    for groups in (2, 100):
        options = argparse.Namespace(groups=groups, tenants=100, charged=1, measured=2)
        with private_redis() as server:
            sizes.append((await measure(server.url, options))["bytes_per_exchange"])
    assert sizes[1] - sizes[0] >= 98 * len("tenant-00000"), "each group charges a tenant of its own"
