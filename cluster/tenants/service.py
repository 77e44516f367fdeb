"""Everything of tenants that one gateway runs: their directory, quotas, ledger, and the tasks that keep them going.

Made by the gateway deployment; the rest of the gateway sees Tenancy, TenantAdmin, Ledger and KnownKeys.
"""

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cluster.coordination.client import RedisAway
from cluster.coordination.moving_redis import MovingRedis
from cluster.coordination.request_redis import RequestRedis
from cluster.tenants.admin import StoreAdmin
from cluster.tenants.directory import TenantDirectory
from cluster.tenants.ledger import UsageLedger
from cluster.tenants.quota import Quota
from cluster.tenants.store import TenantStore
from configs.environment import short_temp_folder

TENANTS_FILE = "tenants.json"
SAVE_PERIOD_S = 5.0


class TenantService:
    """One per gateway. `folder`: where tenants and the journal outlive the gateway; None: a private one, removed."""

    def __init__(
        self,
        redis: MovingRedis,
        *,
        folder: str | None,
        redis_timeout_s: float,
        gateways: int,
        kv_tokens: Callable[[], int],
    ) -> None:
        self._private = Path(tempfile.mkdtemp(prefix="tl-", dir=short_temp_folder())) if folder is None else None
        place = self._private or Path(folder or ".")
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        gateway = secrets.token_hex(6)
        store = TenantStore(redis)
        self._requests = RequestRedis(lambda: redis.url, redis_timeout_s)
        self.directory = TenantDirectory(store, place / TENANTS_FILE)
        self.quota = Quota(self._requests, self.directory, gateway, gateways=gateways, kv_tokens=kv_tokens)
        self.admin = StoreAdmin(store, self.directory)
        self.ledger = UsageLedger(redis, place, gateway)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Reads the tenants, or what an earlier life has left of them; begins to keep up."""
        await self.directory.load()
        self.quota.restore(self.directory.saved_spent)
        with suppress(RedisAway):
            await self.directory.refresh()
        loop = asyncio.get_running_loop()
        work = {
            "tenants": self.directory.run(),
            "quotas": self.quota.run(),
            "ledger": self.ledger.run(),
            "saving tenants": self._save(),
        }
        self._tasks = [loop.create_task(coroutine, name=name) for name, coroutine in work.items()]

    async def seed(self) -> None:
        """For a Redis that is new or has lost its data; RedisAway."""
        await self.directory.refresh()

    async def close(self) -> None:
        """After the last request was settled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(RedisAway):
            await self.quota.beat()
        await self.directory.save(self.quota.spent())
        await self.ledger.close()
        await self._requests.close()
        if self._private is not None:
            await asyncio.to_thread(shutil.rmtree, self._private, True)

    async def _save(self) -> None:
        while True:
            await self.directory.save(self.quota.spent())
            await asyncio.sleep(SAVE_PERIOD_S)
