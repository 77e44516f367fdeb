"""Limits of requests that are sent again, which quotas do not count: they reserve nothing, and are not on the bill."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.cluster.tenants.account import Bucket
from tandem.cluster.tenants.tenant import Limits
from tandem.cluster.tenants.tenant_admission import OverLimit

MOST_WAITING = 64
"""Requests of one tenant that wait at a gateway for the ones before them."""


class AgainLimits:
    """Counts of one gateway: of a tenant that may make so many requests a minute, as many that are sent again; and a
    number that wait at a time. limits: of a tenant, as last seen."""

    def __init__(self, limits: Callable[[str], Limits], clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        self._waiting: Counter[str] = Counter()

    def count(self, tenant: str) -> None:
        """Counts a request that was sent again. OverLimit where there are too many."""
        most, now_s = self._limits(tenant).requests_per_minute, self._clock()
        if most is None:
            self._buckets.pop(tenant, None)
            return
        bucket = self._buckets.get(tenant)
        if bucket is None or bucket.size != most:
            bucket = self._buckets[tenant] = Bucket(float(most), float(most), now_s)
        if (wait_s := bucket.wait_s(1.0, now_s)) > 0:
            text = f"Too many requests are sent again: {most} a minute are allowed."
            raise OverLimit(text, reason="requests", retry_after_s=wait_s, code="rate_limit_exceeded")
        bucket.add(-1.0, now_s)

    @contextmanager
    def waiting(self, tenant: str) -> Iterator[None]:
        """While a request waits for the one before it. OverLimit where too many do."""
        if self._waiting[tenant] >= MOST_WAITING:
            text = f"{MOST_WAITING} requests wait for the ones with the same keys before them; try again."
            raise OverLimit(text, reason="concurrency", retry_after_s=1.0, code="rate_limit_exceeded")
        self._waiting[tenant] += 1
        try:
            yield
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]
