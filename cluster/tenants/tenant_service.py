"""Everything of tenants that one gateway runs: their directory, quotas, ledger, and the tasks that keep them going.

Made by the gateway deployment; the rest of the gateway sees Tenancy, TenantAdmin, Ledger and KnownKeys.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable, RequestClient
from tandem.cluster.tenants.billing_record import DAY_S
from tandem.cluster.tenants.directory import TenantDirectory
from tandem.cluster.tenants.journal import is_in_use, remove_unlocked
from tandem.cluster.tenants.ledger import UsageLedger
from tandem.cluster.tenants.quota import Quota
from tandem.cluster.tenants.store import TenantStore
from tandem.cluster.tenants.tenant_admin import StoreAdmin
from tandem.cluster.tenants.usage_cap import UsageCap
from tandem.configs.schema import GatewaySettings

log = logging.getLogger("tandem.tenants")
TENANTS_FILE = "tenants.json"
SAVE_PERIOD_S = 5.0
CANCEL_TRIES = 5


class TenantService:
    """The tenants of one gateway. folder: where tenants and the journal outlive the gateway; without --state-dir it is
    removed when the last gateway of the service has left in order, with everything written to Redis. kv_tokens: KV
    tokens of all groups, 0 when not known."""

    def __init__(
        self,
        redis: BackgroundClient,
        settings: GatewaySettings,
        folder: Path,
        redis_timeout_s: float,
        kv_tokens: Callable[[], int],
        changes: Announcements = Announcements(),
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._is_private = settings.state_dir is None
        self._changes = changes
        gateway, kept_s = secrets.token_hex(6), settings.usage_days * DAY_S
        has_keys = bool(settings.api_keys or settings.admin_keys)
        store = TenantStore(redis)
        self._requests = RequestClient(lambda: redis.url, redis_timeout_s)
        self.directory = TenantDirectory(store, folder / TENANTS_FILE, has_keys=has_keys)
        self.quota = Quota(self._requests, self.directory, gateway, gateways=settings.num_gateways, kv_tokens=kv_tokens)
        self.admin = StoreAdmin(store, self.directory)
        self.ledger = UsageLedger(redis, folder, gateway, kept_s)
        self.usage_cap = UsageCap(redis, gateway, settings.usage_rows, kept_s)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Reads the tenants, or what an earlier life has left of them; begins to keep up."""
        await self.directory.load()
        self.quota.restore(self.directory.saved_spent)
        with suppress(RedisUnavailable):
            await self.directory.refresh()
        loop = asyncio.get_running_loop()
        work = {
            "tenants": self.directory.run(changes=self._changes),
            "quotas": self.quota.run(),
            "ledger": self.ledger.run(),
            "usage rows": self.usage_cap.run(),
            "saving tenants": self._save(),
        }
        self._tasks = [loop.create_task(coroutine, name=name) for name, coroutine in work.items()]

    def expose(self, registry: CollectorRegistry, prefix: str) -> None:
        """Adds the counts of usage rows to a gateway's metrics."""
        registry.register(_UsageMetrics(self.ledger, self.usage_cap, prefix))

    async def seed(self) -> None:
        """Writes the tenants to a Redis that is new or has lost its data; RedisUnavailable."""
        await self.directory.refresh()

    def tell_again(self) -> None:
        """Reports what tenants have spent here, without waiting for their next requests: Redis has lost its data, which
        is more than the tenants."""
        self.quota.tell_again()

    async def close(self) -> None:
        """Brings everything to Redis or to disk, after the last request was settled."""
        await _end(self._tasks)
        with suppress(RedisUnavailable):
            await self.quota.send_heartbeat()
        await self.directory.save(self.quota.spent())
        is_told = await self.ledger.close()
        await self._requests.close()
        if self._is_private and is_told:
            await asyncio.to_thread(_remove_if_unused, self._folder)

    async def _save(self) -> None:
        """Saves the tenants now and then; at once when the service closes: it must be closed in its next life too."""
        while True:
            was_closed = self.directory.is_closed
            await self.directory.save(self.quota.spent())
            with suppress(TimeoutError):
                async with asyncio.timeout(SAVE_PERIOD_S):
                    await (asyncio.Event() if was_closed else self.directory.closing).wait()


class _UsageMetrics(Collector):
    def __init__(self, ledger: UsageLedger, cap: UsageCap, prefix: str) -> None:
        self._ledger = ledger
        self._cap = cap
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        name = f"{self._prefix}:usage_rows"
        yield CounterMetricFamily(
            f"{name}_summed", "Usage rows that became sums (--usage-rows).", self._cap.summed_rows
        )
        text = "Usage rows that came after their hour was summed up, and are in the journal only."
        yield CounterMetricFamily(f"{name}_late", text, self._ledger.late_rows)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels until they have ended: Python 3.11's wait_for loses a cancellation that comes with its result."""
    left = set(tasks)
    for _ in range(CANCEL_TRIES):
        if not left:
            return
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=1.0)
    log.error("tasks did not end: %s", ", ".join(task.get_name() for task in left))


def _remove_if_unused(folder: Path) -> None:
    """Removes the folder. A journal that is written stays: a gateway of another version may begin to use the folder
    meanwhile."""
    if is_in_use(folder) or not remove_unlocked(folder):
        return
    with suppress(OSError):
        for file in folder.glob(f"{TENANTS_FILE}*"):
            file.unlink()
        folder.rmdir()  # not when it has a new journal
